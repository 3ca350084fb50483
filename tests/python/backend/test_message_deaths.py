"""Ranks that die, stop or become another program in groups over messages, and on several hosts.

The ranks of both share a machine and so watch each other's processes. At every step, without torch
and Gloo: tests/cpp/test_deaths.cc.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import test_faults
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_faults import SOON_S, end_process, kill_named, timed

P2P = {"RINGCOMM_TRANSPORT": "p2p"}
ENVS: dict[str, Any] = {
    "shm": None,
    "p2p": P2P,
    "hosts": [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in "aba"],
}


# ---- while a group is made


@pytest.mark.parametrize(
    ("env", "victim", "how"),
    [("p2p", 0, "kill"), ("p2p", 1, "exec"), ("hosts", 0, "exec"), ("hosts", 2, "kill")],
)
def test_end_behind_operations_of_the_store(tmp_path: Any, env: str, victim: int, how: str) -> None:
    test_faults.die_behind_operations(tmp_path, victim, how, 13, ENVS[env])


def end_in_connecting(rank: int, path: str, how: str, when: str) -> dict[str, Any]:
    """Rank 1 ends before Gloo connects, or when only its own end is made."""
    make = dist.ProcessGroupGloo

    def make_own(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            make(*args, **kwargs)
        end_process(how)

    if rank == 1:
        dist.ProcessGroupGloo = make_own  # type: ignore[assignment,misc]
    error = timed(
        lambda: dist.init_process_group(
            "ringcomm",
            store=dist.FileStore(path, 3),
            rank=rank,
            world_size=3,
            timeout=datetime.timedelta(seconds=3 if how == "stop" else 60),
        )
    )
    time.sleep(0.5)  # the other one sees the same
    kill_named(error)
    return error


@pytest.mark.parametrize(
    ("env", "how", "when"),
    [
        ("p2p", "kill", "before"),
        ("p2p", "kill", "after"),
        ("hosts", "exec", "before"),
        ("hosts", "stop", "before"),
    ],
)
def test_end_while_gloo_connects(tmp_path: Any, env: str, how: str, when: str) -> None:
    path = str(tmp_path / "store")
    kind: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [1], "env": ENVS[env]}
    for error in run_ranks(3, end_in_connecting, path, how, when, **kind)[::2]:
        kind_of_error = "CollectiveTimeoutError" if how == "stop" else "PeerDiedError"
        assert (error["type"], error["rank"]) == (kind_of_error, 1), error
        assert error["seconds"] < (3 if how == "stop" else 1) + SOON_S, error


def interrupt_connecting(rank: int, path: str) -> tuple[str, float]:
    """Rank 1 is late for Gloo's connecting."""

    def make_late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2.0)
        raise OSError("too late")

    if rank == 1:
        dist.ProcessGroupGloo = make_late  # type: ignore[assignment,misc]
    store = dist.FileStore(path, 2)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    kind = "nothing"
    try:
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    return kind, time.monotonic() - begin


def test_ctrl_c_while_gloo_connects(tmp_path: Any) -> None:
    path = str(tmp_path / "store")
    for kind, seconds in run_ranks(
        2, interrupt_connecting, path, backend=None, fresh=True, env=P2P
    ):
        assert kind == "KeyboardInterrupt"
        assert seconds < 0.5 + SOON_S


@pytest.mark.parametrize("env", ENVS)
def test_death_before_a_new_group(env: str) -> None:
    """Known from the group of all ranks: nothing of rank 1 is in the store."""
    for error in run_ranks(
        3, test_faults.make_group_after_death, fresh=True, may_die=[1], env=ENVS[env]
    )[::2]:
        assert (error["type"], error["rank"]) == ("PeerDiedError", 0), error
        assert error["seconds"] < SOON_S


# ---- in a call


def end_in_call(rank: int, name: str, how: str) -> dict[str, Any]:
    """Rank 1 ends; the others are in a call that needs it, or that needs one that needs it."""
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)
        end_process(how)
    if name == "ring":
        error = timed(lambda: dist.all_reduce(torch.ones(3_000_000)))
    elif rank == 2:  # waits for rank 1
        error = timed(lambda: dist.recv(torch.ones(10), 1))
    else:  # and rank 0 for rank 2
        error = timed(lambda: dist.recv(torch.ones(10), 2 if name == "chain" else None))
    time.sleep(0.5)  # the other one sees the same
    kill_named(error)
    return error


@pytest.mark.parametrize(
    ("env", "how", "name"),
    [
        ("p2p", "exec", "ring"),
        ("p2p", "exec", "any"),
        ("p2p", "stop", "ring"),
        ("p2p", "stop", "chain"),
        ("hosts", "exec", "chain"),
        ("hosts", "stop", "any"),
        ("shm", "stop", "chain"),
    ],
)
def test_end_in_a_call(env: str, how: str, name: str) -> None:
    timeout_s = 1.5 if how == "stop" else 60.0
    kind: dict[str, Any] = {"fresh": True, "may_die": [1], "env": ENVS[env]}
    results = run_ranks(3, end_in_call, name, how, group_timeout_s=timeout_s, **kind)
    for error in results[::2]:
        kind_of_error = "CollectiveTimeoutError" if how == "stop" else "PeerDiedError"
        assert (error["type"], error["rank"]) == (kind_of_error, 1), error
        assert error["seconds"] < (timeout_s if how == "stop" else 0.1) + SOON_S, error
