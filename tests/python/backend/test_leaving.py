"""Ranks that end right after their last call, and what the others are told of one that ends early.

At every step of a late rank, without torch: tests/cpp/test_deaths.cc.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from calls import CALLS, Tensors
from cases import covering, slow
from failures import TRANSPORTS, caught
from machines import CLONE_NEWPID
from rank_programs import run_program
from ranks import in_ranks, init_group, run_ranks

from ringcomm import _C

# ---- the last calls: rank 0 is late, and the others need nothing of it

# The elements of a rank's share.
LAST_CALLS = {
    **dict.fromkeys(("init_process_group", "new_group", "broadcast", "gather", "barrier"), 3),
    **dict.fromkeys(("all_reduce", "send and recv"), 50_000),
}


@in_ranks(backend=None, fresh=True, may_die=[1, 2])
@pytest.mark.parametrize(("name", "env"), covering(LAST_CALLS, ("aaa", "---", "aba")))
def test_a_rank_ends_after_its_last_call(rank: int, env: str, name: str, tmp_path: Path) -> None:
    init_group(rank, 3, tmp_path / "store")
    time.sleep(0.2 * (rank == 0))
    if name == "new_group":
        dist.new_group()
    elif name != "init_process_group":
        CALLS[name](Tensors(rank), LAST_CALLS[name], None)
    assert dist.is_initialized()
    if rank > 0:
        os._exit(0)


# ---- ranks that end early


@in_ranks(fresh=True, may_die=[1])
@pytest.mark.parametrize(
    ("how", "env"), covering(["note", "_exit0", "_exit3", "kill"], ("aaa", "---"))
)
def test_an_exit_is_told_apart_from_a_kill(rank: int, env: str, how: str) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(0.2)
        if how.startswith("_exit"):
            os._exit(int(how[5:]))
        if how == "note":  # as at the end of Python, though the kernel cannot tell
            _C.report_exit()
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(lambda: dist.all_reduce(torch.ones(4)))
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    text = error["text"]
    assert (" died" in text, " has exited" in text) == (how == "kill", how != "kill"), text
    if how == "_exit0" and env == "aaa":  # over messages it has not said how many
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


@in_ranks(2, TRANSPORTS, fresh=True)
def test_an_exception_that_destroys_the_group_is_told(rank: int) -> None:
    """It was hidden by its own clean-up: https://github.com/sgl-project/SpecForge/pull/781"""
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("no row 7\nbut 8")
            finally:
                dist.destroy_process_group()
        time.sleep(2)
        return
    error = caught(lambda: dist.all_reduce(torch.ones(4)))
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    assert "has destroyed the group in an exception: ValueError: no row 7" in error["text"], error


# A rank whose main thread ends in an exception, and whose other thread keeps its process.
KEPT = """
import datetime, sys, threading
import torch
import torch.distributed as dist
from ranks import init_group
from ringcomm.torch_names import backend_of, set_timeout

rank = int(sys.argv[1])
init_group(rank, 2, sys.argv[2], 100)
backend = backend_of(dist.group.WORLD, torch.device("cpu"))
dist.barrier()
if rank == 1:
    threading.Thread(target=sys.stdin.readline).start()
    raise ValueError("row 7")
set_timeout(backend.options, datetime.timedelta(seconds=2))
try:
    dist.barrier()
except Exception as error:
    print(error)
"""


def test_an_exception_that_ends_a_main_thread_is_told(tmp_path: Path) -> None:
    """Its process lives on: https://github.com/vllm-project/vllm/issues/23985"""
    text = run_program(KEPT, tmp_path / "store")[0].out
    assert "waited for rank 1 (pid" in text
    assert "which runs on after ValueError: row 7" in text


UNKNOWN = {"RINGCOMM_TUNNING": "x", "RINGCOMM_ABC": "1"}
KNOWN = {"RINGCOMM_TRACE": "", "RINGCOMM_SEQUENCES": "1"}


