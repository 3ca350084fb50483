"""Ranks that die, give up or leave at different times: who hears of it, and what works then say.

On emulated GPUs, whose driver kills the process at its n-th call. The event of a stream passes when
what is in it is aborted, as it does when that is done: aborted works must never be taken for done.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Iterable
from itertools import product
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from cases import name_of, quick
from emulated_gpu import needs_emulated_gpu, run_on_gpus, with_kernels
from failures import timed
from gpu_ranks import meet

import ringcomm
from ringcomm import CollectiveTimeoutError, PeerDiedError, RingcommError

pytestmark = needs_emulated_gpu

GPU = "emugpu"
WORLD_SIZE, DIES = 3, 1
# Within 2 s on a machine with nothing else to do; far from the group's time-out on any.
PATIENCE_S, TIMEOUT_S = 45.0, 100.0
LIMIT = datetime.timedelta(seconds=TIMEOUT_S)
LATE_S = 0.5
BOXES: dict[str, dict[str, str]] = {
    # With room for messages between all ranks.
    "two GPUs": {"RINGCOMM_EMULATOR_DEVICES": "2", "RINGCOMM_EMULATOR_SMS": "48"},
    "one GPU": {},
    "messages": {},
}


def run(
    fn: Any,
    *args: Any,
    how: str = "messages",
    step: int = 0,
    world_size: int = WORLD_SIZE,
    hosts: str = "aaa",
    may_die: Iterable[int] = (DIES,),
    **settings: str,
) -> list[Any]:
    """In one of the BOXES; rank DIES ends at that call of its driver, if it is told one."""
    env = {**({} if how == "messages" else with_kernels()), **BOXES[how], **settings}
    own = [{**env, "RINGCOMM_HOST_ID": f"host-{host}"} for host in hosts[:world_size]]
    if step:
        own[DIES]["RINGCOMM_EMULATOR_DIE_AT"] = str(step)
    return run_on_gpus(
        world_size,
        fn,
        *args,
        env=own,
        fresh=True,
        may_die=list(may_die),
        group_timeout_s=TIMEOUT_S,
        num_devices=int(env.get("RINGCOMM_EMULATOR_DEVICES", "1")),
    )


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device(GPU))  # type: ignore[union-attr]


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


# ---- at any step


def go_through_everything(rank: int) -> None:
    group = dist.new_group()
    small, large = torch.ones(100, device=GPU), torch.ones(300_000, device=GPU)
    gathered = torch.zeros(WORLD_SIZE * 100, device=GPU)
    for _ in range(2):
        dist.all_reduce(small, group=group)
        dist.all_reduce(large, group=group)
        dist.all_gather_into_tensor(gathered, small, group=group)
    following, previous = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
    batch = [
        dist.P2POp(dist.isend, large, following, group),
        dist.P2POp(dist.irecv, torch.empty_like(large), previous, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    shared = ringcomm.empty_shared(300_000, device=GPU, group=group)
    shared.fill_(1.0)
    dist.all_reduce(shared, group=group)
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.all_reduce(small, group=group)
    graph.replay()
    dist.barrier(group=group, device_ids=[emugpu.current_device()])
    dist.destroy_process_group(group)
    dist.barrier()  # of the hosts: who has died meanwhile is named here


def outcome(rank: int) -> dict[str, Any]:
    def whole() -> None:
        go_through_everything(rank)
        dist.barrier()

    return timed(whole)


def assert_named(results: list[Any], step: int = 0) -> None:
    for rank, said in enumerate(results):
        if rank != DIES:
            assert (said.get("type"), said["rank"]) == ("PeerDiedError", DIES), (step, said)
            assert said["seconds"] < PATIENCE_S, (step, said)


def check_deaths(how: str, steps: Iterable[int]) -> int:
    """Returns at how many of the steps there was a rank to die: they end behind the last call."""
    num_died = 0
    for step in steps:
        results = run(outcome, how=how, step=step)
        if results[DIES] is not None:
            assert not any("type" in said for said in results), (step, results)
            break
        num_died += 1
        assert_named(results, step)
    return num_died


# The first calls come before the default group; those of a group's creation come next.
STEPS = product(["two GPUs", "one GPU"], [40, 150, 230])


@pytest.mark.parametrize(("how", "step"), quick(STEPS, ("one GPU", 230)))
def test_a_rank_that_dies_at_a_step_is_named_by_all(how: str, step: int) -> None:
    assert check_deaths(how, [step]) == 1


@pytest.mark.skipif(os.environ.get("RINGCOMM_DEATHS") != "all", reason="minutes: .ci/run deaths")
@pytest.mark.parametrize("how", ["two GPUs", "one GPU"])
def test_a_rank_that_dies_at_any_step_is_named_by_all(how: str) -> None:
    assert check_deaths(how, range(5, 2000, 7)) > 30


# ---- in a call


def start(is_held: bool) -> tuple[Any, Any]:
    """An all_reduce that all hosts have called; a rank that is held has not done its part of it."""
    tensor = torch.ones(1000, device=GPU)
    dist.all_reduce(tensor)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if is_held else None
    work = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(1))  # the hosts have compared the calls before
    return work, held


def poll(work: Any) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return bool(work.is_success())


def ask_after_a_death(rank: int, asks: str) -> None:
    """The group can be destroyed then."""
    work, held = start(rank == DIES)
    if held is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if asks == "poll":
        assert not poll(work)
    with pytest.raises(PeerDiedError) as error:
        work.wait(LIMIT)
    assert error.value.rank == DIES
    assert not work.is_success()
    assert work.is_completed()
    dist.destroy_process_group()
    assert time.monotonic() - begin < PATIENCE_S


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


def wait_late(rank: int) -> None:
    """The kernel starts long after its launch, behind what its stream has yet to do."""
    tensor = torch.ones(100_000, device=GPU)
    dist.all_reduce(tensor)
    emugpu.synchronize()
    meet()
    if rank == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    held = emugpu.hold(emugpu.current_stream())
    dist.all_reduce(tensor)
    time.sleep(1.5)
    held.release()

    def call() -> None:
        emugpu.synchronize()
        dist.barrier(device_ids=[emugpu.current_device()])

    assert_named([timed(call)])


# ---- by giving up


def end_undone(rank: int) -> None:
    """Rank 1 gives up, and its stream goes on: what it passes on then completes rank 2's call."""
    tensor = torch.full((300_000,), float(rank), device=GPU)  # as many go around the ring
    dist.all_reduce(tensor)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if rank == 0 else None
    work: Any = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(1))  # the hosts have compared the calls before
    meet()
    if rank == 1:
        backend().abort()
    with pytest.raises(RingcommError, match="aborted"):
        work.wait(LIMIT)
    assert not work.is_success()
    if held is not None:
        held.release()


