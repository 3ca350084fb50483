"""Ranks that are interrupted, stopped, forked, or destroy a group early: what the others do.

Ranks that are lost or call something else: test_failures.py.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from failures import (
    ENVS,
    SOON_S,
    TRANSPORTS,
    caught,
    end_process,
    in_threads,
    interrupted,
)
from ranks import in_ranks, init_group

import ringcomm
from ringcomm import ops

MESSAGES = {name: env for name, env in ENVS.items() if name != "shm"}


def asynchronous(group: Any) -> Any:
    return dist.all_reduce(torch.ones(10), group=group, async_op=True)


# ---- limits of waits


@in_ranks(2)
def test_wait_with_a_limit(rank: int) -> None:
    """A wait that gives up leaves the work going; it may be waited for again."""
    tensor = torch.ones(4)
    if rank == 1:
        time.sleep(0.4)
    work: Any = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(TimeoutError, match="100 ms"):
            work.wait(datetime.timedelta(milliseconds=100))
        assert not work.is_completed()
    assert work.wait(datetime.timedelta(seconds=10))
    assert tensor.tolist() == [2, 2, 2, 2]


# ---- a job that is stopped as a whole for longer than the groups' timeout

TIMEOUT_S, STOPPED_S, LATE_S = 3, 5, 5.5


def sum_all(group: Any) -> None:
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


FROM_RANK_0: dict[str, Callable[[Any], Any]] = {
    "async": lambda group: asynchronous(group).wait(),
    "future": lambda group: asynchronous(group).get_future().wait(),
    "monitored": lambda group: ringcomm.monitored_barrier(group, datetime.timedelta(seconds=20)),
    "all_reduce": sum_all,
    "recv": message,
    "recv_any": lambda group: message(group, is_any=True),
}


@in_ranks(fresh=True)
@pytest.mark.parametrize("env", ["aaa", slow("---"), slow("aba")])
def test_time_in_which_no_rank_ran_makes_none_late(rank: int, env: str) -> None:
    """Ranks 1 and 2 wait in every way, and for a new group, while all ranks are stopped.

    As by Slurm's suspend (https://github.com/ROCm/spur/issues/270), Ctrl-Z or `docker pause`.
    """
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    groups = {name: dist.new_group(None, timeout) for name in FROM_RANK_0}
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        names = " ".join(map(str, pids))
        stop = f"sleep 0.2; kill -STOP {names}; sleep {STOPPED_S}; kill -CONT {names}"
        with subprocess.Popen(["sh", "-c", stop]):
            time.sleep(LATE_S)
    errors = {}

    def wait(name: str) -> None:
        group = groups[name] if name in groups else dist.new_group(None, timeout)
        errors[name] = caught(FROM_RANK_0.get(name, sum_all), group)

    in_threads(wait, [*groups, "new_group"])
    assert errors == {name: {} for name in (*FROM_RANK_0, "new_group")}


@in_ranks(3, MESSAGES, fresh=True)
def test_a_group_is_given_up_while_a_rank_computes(rank: int) -> None:
    """And while another thread of Python goes on.

    https://github.com/pytorch/pytorch/issues/132696 and 154976.
    """
    group = dist.new_group([0, 1, 2])
    dist.barrier()
    if rank == 2:
        time.sleep(2.0)
        return
    work = asynchronous(group)
    ticks, ended = [], threading.Event()

    def tick() -> None:
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    begin = time.monotonic()
    backend = group._get_backend(torch.device("cpu"))
    backend.abort()
    dist.destroy_process_group(group)
    del work, backend
    assert time.monotonic() - begin < SOON_S
    ended.set()
    ticking.join()
    assert max([b - a for a, b in itertools.pairwise(ticks)], default=0.0) < SOON_S


# ---- a rank whose standard error is a pipe that nobody reads, and full

# The first line about a wait comes after 10 s, at the next look.
SAID_S = 13.0


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"x" * size)
    os.set_blocking(pipe, True)


@pytest.mark.slow
@in_ranks(2, fresh=True, may_die=[1], group_timeout_s=60.0)
def test_a_death_is_seen_while_a_line_is_blocked(rank: int, tmp_path: Path) -> None:
    """The worker of https://github.com/aiidateam/aiida-core/issues/1006 hung so."""
    group, died = dist.new_group(), tmp_path / "died"
    if rank == 1:
        time.sleep(SAID_S)
        died.write_text(str(time.monotonic()))
        end_process("kill")
    reader, writer = os.pipe()
    fill(writer)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    error = caught(dist.all_reduce, torch.ones(10), dist.ReduceOp.SUM, group)
    dist.destroy_process_group(group)
    took_s = time.monotonic() - float(died.read_text())
    os.dup2(stderr, 2)
    lines = b""
    while not lines.endswith(b"\n"):  # now the line that was blocked gets through
        lines += os.read(reader, 1 << 16)
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    assert took_s < SOON_S, error
    assert re.match(rb"x*ringcomm rank 0/2: idle for \d\d s in ", lines), lines


