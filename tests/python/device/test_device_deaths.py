"""A rank that dies at any step of a group on GPUs: all others hear of it, and of which it was.

On emulated GPUs, whose driver kills the process at its n-th call.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_emulated_gpu, run_on_gpus, with_kernels
from test_errors import caught

import ringcomm

pytestmark = needs_emulated_gpu

GPU = "emugpu"
WORLD_SIZE, DIES = 3, 1
# Within 2 s on a machine with nothing else to do; far from the group's time-out on any.
PATIENCE_S, TIMEOUT_S = 15.0, 50.0
BOXES: dict[str, dict[str, str]] = {
    # With room for messages between all ranks.
    "two GPUs": {"RINGCOMM_EMULATOR_DEVICES": "2", "RINGCOMM_EMULATOR_SMS": "48"},
    "ipc": {"RINGCOMM_EMULATOR_VMM": "0", "RINGCOMM_EMULATOR_SMS": "48"},
    "turns": {"RINGCOMM_EMULATOR_MPS": "0"},
    "one GPU": {},
    "messages": {},
}


def go_through_everything(rank: int, in_turns: bool) -> None:
    group = dist.new_group()
    small, large = torch.ones(100, device=GPU), torch.ones(100_000, device=GPU)
    gathered = torch.zeros(WORLD_SIZE * 100, device=GPU)
    for _ in range(2):
        dist.all_reduce(small, group=group)
        dist.all_reduce(large, group=group)
        dist.all_gather_into_tensor(gathered, small, group=group)
    if not in_turns:
        following, previous = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
        batch = [
            dist.P2POp(dist.isend, large, following, group),
            dist.P2POp(dist.irecv, torch.empty_like(large), previous, group),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        shared = ringcomm.empty_shared(100_000, device=GPU, group=group)
        shared.fill_(1.0)
        dist.all_reduce(shared, group=group)
        graph = emugpu.CUDAGraph()
        with emugpu.graph(graph):
            dist.all_reduce(small, group=group)
        graph.replay()
    dist.barrier(group=group, device_ids=[emugpu.current_device()])
    dist.destroy_process_group(group)
    dist.barrier()  # of the hosts: who has died meanwhile is named here


def named(call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Which rank the error of a call names, and how long the call took."""
    begin = time.monotonic()
    error = caught(call, *args)
    return {**error, "seconds": time.monotonic() - begin}


def outcome(rank: int, in_turns: bool) -> dict[str, Any]:
    def whole() -> None:
        go_through_everything(rank, in_turns)
        dist.barrier()

    return named(whole)


def run(fn: Any, *args: Any, how: str, step: int = 0, world_size: int = WORLD_SIZE) -> list[Any]:
    """In one of the BOXES; rank DIES ends at that call of its driver, if it is told one."""
    env = {**({} if how == "messages" else with_kernels()), **BOXES[how]}
    own = [dict(env) for _ in range(world_size)]
    if step:
        own[DIES]["RINGCOMM_EMULATOR_DIE_AT"] = str(step)
    return run_on_gpus(
        world_size,
        fn,
        *args,
        env=own,
        fresh=True,
        may_die=[DIES],
        group_timeout_s=TIMEOUT_S,
        num_devices=int(env.get("RINGCOMM_EMULATOR_DEVICES", "1")),
    )


def assert_named(results: list[Any], step: int = 0) -> None:
    for rank, said in enumerate(results):
        if rank != DIES:
            assert (said.get("type"), said["rank"]) == ("PeerDiedError", DIES), (step, said)
            assert said["seconds"] < PATIENCE_S, (step, said)


def check_deaths(how: str, steps: Iterable[int]) -> int:
    """Returns at how many of the steps there was a rank to die: they end behind the last call."""
    num_died = 0
    for step in steps:
        results = run(outcome, how == "turns", how=how, step=step)
        if results[DIES] is not None:
            assert not any("type" in said for said in results), (step, results)
            break
        num_died += 1
        assert_named(results, step)
    return num_died


# The first calls come before the default group; those of a group's creation come next.
@pytest.mark.parametrize("how", ["two GPUs", "ipc", "turns"])
def test_a_rank_that_dies_at_a_step_is_named_by_all(how: str) -> None:
    assert check_deaths(how, [5, 40, 150, 230]) == 4


@pytest.mark.skipif("RINGCOMM_ALL_DEATHS" not in os.environ, reason="minutes: make test-deaths")
@pytest.mark.parametrize("how", ["two GPUs", "ipc", "turns"])
def test_a_rank_that_dies_at_any_step_is_named_by_all(how: str) -> None:
    assert check_deaths(how, range(5, 2000, 7)) > 30


def die_in_a_call(rank: int, in_turns: bool) -> dict[str, Any]:
    """The hosts have met, and the others' streams wait for what the dead rank's never came to."""
    group = dist.new_group()
    tensor = torch.ones(1000, device=GPU)
    dist.all_reduce(tensor, group=group)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if rank == DIES else None
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    if held is not None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        if in_turns:
            work.wait(datetime.timedelta(seconds=TIMEOUT_S))
        else:
            emugpu.synchronize()  # ends, long before the time-out
            work.wait()

    error = named(wait)
    dist.destroy_process_group(group)
    return error


@pytest.mark.parametrize("how", ["turns", "messages"])
def test_a_rank_that_dies_in_a_call_is_named_and_its_group_can_be_destroyed(how: str) -> None:
    assert_named(run(die_in_a_call, how == "turns", how=how))


def wait_late(rank: int) -> dict[str, Any]:
    """The kernel starts long after its launch, behind what its stream has yet to do."""
    tensor = torch.ones(100_000, device=GPU)
    dist.all_reduce(tensor)
    emugpu.synchronize()
    if rank == DIES:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    held = emugpu.hold(emugpu.current_stream())
    dist.all_reduce(tensor)
    time.sleep(1.5)
    held.release()

    def call() -> None:
        emugpu.synchronize()
        dist.barrier(device_ids=[emugpu.current_device()])

    return named(call)


def test_a_kernel_that_starts_long_after_its_launch_is_watched() -> None:
    assert_named(run(wait_late, how="one GPU", world_size=2))