def fail_alone(rank: int) -> None:
    """All ranks live, and what carries the messages fails by itself."""
    work, held = start(rank == 1)
    if held is not None:
        time.sleep(1.5)
        held.release()
    with pytest.raises(RingcommError, match="failed on its device"):
        work.wait(LIMIT)
    assert not work.is_success()


def barrier(timeout_s: float) -> None:
    options = dist.BarrierOptions()
    options.device = torch.device(GPU)
    options.timeout = datetime.timedelta(seconds=timeout_s)
    backend().barrier(options).wait()


def check_limits(rank: int) -> None:
    """A wait that gives up leaves the work going; a barrier has the host wait."""
    tensor = torch.ones(10, device=GPU)
    barrier(20.0)
    if rank == 0:
        work: Any = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce .*continues"):
            work.wait(datetime.timedelta(milliseconds=100))
        store().set("rank 0 has waited", "yes")
        work.wait(datetime.timedelta(seconds=20))
    else:
        store().wait(["rank 0 has waited"])
        dist.all_reduce(tensor)
        held = emugpu.hold(emugpu.current_stream())
        store().set("rank 1 comes", "yes")
        held.release()
    barrier(20.0)
    assert tensor.tolist() == [2.0] * 10
    assert store().check(["rank 1 comes"])
    if rank == 0:  # rank 1 comes no more
        with pytest.raises(RingcommError, match=r"barrier waited for all ranks for 200 ms"):
            barrier(0.2)
        emugpu.synchronize()  # what was enqueued has ended
        with pytest.raises(RingcommError, match=r"barrier waited for all ranks"):
            dist.all_reduce(torch.ones(1, device=GPU))


def check_abort(rank: int) -> None:
    dist.all_reduce(torch.ones(1, device=GPU))
    meet()
    if rank == 0:
        tensor = torch.ones(5000, device=GPU)
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        backend().abort()
        emugpu.synchronize()  # ends though rank 1 never came
        for work in works:
            assert not work.is_success()
            with pytest.raises(RingcommError, match="aborted"):
                work.wait()
        for device in ("cpu", GPU):
            with pytest.raises(RingcommError, match="aborted"):
                dist.all_reduce(torch.ones(1, device=device))


# ---- by leaving


def use(group: Any) -> None:
    tensor = torch.ones(100_000, device=GPU)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size()] * 100_000


def check_leaving(rank: int, late: int) -> None:
    """A tensor that peers use where it is outlives the group on one rank, where there is one."""
    group = dist.new_group()
    use(group)
    tensor = ringcomm.empty_shared(1_000_000, device=GPU, group=group)
    dist.all_reduce(tensor.fill_(1.0), group=group)
    if rank == late:
        del tensor
        time.sleep(LATE_S)
    dist.destroy_process_group(group)
    use(None)
    if rank != late:
        assert tensor.unique().tolist() == [2.0]


def check_freed_at_once(rank: int) -> None:
    """Where the other rank has died."""
    use(None)
    if rank == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 4.0


ALL_LIVE: dict[str, Any] = {"world_size": 2, "may_die": ()}


@pytest.mark.parametrize(
    ("body", "args", "how"),
    [
        (ask_after_a_death, ["wait"], {}),
        (ask_after_a_death, ["poll"], {}),
        (ask_after_a_death, ["poll"], {"how": "two GPUs"}),
        (ask_a_batch, [], {"world_size": 2}),
        (wait_late, [], {"world_size": 2, "how": "one GPU"}),
        (end_undone, [], {}),
        (end_undone, [], {"hosts": "aba"}),
        (fail_alone, [], {"world_size": 2, "RINGCOMM_EMULATOR_P2P_TIMEOUT_MS": "400"}),
        (check_limits, [], ALL_LIVE),
        (check_abort, [], ALL_LIVE),
        (check_leaving, [0], ALL_LIVE | {"how": "two GPUs"}),
        (check_leaving, [1], ALL_LIVE | {"how": "one GPU"}),
        (check_freed_at_once, [], {"world_size": 2, "how": "two GPUs"}),
    ],
    ids=name_of,
)
def test_what_ranks_hear(body: Any, args: list[Any], how: dict[str, Any]) -> None:
    run(body, *args, **how)
