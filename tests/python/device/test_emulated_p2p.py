"""emup2p, which stands in for NCCL's sends and receives where there is no GPU."""

from __future__ import annotations

from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus

pytestmark = emulated_gpu.needs_emulated_gpu

DELAYS = {"RINGCOMM_EMULATOR_DELAY_US": "300"}


def run(world_size: int, fn: Any, *args: Any, **options: Any) -> list[Any]:
    return run_on_gpus(world_size, fn, *args, backend="emugpu:emup2p", env=DELAYS, **options)


def _message(source: int, to: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int64) * 100 + source * 10 + to


def _all_at_once(rank: int, numel: int) -> None:
    world_size = dist.get_world_size()
    others = [peer for peer in range(world_size) if peer != rank]
    received = {peer: torch.empty(numel, dtype=torch.int64, device="emugpu") for peer in others}
    ops = []
    for peer in others:
        message = _message(rank, peer, numel).to("emugpu").add_(0)
        ops.append(dist.P2POp(dist.isend, message, peer))
        ops.append(dist.P2POp(dist.irecv, received[peer], peer))
    del message  # what is under way is kept
    works = dist.batch_isend_irecv(ops)
    del ops
    for work in works:
        work.wait()
    for peer in others:
        assert torch.equal(received[peer].cpu(), _message(peer, rank, numel))
    assert all(work.is_completed() and work.exception() is None for work in works)


@pytest.mark.parametrize("numel", [1, 30_000])
def test_messages_of_a_batch_run_together(numel: int) -> None:
    run(3, _all_at_once, numel)


def _in_order(rank: int) -> None:
    tensors = [torch.full((numel,), numel, device="emugpu") for numel in (3, 1, 2)]
    for tag, tensor in enumerate(tensors):
        if rank == 0:
            dist.send(tensor, 1, tag=7 - tag)
        else:
            received = torch.zeros_like(tensor)
            dist.recv(received, 0, tag=tag)
            assert torch.equal(received.cpu(), tensor.cpu())


def test_messages_match_in_the_order_of_calls_whatever_their_tags() -> None:
    run(2, _in_order)


def _wait(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    x = torch.full((4,), float(rank), device="emugpu")
    if rank == 0:
        work = dist.isend(x, 1)
        assert work is not None
        work.wait()
        assert not emugpu.current_stream().query()
        assert not work.is_completed()
        store.set("rank 0 is here", "yes")
        emugpu.synchronize()
        assert work.is_success()
    else:
        store.wait(["rank 0 is here"])
        held = emugpu.hold(emugpu.current_stream())
        y = x + 1  # late, and the receive is behind it
        work = dist.irecv(x, 0)
        assert work is not None
        work.wait()
        z = x.clone()
        held.release()
        assert (y.tolist(), z.tolist()) == ([2.0] * 4, [0.0] * 4)


def test_wait_lets_the_stream_wait_and_not_the_host() -> None:
    run(2, _wait)


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


def test_two_ranks_that_both_send_first_outside_of_a_batch_wait_for_each_other() -> None:
    run(2, _both_send_first, group_timeout_s=0.7, fresh=True)


def _wrong_arguments(rank: int) -> None:
    for tensor, error in (
        (torch.ones(4), "No backend type associated"),
        (torch.ones(4, 4, device="emugpu").t()[1:], "contiguous"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=error):
            dist.send(tensor, 1 - rank)


def test_what_it_cannot_send_is_refused() -> None:
    run(2, _wrong_arguments)
