"""Ranks that die, leave, are late, interrupted, stopped or forked: who learns of it, how soon, how.

Over shared memory, over messages, and with two hosts. Deaths while a group is made and by
what the store does: test_message_deaths.py; at every step, without torch: tests/cpp/test_deaths.cc.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from cases import slow
from ranks import hosts, in_ranks, init_group, run_ranks
from test_errors import ENVS, TRANSPORTS, caught

import ringcomm
from ringcomm import Options
from ringcomm.torch_names import set_timeout

# A death is seen at once or looked for every 20 ms; the rest, of time-outs of 30 s and more, is for
# busy machines.
SOON_S = 14.0  # twice that is less than the group's time-out of 30 s
Results = dict[str, list[dict[str, Any]]]
MESSAGES = {name: env for name, env in ENVS.items() if name != "shm"}


def timed(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    begin = time.monotonic()
    error = caught(fn, *args)
    return {**error, "seconds": time.monotonic() - begin}


def in_threads(call: Callable[[Any], Any], names: Iterable[Any]) -> None:
    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)


def end_process(how: str) -> None:
    if how == "exec":
        os.execv("/bin/sleep", ["sleep", "60"])
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_named(error: dict[str, Any], path: str, rank: int, victim: int) -> None:
    """Ends what the rank that an error names has become, when the other two have seen it so.

    Args:
        path: of a file that the ranks share.
    """
    seen = dist.FileStore(path, -1)
    seen.set(str(rank), "")
    seen.wait([str(r) for r in {0, 1, 2} - {victim}], datetime.timedelta(seconds=20))
    pid = error.get("pid", -1)
    if pid > 1:  # kill(-1) would end every process
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---- blocking calls in which ranks are when rank 1 dies, leaves or is late


def asynchronous(group: Any) -> Any:
    return dist.all_reduce(torch.ones(10), group=group, async_op=True)


WAITS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(10), group=g),
    "all_reduce_large": lambda g: dist.all_reduce(torch.ones(3_000_000), group=g),
    "barrier": dist.barrier,
    "broadcast": lambda g: dist.broadcast(torch.ones(10), 1, g),
    "recv": lambda g: dist.recv(torch.ones(10), 1, g),
    # Rank 2 waits for rank 1, and rank 0 for rank 2.
    "chain": lambda g: dist.recv(torch.ones(10), 1 if dist.get_rank() == 2 else 2, g),
    # Of two ranks: with three a receive from any source may still be served.
    "recv_any": lambda g: dist.recv(torch.ones(10), None, g),
    "send": lambda g: dist.send(torch.ones(10_000_000), 1, g),
    "async": lambda g: asynchronous(g).wait(),
    "monitored": lambda g: ringcomm.monitored_barrier(g, datetime.timedelta(seconds=20)),
    "future": lambda g: asynchronous(g).get_future().wait(),
}


def of_bytes(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


# Sends that begin when rank 1 is known to be gone. Each would fit into its mailbox.
SENDS: dict[str, Callable[[Any], Any]] = {
    "send_nothing": lambda g: dist.send(of_bytes(0), 1, g),
    "send_60_kib": lambda g: dist.send(of_bytes(60 << 10), 1, g),
    "send_1_mib": lambda g: dist.send(of_bytes(1 << 20), 1, g),
    "send_with_tag": lambda g: dist.send(of_bytes(1000), 1, g, tag=7),
    "isend": lambda g: cast(dist.Work, dist.isend(of_bytes(1000), 1, g)).wait(),
    "batch": lambda g: [
        work.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, of_bytes(1000), 1, g)])
    ],
    "send_objects": lambda g: dist.send_object_list([{"work": 1}], 1, g),
}
FEW = ["all_reduce", "recv", "chain", "recv_any", "async"]


def in_all_waits(rank: int, names: list[str], how: str, timeout_s: float, path: str) -> Results:
    """Each in a thread and a group of its own; the errors of the call and of the next one."""
    seen = dist.FileStore(path, -1)
    groups = {name: dist.new_group([0, 1] if name == "recv_any" else None) for name in names}
    for group in groups.values():  # of the calls; on a busy machine a group takes longer to be made
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            options = group._get_backend(torch.device("cpu")).options
            set_timeout(options, datetime.timedelta(seconds=timeout_s))
    mine = [name for name in names if rank != 2 or name != "recv_any"]
    dist.barrier()
    results: Results = {}
    if rank == 1:
        time.sleep(0.15)
        if how in ("kill", "exec", "exit"):
            end_process(how)
        if how == "abort":
            for group in groups.values():
                group._get_backend(torch.device("cpu")).abort()
        elif how == "destroy":
            dist.destroy_process_group()  # alive, but gone
        seen.set("is gone", "")
        return results

    def wait(name: str) -> None:
        call, group = {**WAITS, **SENDS}[name], groups[name]
        results[name] = [timed(call, group), timed(WAITS["all_reduce"], group)]

    in_threads(wait, [name for name in mine if name in WAITS])
    if how in ("abort", "destroy"):
        seen.wait(["is gone"], datetime.timedelta(seconds=20))
    in_threads(wait, [name for name in mine if name in SENDS])
    if how == "exec":
        kill_named(results["all_reduce"][0], path, rank, 1)
    return results


@pytest.mark.parametrize(
    ("env", "how"),
    [
        *((env, how) for env in ENVS for how in ("kill", "exit")),
        *((env, how) for env in ENVS for how in ("destroy", "abort")),
        ("shm", "exec"),
    ],
)
def test_a_rank_that_is_lost(env: str, how: str, tmp_path: Path) -> None:
    """In the first call of a group: https://github.com/pytorch/gloo/issues/520

    Sends to a rank that is gone: https://github.com/ml-explore/mlx/issues/4060
    """
    sends = list(SENDS) if env == "shm" or how == "kill" else ["send_60_kib", "isend"]
    names = [*(WAITS if how == "kill" else FEW), *sends]
    may_die = [] if how in ("destroy", "abort") else [1]
    options: dict[str, Any] = {"fresh": True, "may_die": may_die, "env": ENVS[env]}
    args = (names, how, 30.0, str(tmp_path / "seen"))
    for results in run_ranks(3, in_all_waits, *args, **options)[::2]:
        assert len(results) >= len(names) - 1
        for name, (first, later) in results.items():
            for error in (first, later):
                expected = "RingcommError" if how == "abort" else "PeerDiedError"
                assert error["type"] == expected, (name, error)
                assert error["rank"] == 1, (name, error)
                assert error["pid"] > 0
                assert error["host"] == socket.gethostname()
            assert "rank 1" in first["text"]
            assert how != "exec" or "is no longer a rank: its process runs" in first["text"], first
            assert max(first["seconds"], later["seconds"]) < 0.3 + SOON_S, (name, first, later)
            if name in ("all_reduce", "barrier", "broadcast"):
                assert (first["op"], first["seq"]) == (name, 0), first


@pytest.mark.parametrize("env", ENVS)
def test_late_rank(env: str, tmp_path: Path) -> None:
    names = ["all_reduce", "barrier", "recv", "recv_any", "async"]
    args = (names, "late", 0.4, str(tmp_path / "seen"))
    results = run_ranks(3, in_all_waits, *args, fresh=True, env=ENVS[env])
    for found in results[::2]:
        for name, (error, later) in found.items():
            assert error["type"] == later["type"] == "CollectiveTimeoutError", (name, error, later)
            assert 0.3 < error["seconds"] < 0.4 + SOON_S
            assert "400 ms" in error["text"]
            if env == "shm":
                expected = "waited for any rank" if name == "recv_any" else "rank 1"
                assert expected in error["text"]
                assert error["rank"] == 1 or name == "recv_any"


def calls_without_end() -> None:
    """Collectives of all sizes and patterns, one after another, until one raises."""
    world_size = dist.get_world_size()
    tensors = [torch.ones(num_elems) for num_elems in (10, 5000, 300_001)]
    while True:
        for turn, tensor in enumerate(tensors):
            dist.all_reduce(tensor)
            tensor.fill_(1.0)
            dist.broadcast(tensor, turn % world_size)
            dist.all_gather([torch.empty_like(tensor) for _ in range(world_size)], tensor)
        dist.barrier()


def die_in_the_middle(
    rank: int, world_size: int, port: int, algorithm: Any, victim: int
) -> dict[str, Any]:
    """The victim ends in the middle of some collective; what the others are told, and when."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "store": store}
    dist.init_process_group("ringcomm", pg_options=Options(algorithm=algorithm), **place)
    dist.barrier()
    if rank == victim:
        threading.Timer(0.1, end_process, ["kill"]).start()
    return timed(calls_without_end)