@in_ranks(2, backend=None, fresh=True, env={**UNKNOWN, **KNOWN})
def test_an_unknown_variable_is_a_warning_once_per_process(rank: int, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        init_group(rank, 2, tmp_path / "store")
        dist.new_group()
    abc, tuning = [str(one.message) for one in found if "RINGCOMM_" in str(one.message)]
    assert abc.startswith("the environment variable RINGCOMM_ABC is set")
    assert "did you mean" not in abc
    assert tuning.endswith("did you mean RINGCOMM_TUNING?")


# ---- a rank of another PID namespace


@pytest.fixture
def pid_namespace() -> None:
    probe = os.fork()
    if probe == 0:
        os._exit(ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0)
    if os.waitpid(probe, 0)[1] != 0:
        pytest.skip("this user, or in this container, may not make a PID namespace")


@pytest.mark.usefixtures("pid_namespace")
@in_ranks(2, TRANSPORTS, backend=None, fresh=True, may_die=[1])
def test_a_rank_of_another_pid_namespace_keeps_its_pid(rank: int, tmp_path: Path) -> None:
    """Rank 0 is in a PID namespace of its own, in which rank 1 has no pid."""
    store, note = tmp_path / "store", tmp_path / "pid"
    if rank == 1:
        init_group(rank, 2, store)
        dist.barrier()
        note.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            init_group(rank, 2, store)
            dist.barrier()
            error = caught(lambda: dist.recv(torch.zeros(4), 1))
            (tmp_path / "error").write_text(json.dumps(error))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    error, of_rank_1 = json.loads((tmp_path / "error").read_text()), int(note.read_text())
    named = (error["type"], error["rank"], error["pid"])
    assert named == ("PeerDiedError", 1, of_rank_1), error
    assert f"rank 1 (pid {of_rank_1} of another PID namespace on " in error["text"], error


# ---- the end of a program

LAST_CALL = """
import os, sys, time, torch, torch.distributed as dist, ringcomm
rank, folder = int(sys.argv[1]), sys.argv[2]
how = sys.argv[3]
if how == "served":
    port = folder + "/port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        open(port + ".new", "w").write(str(store.port)); os.rename(port + ".new", port)
    else:
        while not os.path.exists(port): time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(open(port).read()), 2, False)
else:
    store = dist.FileStore(folder + "/store", 2)
options = ringcomm.Options(transport="messages")
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2, pg_options=options)
dist.barrier()
if how == "served":
    if rank == 1: time.sleep(2)  # rank 0, and with it the store, has ended
    dist.destroy_process_group()
elif how == "unwaited":
    kept = [dist.irecv(torch.ones(4), 1 - rank, tag=tag) for tag in range(3)]
elif how == "continued":
    works = [dist.irecv(torch.ones(4), 1 - rank, tag=tag) for tag in range(3)]
    kept = [work.get_future().then(lambda future: None) for work in works]
elif how == "open server":
    from ringcomm.parallel import ParameterServer
    model = torch.nn.Linear(2, 2)
    server = ParameterServer(model, lambda groups: torch.optim.SGD(groups, lr=0.1))
    server.pull()
    dist.barrier()
if rank == 1: time.sleep(0.02)  # rank 0 is at its end when rank 1 leaves
print("end", rank, flush=True)
"""


@pytest.mark.parametrize("how", ["unwaited", "continued", slow("open server"), slow("served")])
def test_the_end_of_a_program(how: str, tmp_path: Path) -> None:
    """The store's server ends first; receives that nobody waits for are left.

    https://github.com/sgl-project/sglang/issues/20859, https://github.com/pytorch/pytorch/pull/179291
    A thread that called Python then: https://github.com/DataDog/dd-trace-py/pull/20081
    """
    for rank, ended in enumerate(run_program(LAST_CALL, tmp_path, how)):
        assert ended.returncode == 0, ended
        assert f"end {rank}" in ended.out, ended
