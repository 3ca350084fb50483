"""Jobs that are stopped as a whole for longer than the groups' timeout, and go on.

As by Slurm's suspend (https://github.com/ROCm/spur/issues/270), Ctrl-Z or `docker pause`.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import ENVS, caught

import ringcomm

TIMEOUT_S, STOPPED_S, LATE_S = 3, 5, 5.5


def asynchronous(group: Any) -> Any:
    return dist.all_reduce(torch.ones(10), group=group, async_op=True)


def all_reduce(group: Any) -> None:
    x = torch.ones(3_000_000)
    dist.all_reduce(x, group=group)
    assert (x == 3).all()


def message(group: Any, is_any: bool = False) -> None:
    x = torch.full((10,), 7.0 * (dist.get_rank() == 0))
    if dist.get_rank() == 0:
        dist.send(x, 1, group)
        dist.send(x, 2, group)
    else:
        dist.recv(x, None if is_any else 0, group)
    assert (x == 7).all()


WAITS = {
    "all_reduce": all_reduce,
    "recv": message,
    "recv_any": lambda group: message(group, is_any=True),
    "async": lambda group: asynchronous(group).wait(),
    "future": lambda group: asynchronous(group).get_future().wait(),
    "monitored": ringcomm.monitored_barrier,
}


def be_stopped(rank: int) -> dict[str, Any]:
    """Ranks 1 and 2 wait in every way, and for a new group, while all ranks are stopped."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    groups = {name: dist.new_group(None, timeout) for name in WAITS}
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        names = " ".join(map(str, pids))
        stop = f"sleep 0.2; kill -STOP {names}; sleep {STOPPED_S}; kill -CONT {names}"
        with subprocess.Popen(["sh", "-c", stop]):
            time.sleep(LATE_S)
    errors: dict[str, Any] = {}

    def wait(name: str) -> None:
        errors[name] = caught(WAITS[name], groups[name])

    threads = [threading.Thread(target=wait, args=(name,)) for name in WAITS]
    for thread in threads:
        thread.start()
    errors["new_group"] = caught(lambda: all_reduce(dist.new_group(None, timeout)))
    for thread in threads:
        thread.join(30)
    return errors


@pytest.mark.parametrize("env", ENVS)
def test_time_in_which_no_rank_ran_makes_none_late(env: str) -> None:
    for errors in run_ranks(3, be_stopped, fresh=True, env=ENVS[env]):
        assert errors == {name: {} for name in (*WAITS, "new_group")}
