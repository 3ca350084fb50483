"""Ranks that end right after their last call, and what the others are told of one that ends early.

At every step of a late rank, without torch: tests/cpp/test_deaths.cc.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import covering
from rank_programs import run_program
from ranks import init_group, run_ranks
from test_errors import ENVS, TRANSPORTS, caught

from ringcomm import _C, message_backend

CLONE_NEWPID = 0x20000000


# ---- the last calls: rank 0 is late, and the others need nothing of it


def receive_all(num_elems: int, is_any: bool = False) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(torch.full((num_elems,), float(rank)), 0)
        return
    time.sleep(0.2)
    senders = []
    for peer in range(1, world_size):
        tensor = torch.zeros(num_elems)
        sender = dist.recv(tensor, None if is_any else peer)
        assert (tensor == sender).all()
        senders.append(sender)
    assert sorted(senders) == list(range(1, world_size))


def gather() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [torch.zeros(3) for _ in range(world_size)] if rank == 0 else None
    if rank == 0:
        time.sleep(0.2)
    dist.gather(torch.full((3,), float(rank)), parts, 0)
    assert parts is None or [part[0].item() for part in parts] == list(range(world_size))


def broadcast() -> None:
    tensor = torch.full((3,), 7.0 if dist.get_rank() == 1 else 0.0)
    if dist.get_rank() == 0:
        time.sleep(0.2)
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [7.0] * 3


def all_reduce() -> None:
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()


LAST_CALLS: dict[str, Callable[[], Any]] = {
    "init_process_group": lambda: None,
    "send": lambda: receive_all(1),
    "send_long": lambda: receive_all(50_000),
    "send_to_any": lambda: receive_all(1, is_any=True),
    "gather": gather,
    "broadcast": broadcast,
    "all_reduce": all_reduce,
    "barrier": dist.barrier,
    "new_group": dist.new_group,
}


def call_and_leave(rank: int, path: str, name: str) -> dict[str, Any]:
    """The error of a rank; a rank other than 0 ends in place of returning that there was none."""

    def make_and_call() -> None:
        init_group(rank, 3, path)
        LAST_CALLS[name]()

    error = caught(make_and_call)
    if rank > 0 and not error:
        os._exit(0)
    return error


@pytest.mark.parametrize(("name", "env"), covering(LAST_CALLS, ENVS))
def test_a_rank_ends_after_its_last_call(env: str, name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [1, 2], "env": ENVS[env]}
    errors = run_ranks(3, call_and_leave, str(tmp_path / "store"), name, **options)
    assert errors == [{}, None, None]


# ---- ranks that end early


def end_early(rank: int, how: str) -> dict[str, Any]:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(0.2)
        if how.startswith("_exit"):
            os._exit(int(how[5:]))
        if how == "note":  # as at the end of Python, though the kernel cannot tell
            _C.say_exit()
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: dist.all_reduce(torch.ones(4)))


@pytest.mark.parametrize(("how", "env"), covering(["note", "_exit0", "_exit3", "kill"], TRANSPORTS))
def test_an_exit_is_told_apart_from_a_kill(env: str, how: str) -> None:
    options: dict[str, Any] = {"fresh": True, "may_die": [1], "env": TRANSPORTS[env]}
    for error in run_ranks(3, end_early, how, **options)[::2]:
        assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
        text = error["text"]
        assert (" died" in text, " has exited" in text) == (how == "kill", how != "kill"), text
        if how == "_exit0" and env == "shm":  # over messages it has not said how many
            assert "it made 1 call fewer: let all ranks make the same calls" in text
        if how != "_exit0":
            assert "call" not in text.partition(" has exited")[2], text
        words = {"_exit3": "has exited with code 3; read", "kill": "died (signal 9, Killed); read"}
        assert words.get(how, "") in text, text


def exit_as_torch_does() -> None:
    """torch.multiprocessing.spawn ends a process so, whose function has raised."""
    try:
        raise ValueError("no row 7")
    except Exception:
        sys.exit(1)


# What ends a process of multiprocessing, and what the others are told.
ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "exception": (lambda: dict[str, int]()["lr"], " died: KeyError: 'lr'"),
    "message": (lambda: sys.exit("no key lr"), " died: SystemExit: no key lr"),
    "code": (lambda: sys.exit(3), " has exited with code 3; read the end of its output"),
    "spawn": (exit_as_torch_does, " died: ValueError: no row 7"),
    "abort": (os.abort, " died (signal 6, Aborted); read the end of its output"),
}


def end_by_itself(rank: int, path: str, how: str) -> None:
    init_group(rank, 2, f"{path}/store-{how}")
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        ENDS[how][0]()
    error = caught(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(2)])
    Path(path, how).write_text(error.get("text", "no error"))


def start_processes(rank: int, path: str) -> None:
    for how in ENDS:
        process = get_context("fork").Process(target=end_by_itself, args=(rank, path, how))
        process.start()
        process.join(30)
        assert not process.is_alive()


def test_what_ends_a_process_of_multiprocessing_is_told(tmp_path: Path) -> None:
    """The others' errors named no cause: https://github.com/pytorch/pytorch/issues/75512"""
    run_ranks(2, start_processes, str(tmp_path), backend=None)
    for how, (_, words) in ENDS.items():
        text = (tmp_path / how).read_text()
        assert words in text, (how, text)