# ---- a signal in a wait: Ctrl-C, a handler that raises, and one that destroys the group


def destroy(*_: object) -> None:
    dist.destroy_process_group()


def destroy_and_exit(*_: object) -> None:
    dist.destroy_process_group()
    sys.exit(3)


# The signal, its handler, and what the wait raises.
HANDLERS: dict[str, tuple[signal.Signals, Any, type[BaseException]]] = {
    "ctrl-c": (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    "raises": (signal.SIGALRM, lambda *_: 1 // 0, ZeroDivisionError),
    "destroys": (signal.SIGTERM, destroy, ringcomm.RingcommError),
    "destroys and exits": (signal.SIGTERM, destroy_and_exit, SystemExit),
}
WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "barrier": lambda x: dist.barrier(),
    "operator": ops.all_reduce,
    "wait": lambda x: asynchronous(None).wait(),
    "recv": lambda x: dist.recv(x, 1),
    "send": lambda x: dist.send(x, 1),
    # Waits for what was started, here unmatched calls.
    "destroy": lambda x: dist.destroy_process_group(),
}
PLACES = ("aa", "--")
DESTROYING = itertools.product(("destroys", "destroys and exits"), [*WAITS][:-1], PLACES)


@in_ranks(fresh=True)
@pytest.mark.parametrize(
    ("how", "what", "env"),
    [
        *itertools.product(("ctrl-c",), ("wait", "destroy"), PLACES),
        ("raises", "operator", "aa"),
        *quick(
            DESTROYING,
            *(("destroys and exits", what, "aa") for what in ("all_reduce", "recv", "send")),
            *(("destroys", what, "--") for what in ("barrier", "wait", "send")),
            ("destroys", "operator", "aa"),
        ),
    ],
)
def test_a_signal_ends_a_wait(rank: int, how: str, what: str, env: str) -> None:
    """And the group on all ranks; rank 1 is late.

    As at Slurm's SIGTERM: https://github.com/Lightning-AI/pytorch-lightning/issues/20825
    """
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        # Rank 0 may have published its part before it gave up: then the first call succeeds.
        same = WAITS["barrier" if what == "barrier" else "all_reduce"]
        error = [caught(same, torch.ones(10)) for _ in range(2)][1]
        assert error["type"] in ("RingcommError", "PeerDiedError"), error
        assert "rank 0 (pid" in error["text"], error
        return
    if what == "destroy":
        dist.isend(torch.ones(10_000_000), 1)
        asynchronous(None)
    number, handler, kind = HANDLERS[how]
    signal.signal(number, handler)
    # Made before: between the begin of a send and its wait, to destroy the group would wait for it.
    given = torch.ones(10_000_000 if what == "send" else 10)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    begin = time.monotonic()
    with pytest.raises(kind):
        WAITS[what](given)
    store.set("interrupted", "yes")
    assert time.monotonic() - begin < 2 * SOON_S  # of the group's 30
    if how in ("ctrl-c", "raises") and what != "destroy":
        assert caught(dist.all_reduce, torch.ones(10))["type"] == "RingcommError"


def make_late(*_: Any, **__: Any) -> Any:
    time.sleep(90)
    raise OSError("too late")


@in_ranks(backend=None, fresh=True)
@pytest.mark.parametrize(
    ("env", "victim", "is_connecting"),
    [
        *(("aaa", 0, False), ("---", 0, False), ("aba", 0, False)),
        *(("--", 0, True), ("--", 1, True)),
    ],
)
def test_ctrl_c_while_a_group_is_made(
    rank: int, env: str, victim: int, is_connecting: bool, tmp_path: Path
) -> None:
    """The last rank never comes, or is late for Gloo's connecting.

    The process of the victim lives on, and the other one learns of it.
    """
    world_size, path = len(env), str(tmp_path / "store")
    if is_connecting and rank == 1:
        dist.ProcessGroupGloo = make_late  # type: ignore[assignment,misc]
    if rank == victim:
        record = f"ringcomm/rank/{rank}".encode()
        kind, seconds = interrupted(
            lambda: init_group(rank, world_size, path, 120),
            lambda: Path(path).exists() and record in Path(path).read_bytes(),
        )
        assert (kind, seconds < SOON_S) == ("KeyboardInterrupt", True)
    elif rank < 2:
        error = caught(init_group, rank, world_size, path, 120)
        assert error["type"] == "RingcommError", error
        assert f"rank {victim} (pid " in error["text"], error
        # It may have asked its store at that moment.
        said = "interrupted by a signal while the group" + " was made\n" * is_connecting
        assert said in error["text"] + "\n", error
    end = dist.FileStore(path + "-end", -1)
    end.set(str(rank), "")
    end.wait([str(each) for each in range(world_size)])


# ---- use after the end, and in the wrong process


@in_ranks(2, TRANSPORTS, fresh=True)
def test_destroy_with_work_in_flight(rank: int) -> None:
    """What is under way comes to its end, but for a receive; later calls are refused."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    tensors = [torch.ones(200_000) for _ in range(5)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    receive: Any = dist.irecv(torch.zeros(4), 1 - rank)
    future = receive.get_future()
    dist.destroy_process_group()
    assert all((tensor == 2).all() for tensor in tensors)
    assert all(work.is_completed() and work.wait() for work in works)
    error = caught(receive.wait)
    # The other rank may leave before this one destroys its group.
    said = {"RingcommError": "the group was destroyed", "PeerDiedError": f"rank {1 - rank} (pid"}
    assert said[error["type"]] in error["text"], error
    with pytest.raises(Exception, match=re.escape(said[error["type"]])):
        future.wait()
    with pytest.raises(ValueError, match="destroyed"):
        backend.allreduce([torch.ones(2)], dist.AllreduceOptions())
    with pytest.raises(ValueError, match="destroyed"):
        backend.send([torch.ones(2)], 1 - rank, 0)


@in_ranks(2, TRANSPORTS, fresh=True)
def test_a_forked_child_makes_its_own_groups_and_cannot_touch_the_parents(
    rank: int, tmp_path: Path
) -> None:
    tensor, found = torch.zeros(4), tmp_path / f"said-{rank}"
    receive: Any = dist.irecv(tensor, 1 - rank)
    collective: Any = dist.all_reduce(torch.ones(4), async_op=True)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            calls = [
                *(receive.wait, dist.barrier, lambda: dist.send(tensor, 1 - rank)),
                lambda: dist.all_reduce(tensor, async_op=True).wait(),
                dist.destroy_process_group,
            ]
            said = [caught(call).get("text", "fine").replace("\n", " ") for call in calls]
            store = dist.FileStore(str(tmp_path / "s"), 2)
            dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
            own = torch.ones(2)
            dist.all_reduce(own)
            dist.all_reduce(own, async_op=True).wait()
            found.write_text("\n".join([*said, str(own.tolist())]))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    collective.wait()
    dist.send(torch.full((4,), float(rank)), 1 - rank)
    receive.wait()
    assert tensor.tolist() == [1.0 - rank] * 4
    dist.barrier()
    *refused, destroyed, total = found.read_text().splitlines()
    assert all("fork" in text for text in refused), refused
    assert (destroyed, total) == ("fine", "[4.0, 4.0]")