# With rank 0 dies the store; with 5 ranks some are no neighbours of it. Of the hosts, the last
# victim is no leader.
@pytest.mark.parametrize(
    ("env", "algorithm", "victim"),
    [("-----", "ring", 3), ("-----", "auto", 0), ("abbccc", "auto", 4)],
)
def test_killed_in_the_middle(env: str, algorithm: Any, victim: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        args = (len(env), probe.getsockname()[1], algorithm, victim)
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [victim]}
    errors = run_ranks(len(env), die_in_the_middle, *args, env=hosts(env), **options)
    del errors[victim]
    kinds = {error["type"] for error in errors}
    assert "PeerDiedError" in kinds
    # A rank that learns of it without the store cannot ask who it was.
    assert kinds <= ({"PeerDiedError"} | ({"RingcommError"} if victim == 0 else set())), errors
    for error in errors:
        assert error["type"] != "PeerDiedError" or victim == 0 or error["rank"] == victim, errors
        assert error["seconds"] < 2 * SOON_S + 1, error


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
    **{name: WAITS[name] for name in ("async", "future", "monitored")},
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
    error = caught(WAITS["all_reduce"], group)
    dist.destroy_process_group(group)
    took_s = time.monotonic() - float(died.read_text())
    os.dup2(stderr, 2)
    lines = b""
    while not lines.endswith(b"\n"):  # now the line that was blocked gets through
        lines += os.read(reader, 1 << 16)
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    assert took_s < SOON_S, error
    assert re.match(rb"x*ringcomm rank 0/2: idle for \d\d s in ", lines), lines


