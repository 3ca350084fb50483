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
