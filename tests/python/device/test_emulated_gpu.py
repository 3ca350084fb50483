"""The emulated GPU as a device of torch: what tests of GPU code may rely on.

Streams are held by hold(), so that what is asynchronous shows without a clock.
"""

from __future__ import annotations

from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks, run_on_gpus

pytestmark = emulated_gpu.needs_emulated_gpu

# A held stream must not hold others that share its hardware queue.
SETTINGS = {"RINGCOMM_EMULATOR_DELAY_US": "500", "RINGCOMM_EMULATOR_QUEUES": "0"}


OPTIONS: dict[str, Any] = {"backend": None, "num_devices": 2, "env": SETTINGS}
alone = in_emulated_ranks(1, kernels=False, **OPTIONS)


@alone
def test_asynchronous(rank: int) -> None:
    side = torch.Stream(device="emugpu")
    x = torch.arange(1000, device="emugpu")
    y = torch.zeros_like(x)
    emugpu.synchronize()
    held = emugpu.hold(side)
    with side:
        assert emugpu.current_stream() == side
        y.copy_(x)
        done = side.record_event()
    assert emugpu.current_stream() != side
    assert not side.query()
    assert not done.query()
    assert torch.equal(y.cpu(), torch.zeros(1000, dtype=torch.int64))  # the copy waits, we do not
    emugpu.current_stream().wait_event(done)
    z = (y * 2).to(torch.float64).t().clone().add_(1)[::2]
    z[1:3].fill_(5)
    assert not emugpu.current_stream().query()
    held.release()
    expected = torch.arange(1000.0)[::2] * 2 + 1
    expected[1:3] = 5
    assert torch.equal(z.cpu(), expected.double())
    assert done.query()


@alone
@pytest.mark.parametrize("size", [2000, 3])
def test_resize(rank: int, size: int) -> None:
    """A tensor, and a storage, keep their content; memory that was freed is filled anew."""
    for _ in range(10):
        x = torch.arange(5, dtype=torch.uint8, device="emugpu") + 3
        y = x.clone()
        x.resize_(size)
        y.untyped_storage().resize_(size)
        kept = min(size, 5)
        expected = torch.arange(5, dtype=torch.uint8)[:kept] + 3
        assert torch.equal(x[:kept].cpu(), expected)
        y.resize_(kept)
        assert torch.equal(y.cpu(), expected)


def _freed_memory(rank: int, is_recorded: bool) -> list[int]:
    """A copy on a held stream from a tensor that goes meanwhile; what the copy reads."""
    side = torch.Stream(device="emugpu")
    x = torch.arange(1000, device="emugpu")
    y = torch.zeros_like(x)
    emugpu.synchronize()
    held = emugpu.hold(side)
    with side:
        y.copy_(x)
    if is_recorded:
        x.record_stream(side)
    del x
    again = torch.zeros(1000, dtype=torch.int64, device="emugpu")
    emugpu.current_stream().synchronize()
    held.release()
    side.synchronize()
    del again
    return y.tolist()


@alone
def test_memory_freed_on_its_own_stream(rank: int) -> None:
    side = torch.Stream(device="emugpu")
    with side:
        held = emugpu.hold(side)
        x = torch.full((1000,), 5, device="emugpu")
        y = torch.empty_like(x).copy_(x)
        del x  # its stream has yet to read it
        z = torch.zeros(1000, dtype=torch.int64, device="emugpu")
        held.release()
        assert y.tolist() == [5] * 1000
        assert z.tolist() == [0] * 1000


@alone
def test_memory_of_a_side_stream_is_used_again_in_its_order(rank: int) -> None:
    """fully_shard makes gradients on a stream of its own, the optimizer reads them on the current
    one, and the host frees them while it may still read: the next ones are made after a wait."""
    side, here = (torch.Stream(device="emugpu") for _ in range(2))
    with side:
        x = torch.full((1000,), 5, device="emugpu")
    y = torch.zeros(1000, dtype=torch.int64, device="emugpu")
    emugpu.synchronize()
    held = emugpu.hold(here)
    with here:
        y.copy_(x)
    del x  # of a stream that is idle
    side.wait_stream(here)
    with side:
        z = torch.zeros(1000, dtype=torch.int64, device="emugpu")
    held.release()
    emugpu.synchronize()
    assert y.tolist() == [5] * 1000
    assert z.tolist() == [0] * 1000


