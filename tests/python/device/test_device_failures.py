"""Device collectives over messages that end early: limits of waits, deaths, aborts.

On emulated GPUs, over sends and receives that behave as NCCL's; more in test_gpu_faults.py.
"""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus

from ringcomm import CollectiveTimeoutError, PeerDiedError, RingcommError

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"


def run(world_size: int, fn: Any, *args: Any, **options: Any) -> list[Any]:
    return run_on_gpus(world_size, fn, *args, num_devices=2, **options)


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device(GPU))  # type: ignore[union-attr]


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def check_wait_with_limit(rank: int) -> None:
    dist.all_reduce(torch.ones(1, device=GPU))
    tensor = torch.ones(10, device=GPU)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce .*goes on"):
            work.wait(datetime.timedelta(milliseconds=100))
        store().set("rank 0 has waited", "yes")
        work.wait(datetime.timedelta(seconds=20))
    else:
        store().wait(["rank 0 has waited"])
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 10


def test_wait_with_a_limit() -> None:
    run(2, check_wait_with_limit)


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
    run(2, check_barrier, fresh=True)


def check_killed(rank: int) -> None:
    """All have made the call; what rank 1 was to send never comes."""
    dist.all_reduce(torch.ones(1, device=GPU))
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream()) if rank == 1 else None
    work = dist.all_reduce(torch.ones(300, device=GPU), async_op=True)
    assert work is not None
    dist.all_reduce(torch.ones(1))  # by the hosts, who have compared their calls then
    if held is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    emugpu.synchronize()  # ends, long before the time-out
    with pytest.raises(PeerDiedError, match=r"all_reduce #\d+ .*rank 1.* died"):
        work.wait()


def test_a_rank_that_dies_while_its_messages_are_awaited_is_named() -> None:
    run(2, check_killed, fresh=True, may_die=[1])


def check_abort(rank: int) -> None:
    dist.all_reduce(torch.ones(1, device=GPU))
    if rank == 0:
        works = [dist.all_reduce(torch.ones(5000, device=GPU), async_op=True) for _ in range(3)]
        backend().abort()
        emugpu.synchronize()  # ends though rank 1 never came
        for work in works:
            assert work is not None
            assert not work.is_success()
            with pytest.raises(RingcommError, match="aborted"):
                work.wait()
        for device in ("cpu", GPU):
            with pytest.raises(RingcommError, match="aborted"):
                dist.all_reduce(torch.ones(1, device=device))


def test_abort() -> None:
    run(2, check_abort, fresh=True)