# ---- Ctrl-C


def interrupted(call: Callable[[], Any], after_s: float = 0.2) -> tuple[str, float]:
    """What a call raises when the process is interrupted, and how soon."""
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin, kind = time.monotonic(), "nothing"
    try:
        call()
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    return kind, time.monotonic() - begin - after_s


@in_ranks(3, ENVS, backend=None, fresh=True)
def test_ctrl_c_while_a_group_is_made(rank: int, tmp_path: Path) -> None:
    """Rank 2 never comes. The process of rank 0 lives on, and rank 1 learns of it."""
    path = str(tmp_path / "store")
    if rank == 0:
        kind, seconds = interrupted(lambda: init_group(0, 3, path, 120), 0.5)
        assert (kind, seconds < SOON_S) == ("KeyboardInterrupt", True)
    elif rank == 1:
        error = caught(init_group, 1, 3, path, 120)
        assert error["type"] == "RingcommError", error
        assert "rank 0 (pid " in error["text"], error
        # It may have asked its store at that moment.
        assert "interrupted by a signal while the group" in error["text"], error
    dist.FileStore(path + "-end", -1).set(str(rank), "")
    dist.FileStore(path + "-end", -1).wait(["0", "1", "2"])


@in_ranks(2, TRANSPORTS, fresh=True)
@pytest.mark.parametrize("is_destroyed", [False, True])
def test_ctrl_c(rank: int, is_destroyed: bool) -> None:
    """It ends the wait, and the group on all ranks.

    Rank 1 is late. Destroying a group waits for what was started, here unmatched calls.
    """
    dist.barrier()
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        # Rank 0 may have published its part before it gave up: then the first call succeeds.
        error = [caught(WAITS["all_reduce"], group) for _ in range(2)][1]
        assert error["type"] in ("RingcommError", *(["PeerDiedError"] * is_destroyed)), error
        return
    if is_destroyed:
        dist.isend(torch.ones(10_000_000), 1)
        asynchronous(group)
    call = dist.destroy_process_group if is_destroyed else asynchronous(group).wait
    kind, seconds = interrupted(call)
    store.set("interrupted", "yes")
    assert (kind, seconds < 2 * SOON_S) == ("KeyboardInterrupt", True)  # of the group's 30
    assert is_destroyed or caught(WAITS["all_reduce"], group)["type"] == "RingcommError"


@in_ranks(2, TRANSPORTS, fresh=True)
@pytest.mark.parametrize("what", ["all_reduce", "barrier", "wait", "recv", "send"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_handler_that_destroys_the_group(rank: int, what: str, leaves: bool) -> None:
    """As at Slurm's SIGTERM: https://github.com/Lightning-AI/pytorch-lightning/issues/20825"""
    dist.barrier()
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["handled"])
        # Rank 0 may have published its part before: then the first call succeeds.
        same = WAITS["barrier" if what == "barrier" else "all_reduce"]
        error = [caught(same, group) for _ in range(2)][1]
        assert error["type"] in ("RingcommError", "PeerDiedError"), error
        assert "rank 0 (pid" in error["text"], error
        return

    def destroy(*_: Any) -> None:
        dist.destroy_process_group()
        if leaves:
            sys.exit(3)

    calls: dict[str, Callable[[], Any]] = {
        "wait": lambda: asynchronous(group).wait(),
        "recv": lambda: dist.recv(torch.ones(10), 1),
        "send": lambda: dist.send(torch.ones(10_000_000), 1),
    }
    call = calls.get(what, lambda: WAITS[what](group))
    signal.signal(signal.SIGTERM, destroy)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    with pytest.raises(SystemExit if leaves else ringcomm.RingcommError):
        call()
    assert time.monotonic() - begin < SOON_S
    store.set("handled", "yes")


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