@alone
def test_captures(rank: int) -> None:
    x, total = torch.zeros(4, device="emugpu"), torch.zeros(4, device="emugpu")
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        y = x * 2 + torch.ones(4, device="emugpu")
        total.add_(y)
        del y  # of the graph all the same
    assert total.tolist() == [0.0] * 4
    others = [torch.full((4,), -5.0, device="emugpu") for _ in range(10)]
    for number in range(100):
        x.fill_(number)
        graph.replay()
    assert total.tolist() == [100.0 + 2 * sum(range(100))] * 4
    assert all(other.tolist() == [-5.0] * 4 for other in others)
    spoilt = emugpu.CUDAGraph()
    with pytest.raises(RuntimeError, match="STREAM_CAPTURE"), emugpu.graph(spoilt):
        x.sum().item()
    assert x.sum().item() == 4 * 99


@alone
def test_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        x = torch.arange(12.0, device="emugpu").view(3, 4).t()
        x[1].fill_(7)
        x[::2].add_(x[1::2]).mul_(2)
        loss = torch.nn.functional.mse_loss(x, torch.zeros_like(x))
    right = torch.arange(12.0).view(3, 4).t()
    right[1] = 7
    right[::2] = (right[::2] + right[1::2]) * 2
    assert torch.equal(x.cpu(), right)
    assert loss.item() == right.square().mean().item()


def test_memory_lives_until_streams_on_which_it_was_recorded_are_done() -> None:
    (recorded,), (other,) = (run_on_gpus(1, _freed_memory, r, **OPTIONS) for r in (True, False))
    assert recorded == list(range(1000))
    assert other in ([-1] * 1000, [0] * 1000)


# ---- emup2p, which stands in for NCCL where there is no GPU


MESSAGES: dict[str, Any] = {"kernels": False, "backend": "emugpu:emup2p", "env": SETTINGS}


@in_emulated_ranks(2, **MESSAGES)
def test_messages_match_in_the_order_of_calls(rank: int) -> None:
    tensors = [torch.full((numel,), numel, device="emugpu") for numel in (3, 1, 2)]
    for tag, tensor in enumerate(tensors):
        if rank == 0:
            dist.send(tensor, 1, tag=7 - tag)
        else:
            received = torch.zeros_like(tensor)
            dist.recv(received, 0, tag=tag)
            assert torch.equal(received.cpu(), tensor.cpu())


@in_emulated_ranks(2, group_timeout_s=0.7, fresh=True, **MESSAGES)
def test_messages_wait_for_each_other_outside_of_batches(rank: int) -> None:
    x, y = torch.ones(4, device="emugpu"), torch.zeros(4, device="emugpu")
    sent = dist.isend(x, 1 - rank)
    received = dist.irecv(y, 1 - rank)
    assert sent is not None
    assert received is not None
    emugpu.synchronize()
    assert y.tolist() == [0.0] * 4
    for work in (sent, received):
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match=f"sends to rank {1 - rank}, .* within 700 ms"):
            work.wait()
    with pytest.raises(RuntimeError, match="within 700 ms"):
        dist.isend(x, 1 - rank)


@in_emulated_ranks(3, **MESSAGES)
def test_collectives_of_the_backend(rank: int) -> None:
    """Of bytes in the backend's own order; parts differ in size, and have none."""
    world_size = dist.get_world_size()
    sizes = [(sender + 2 * receiver) % 3 for sender in range(3) for receiver in range(3)]
    sent = [torch.full((sizes[3 * rank + r],), 10.0 * rank + r, device="emugpu") for r in range(3)]
    received = [torch.zeros(sizes[3 * r + rank], device="emugpu") for r in range(3)]
    dist.all_to_all(received, sent)
    for sender, part in enumerate(received):
        assert part.tolist() == [10 * sender + rank] * sizes[3 * sender + rank]
    for root in range(world_size):
        tensor = torch.full((5,), float(rank), device="emugpu")
        dist.broadcast(tensor, root)
        assert tensor.tolist() == [root] * 5