def destroy_in_finally(rank: int) -> dict[str, Any]:
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("no row 7\nbut 8")
            finally:
                dist.destroy_process_group()
        time.sleep(2)
        return {}
    return caught(lambda: dist.all_reduce(torch.ones(4)))


@pytest.mark.parametrize("env", TRANSPORTS)
def test_an_exception_that_destroys_the_group_is_told(env: str) -> None:
    """It was hidden by its own clean-up: https://github.com/sgl-project/SpecForge/pull/781"""
    error, _ = run_ranks(2, destroy_in_finally, fresh=True, env=TRANSPORTS[env])
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    assert "has destroyed the group in an exception: ValueError: no row 7" in error["text"], error


def fail_alone(rank: int, path: str) -> dict[str, Any]:
    """Rank 1 comes later, and so is still waiting when rank 0 has given up and ended."""
    if rank == 1:
        time.sleep(0.6)
    error = caught(init_group, rank, 4, f"{path}/store", 1.5)
    Path(path, f"error-{rank}").write_text(json.dumps(error))
    os._exit(1)


def test_ranks_that_were_not_started_are_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [0, 1]}
    run_ranks(2, fail_alone, str(tmp_path), **options)
    for rank in range(2):
        error = json.loads((tmp_path / f"error-{rank}").read_text())
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 2), error
        assert "ranks 2 and 3 did not join the group" in error["text"]


def fail_among(rank: int, path: str, world_size: int) -> dict[str, Any]:
    return caught(init_group, rank, world_size, path, 0.5)


def test_many_missing_ranks_are_counted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": None, "fresh": True}
    (error,) = run_ranks(1, fail_among, str(tmp_path / "store"), 12, **options)
    assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 1), error
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not join the group" in error["text"]


def call_new_group_in_part(rank: int) -> dict[str, Any]:
    """Rank 3 of the group's ranks 1 and 3 does not call it."""
    if rank == 3:
        return {}
    return caught(dist.new_group, [1, 3], datetime.timedelta(seconds=1))


def test_new_group_names_missing_ranks_with_their_global_ranks() -> None:
    error = run_ranks(4, call_new_group_in_part, fresh=True)[1]
    assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 1), error
    assert "ringcomm rank 0/2 (global rank 1): rank 1 of the group (global rank 3)" in error["text"]
    assert "did not join the group" in error["text"]


def make_nothing(*args: Any) -> None:
    time.sleep(3)
    raise RuntimeError("too late")


def init_but_do_not_connect(rank: int, path: str, late: tuple[int, ...]) -> dict[str, Any]:
    """The late ranks are in the group, and never make their Gloo, so no other rank can."""
    if rank in late:
        message_backend.make = make_nothing  # type: ignore[assignment]
    return caught(init_group, rank, 4, path, 1.0)


