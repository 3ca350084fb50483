"""Groups on emulated GPUs that ranks leave at different times or by dying; limits of waits, aborts.

The emulator ends a process that frees memory or an event that another process has open.
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
from test_device_transports import transport

import ringcomm
from ringcomm import CollectiveTimeoutError, RingcommError

pytestmark = needs_emulated_gpu

GPU = "emugpu"
BY_IPC = {"RINGCOMM_EMULATOR_VMM": "0"}
IN_TURNS = {"RINGCOMM_EMULATOR_MPS": "0"}
LATE_S = 0.5


def run(fn: Any, *args: Any, env: dict[str, str], world_size: int = 2, **options: Any) -> list[Any]:
    env = {**with_kernels(), **env}
    return run_on_gpus(world_size, fn, *args, env=env, fresh=True, **options)


def use(group: Any) -> None:
    tensor = torch.ones(100_000, device=GPU)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size()] * 100_000


def check_leaving(rank: int, late: int) -> None:
    """A tensor that peers use where it is outlives the group on one rank, where there is one."""
    group = dist.new_group()
    use(group)
    tensor = torch.ones(1)
    if "RINGCOMM_EMULATOR_VMM" in os.environ:
        tensor = ringcomm.empty_shared(100_000, device=GPU, group=group)
        dist.all_reduce(tensor.fill_(1.0), group=group)
    if rank == late:
        del tensor
        time.sleep(LATE_S)
    dist.destroy_process_group(group)
    use(None)
    if rank != late and "RINGCOMM_EMULATOR_VMM" in os.environ:
        assert tensor.tolist() == [2.0] * 100_000


@pytest.mark.parametrize(("env", "late"), [(BY_IPC, 0), (IN_TURNS, 1)], ids=["ipc", "turns"])
def test_ranks_free_what_others_have_open_when_those_have_closed_it(
    env: dict[str, str], late: int
) -> None:
    run(check_leaving, late, env=env)


def check_death(rank: int) -> float:
    use(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - begin


@pytest.mark.parametrize("env", [BY_IPC, IN_TURNS], ids=["ipc", "turns"])
def test_what_a_killed_rank_had_open_is_freed_at_once(env: dict[str, str]) -> None:
    took_s, _ = run(check_death, env=env, may_die=[1], group_timeout_s=60.0)
    assert took_s < 4.0  # the patience with ranks that live is 5 s


def check_kept_open(rank: int) -> None:
    group = dist.new_group()
    use(group)
    if rank == 0:
        dist.destroy_process_group(group)  # gives up waiting, and frees nothing
        emugpu.synchronize()
        store().set("rank 0 has left", "yes")
    else:
        store().wait(["rank 0 has left"])
        dist.destroy_process_group(group)
    use(None)


@pytest.mark.slow
def test_a_rank_that_does_not_leave_is_not_waited_for_for_ever() -> None:
    run(check_kept_open, env=BY_IPC)


def test_events_are_closed_where_another_rank_has_none() -> None:
    """Two ranks have each other's events open when the third says that it cannot hand out its."""
    env = {**with_kernels(), **IN_TURNS}
    own = [env, {**env, "RINGCOMM_EMULATOR_IPC": "0"}, env]
    assert run_on_gpus(3, transport, env=own, fresh=True) == ["p2p over emup2p"] * 3


# ---- over messages


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device(GPU))  # type: ignore[union-attr]


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def check_wait_with_limit(rank: int) -> None:
    dist.all_reduce(torch.ones(1, device=GPU))
    tensor = torch.ones(10, device=GPU)
    if rank == 0:
        work: Any = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce .*goes on"):
            work.wait(datetime.timedelta(milliseconds=100))
        store().set("rank 0 has waited", "yes")
        work.wait(datetime.timedelta(seconds=20))
    else:
        store().wait(["rank 0 has waited"])
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 10


def barrier(timeout_s: float) -> None:
    options = dist.BarrierOptions()
    options.device = torch.device(GPU)
    options.timeout = datetime.timedelta(seconds=timeout_s)
    backend().barrier(options).wait()


def check_barrier(rank: int) -> None:
    barrier(20.0)
    if rank == 1:
        held = emugpu.hold(emugpu.current_stream())
        store().set("rank 1 comes", "yes")
        held.release()
    barrier(20.0)
    assert store().check(["rank 1 comes"])
    if rank == 0:  # rank 1 comes no more
        with pytest.raises(RingcommError, match=r"barrier waited for all ranks for 200 ms"):
            barrier(0.2)
        emugpu.synchronize()  # what was enqueued has ended
        with pytest.raises(RingcommError, match=r"barrier waited for all ranks"):
            dist.all_reduce(torch.ones(1, device=GPU))


def test_barrier_has_the_host_wait() -> None:
    run_on_gpus(2, check_barrier, fresh=True)


def check_abort(rank: int) -> None:
    dist.all_reduce(torch.ones(1, device=GPU))
    if rank == 0:
        works: list[Any] = [
            dist.all_reduce(torch.ones(5000, device=GPU), async_op=True) for _ in range(3)
        ]
        backend().abort()
        emugpu.synchronize()  # ends though rank 1 never came
        for work in works:
            assert not work.is_success()
            with pytest.raises(RingcommError, match="aborted"):
                work.wait()
        for device in ("cpu", GPU):
            with pytest.raises(RingcommError, match="aborted"):
                dist.all_reduce(torch.ones(1, device=device))


def test_abort() -> None:
    run_on_gpus(2, check_abort, fresh=True)
