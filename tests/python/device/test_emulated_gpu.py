"""The emulated GPU as a device of torch: what tests of GPU code may rely on.

Streams are held by hold(), so that what is asynchronous shows without a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus

pytestmark = emulated_gpu.needs_emulated_gpu

DELAYS = {"RINGCOMM_EMULATOR_DELAY_US": "500"}


def run(fn: Callable[..., Any], *args: Any) -> Any:
    return run_on_gpus(1, fn, *args, backend=None, num_devices=2, env=DELAYS)[0]


def _operators(rank: int) -> None:
    """Of the host's own, on copies; what a kernel of the host gives, with views and holes."""

    def calculate(device: str) -> list[torch.Tensor]:
        x = torch.arange(12.0, device=device).reshape(3, 4)
        y = torch.full((3, 4), 2.0, device=device)
        y[1].zero_()
        y.t()[2].fill_(7)
        z = torch.view_as_complex(x.reshape(3, 2, 2).clone())
        w = torch.empty(2, device=device).resize_(3, 4).copy_(x).mul_(y).add_(1, alpha=2)
        holes = torch.zeros(3, 8, dtype=torch.float64, device=device)
        holes[:, ::2].copy_(x, non_blocking=True)
        results = [x @ y.t(), torch.cat([x, y]), (x * y).sum(0), torch.view_as_real(z * z), w]
        results += [x.view(torch.int32), x.flatten().unfold(0, 3, 2), torch.topk(x, 2)[1], holes]
        results += [torch.where(x > 5, x, y), x.double().cumsum(1), x[x > 3], x[y.argmax(0)]]
        return results

    for ours, oracle in zip(calculate("emugpu"), calculate("cpu"), strict=True):
        assert ours.device.type == "emugpu"
        assert torch.equal(ours.cpu(), oracle)
    assert torch.equal(calculate("emugpu")[0].to("emugpu:1").t().to("cpu"), calculate("cpu")[0].t())
    pinned = torch.arange(4).pin_memory()
    assert pinned.is_pinned()
    assert torch.equal(pinned.to("emugpu", non_blocking=True).cpu(), pinned)


def _devices(rank: int) -> None:
    assert (emugpu.device_count(), emugpu.current_device()) == (2, 0)
    with emugpu.device(1):
        assert torch.ones(1, device="emugpu").device.index == 1
    assert emugpu.current_device() == 0
    with pytest.raises(RuntimeError, match="only 2 are emulated"):
        torch.ones(1, device="emugpu:2")


def _asynchronous(rank: int) -> None:
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


def _failure(rank: int) -> None:
    x = torch.arange(4, device="emugpu")
    x.index_select(0, torch.tensor([7], device="emugpu"))
    with pytest.raises(RuntimeError, match=r"on a stream of an emulated GPU: .*index out of range"):
        emugpu.synchronize()
    emugpu.synchronize()


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


def test_memory_lives_until_streams_on_which_it_was_recorded_are_done() -> None:
    assert run(_freed_memory, True) == list(range(1000))
    assert run(_freed_memory, False) in ([-1] * 1000, [0] * 1000)


def _freed_on_its_own_stream(rank: int) -> None:
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


def _captured(rank: int) -> None:
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


CHECKS = [_operators, _devices, _asynchronous, _failure, _freed_on_its_own_stream, _captured]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[1:])
def test_emulated_gpu(check: Callable[[int], None]) -> None:
    run(check)


# ---- emup2p, which stands in for NCCL's sends and receives where there is no GPU


def _in_order(rank: int) -> None:
    tensors = [torch.full((numel,), numel, device="emugpu") for numel in (3, 1, 2)]
    for tag, tensor in enumerate(tensors):
        if rank == 0:
            dist.send(tensor, 1, tag=7 - tag)
        else:
            received = torch.zeros_like(tensor)
            dist.recv(received, 0, tag=tag)
            assert torch.equal(received.cpu(), tensor.cpu())


def _both_send_first(rank: int) -> None:
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


def test_messages_match_in_the_order_of_calls_and_wait_for_each_other_outside_of_batches() -> None:
    options: dict[str, Any] = {"backend": "emugpu:emup2p", "env": DELAYS}
    run_on_gpus(2, _in_order, **options)
    run_on_gpus(2, _both_send_first, group_timeout_s=0.7, fresh=True, **options)
