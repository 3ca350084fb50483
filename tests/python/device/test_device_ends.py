"""Works of device collectives that were aborted are never taken for done, however one asks.

On emulated GPUs. The event of a stream passes when what is in it is aborted, as it does when that
is done.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_emulated_gpu, run_on_gpus, with_kernels

from ringcomm import PeerDiedError, RingcommError

pytestmark = needs_emulated_gpu

GPU = "emugpu"
DIES = 1
TIMEOUT_S, PATIENCE_S = 50.0, 15.0
LIMIT = datetime.timedelta(seconds=TIMEOUT_S)
BOXES: dict[str, dict[str, str]] = {
    "messages": {},
    "two GPUs": {"RINGCOMM_EMULATOR_DEVICES": "2", "RINGCOMM_EMULATOR_SMS": "48"},
    "turns": {"RINGCOMM_EMULATOR_MPS": "0"},
}


def run(
    fn: Any,
    *args: Any,
    how: str = "messages",
    world_size: int = 2,
    hosts: str = "aaa",
    **settings: str,
) -> None:
    env = {**({} if how == "messages" else with_kernels()), **BOXES[how], **settings}
    run_on_gpus(
        world_size,
        fn,
        *args,
        env=[{**env, "RINGCOMM_HOST_ID": f"host-{host}"} for host in hosts[:world_size]],
        fresh=True,
        may_die=[DIES],
        group_timeout_s=TIMEOUT_S,
        num_devices=int(env.get("RINGCOMM_EMULATOR_DEVICES", "1")),
    )


def start(rank: int, holds: bool) -> tuple[Any, Any]:
    """An all_reduce that all hosts have called; a rank that holds has not done its part of it."""
    tensor = torch.ones(1000, device=GPU)
    dist.all_reduce(tensor)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if holds else None
    work = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(1))  # the hosts have compared the calls before
    return work, held


def poll(work: Any) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return bool(work.is_success())


def ask_after_a_death(rank: int, asks: str, in_turns: bool) -> None:
    if in_turns:  # the hosts meet in the call: none gets past it before rank DIES is in it
        tensor = torch.ones(1000, device=GPU)
        dist.all_reduce(tensor)
        emugpu.synchronize()
        held = emugpu.hold(emugpu.current_stream()) if rank == DIES else None
        work = dist.all_reduce(tensor, async_op=True)
    else:
        work, held = start(rank, rank == DIES)
    if held is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    assert work is not None
    begin = time.monotonic()
    if asks == "poll":
        assert not poll(work)
    with pytest.raises(PeerDiedError) as caught:
        work.wait(LIMIT)
    assert caught.value.rank == DIES
    assert not work.is_success()
    assert work.is_completed()
    assert time.monotonic() - begin < PATIENCE_S


@pytest.mark.parametrize("asks", ["wait", "poll"])
@pytest.mark.parametrize("how", BOXES)
def test_a_call_in_which_a_rank_died(how: str, asks: str) -> None:
    run(ask_after_a_death, asks, how == "turns", how=how, world_size=3)


def ask_a_batch(rank: int) -> None:
    """A work of several calls, of which the last is not done."""
    first, second = torch.ones(10, device=GPU), torch.ones(300, device=GPU)
    dist.all_reduce(first)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if rank == DIES else None
    with dist._coalescing_manager(device=torch.device(GPU), async_ops=True) as manager:
        dist.all_reduce(first)
        dist.all_reduce(second)
    dist.all_reduce(torch.ones(1))
    if held is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    (work,) = manager.works
    assert not poll(work)
    with pytest.raises(PeerDiedError):
        work.wait(LIMIT)


def test_a_work_of_several_calls() -> None:
    run(ask_a_batch)


def end_undone(rank: int) -> None:
    """Rank 1 gives up, and its stream goes on: what it passes on then completes rank 2's call."""
    tensor = torch.full((300_000,), float(rank), device=GPU)  # as many go from rank to rank
    dist.broadcast(tensor, 0)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if rank == 0 else None
    work: Any = dist.broadcast(tensor, 0, async_op=True)
    dist.all_reduce(torch.ones(1))  # the hosts have compared the calls before
    if rank == 1:
        backend: Any = dist.group.WORLD._get_backend(torch.device(GPU))  # type: ignore[union-attr]
        backend.abort()
    with pytest.raises(RingcommError, match="aborted"):
        work.wait(LIMIT)
    assert not work.is_success()
    if held is not None:
        held.release()


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_a_call_that_another_rank_has_given_up(hosts: str) -> None:
    run(end_undone, world_size=3, hosts=hosts)


def fail_alone(rank: int) -> None:
    """All ranks live, and what carries the messages fails by itself."""
    work, held = start(rank, rank == 1)
    if held is not None:
        time.sleep(1.5)
        held.release()
    with pytest.raises(RingcommError, match="gave up"):
        work.wait(LIMIT)
    assert not work.is_success()


def test_messages_that_fail_by_themselves() -> None:
    run(fail_alone, RINGCOMM_EMULATOR_P2P_TIMEOUT_MS="400")