def test_only_ranks_that_do_not_connect_are_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "backend": None,
        "fresh": True,
        "env": {"RINGCOMM_TRANSPORT": "messages"},
    }
    errors = run_ranks(4, init_but_do_not_connect, str(tmp_path / "store"), (1, 2), **options)
    for error in errors[::3]:
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 1), error
        assert "ranks 1 and 2 did not connect to the others in 1000 ms" in error["text"]


def make_groups_with_warnings(rank: int, path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        init_group(rank, 2, path)
        dist.new_group()
    return [str(one.message) for one in found if "RINGCOMM_" in str(one.message)]


def test_an_unknown_variable_is_a_warning_once_per_process(tmp_path: Path) -> None:
    env = {
        "RINGCOMM_TUNNING": "x",
        "RINGCOMM_ABC": "1",
        "RINGCOMM_TRACE": "",
        "RINGCOMM_SEQUENCES": "1",
    }
    options: dict[str, Any] = {"backend": None, "fresh": True, "env": env}
    for abc, tuning in run_ranks(2, make_groups_with_warnings, str(tmp_path / "store"), **options):
        assert abc.startswith("the environment variable RINGCOMM_ABC is set")
        assert "did you mean" not in abc
        assert tuning.endswith("did you mean RINGCOMM_TUNING?")


def watch_from_a_namespace(rank: int, path: str) -> int:
    """Rank 0 is in a PID namespace of its own, in which rank 1 has no pid."""
    if rank == 1:
        init_group(rank, 2, f"{path}/store")
        dist.barrier()
        Path(path, "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            init_group(rank, 2, f"{path}/store")
            dist.barrier()
            error = caught(lambda: dist.recv(torch.zeros(4), 1))
            Path(path, "error").write_text(json.dumps(error))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace takes root")
@pytest.mark.parametrize("env", TRANSPORTS)
def test_a_rank_of_another_pid_namespace_keeps_its_pid(env: str, tmp_path: Path) -> None:
    probe = os.fork()
    if probe == 0:
        os._exit(ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0)
    if os.waitpid(probe, 0)[1] != 0:
        pytest.skip("this container may not make a PID namespace")
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [1]}
    run_ranks(2, watch_from_a_namespace, str(tmp_path), env=TRANSPORTS[env], **options)
    error = json.loads((tmp_path / "error").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert (error["type"], error["rank"], error["pid"]) == ("PeerDiedError", 1, pid), error
    assert f"rank 1 (pid {pid} of another PID namespace on " in error["text"], error


def live_on_after_an_exception(rank: int) -> str:
    """As the interpreter ends the main thread, where another thread keeps the process."""
    dist.barrier()
    if rank == 1:
        try:
            raise ValueError("row 7")
        except ValueError as error:
            sys.excepthook(ValueError, error, error.__traceback__)
        return ""
    return str(caught(dist.barrier)["text"])


def test_an_exception_of_a_process_that_lives_on_is_told() -> None:
    """https://github.com/vllm-project/vllm/issues/23985"""
    said, _ = run_ranks(2, live_on_after_an_exception, fresh=True, group_timeout_s=5.0)
    assert "waited for rank 1 (pid" in said
    assert "which runs on after ValueError: row 7" in said


# A rank whose main thread ends in an exception, and whose other thread keeps its process.
KEPT = """
import sys, threading
import torch
import torch.distributed as dist
from ranks import init_group

rank = int(sys.argv[1])
init_group(rank, 2, sys.argv[2], 5)
dist.barrier()
if rank == 1:
    threading.Thread(target=sys.stdin.readline).start()
    raise ValueError("row 7")
try:
    dist.barrier()
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_an_exception_that_ends_a_main_thread_is_told(tmp_path: Path) -> None:
    text = run_program(KEPT, tmp_path / "store")[0].out
    assert "waited for rank 1 (pid" in text
    assert "which runs on after ValueError: row 7" in text
