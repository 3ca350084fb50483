"""The far side of ranks.py: a server that has imported torch once, and the ranks that it forks.

The server is forked from pytest when the modules of tests are imported and no test has run, so
that neither it nor a rank imports them again or inherits threads. It runs nothing of them, and
forks ranks when asked. A rank is a loop: it takes a pickled function and arguments, calls it, sends
back the result or the traceback.

Nothing survives a killed pytest: the server ends with the socket to it, and the kernel kills ranks
with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

# Of ranks that destroy the groups of a call after it: those of many calls would use up the places
# of an emulated GPU.
DROPS_GROUPS = "RINGCOMM_TEST_DROPS_GROUPS"
SEED = "RINGCOMM_EMULATOR_SEED"
MAX_RANKS = 64

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _die_with(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the call
        os._exit(1)


def _redirect(path: Path) -> None:
    """Standard output and error go to a file: the report quotes it."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def import_ringcomm() -> None:
    """What a server does before it forks ranks, if it is not told otherwise."""
    import torch
    import torch._dynamo  # which optimizers import
    import torch._inductor.compile_fx  # which every backend of torch.compile imports

    import ringcomm.parallel.pipeline

    assert torch._dynamo, ringcomm.parallel.pipeline


def start_server(folder: Path, prepare: Callable[[], None] = import_ringcomm) -> socket.socket:
    """Forks the server, where `prepare` runs; returns the socket on which it takes requests.

    By way of a process that ends at once: other tests assert that pytest has no children left.
    """
    ours, theirs = socket.socketpair()
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            ours.close()
            _server_main(theirs, folder, prepare)
        os._exit(0)
    os.waitpid(between, 0)
    theirs.close()
    return ours


def _server_main(requests: socket.socket, folder: Path, prepare: Callable[[], None]) -> NoReturn:
    try:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to pytest
        _redirect(folder / "server.log")
        os.environ["OMP_NUM_THREADS"] = "1"
        prepare()
        _Server(requests).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class _Server:
    def __init__(self, requests: socket.socket) -> None:
        self._socket = requests
        self._requests = Connection(os.dup(requests.fileno()))

    def run(self) -> None:
        while True:
            try:
                request, *args = pickle.loads(self._requests.recv_bytes())
            except EOFError:
                return
            answer = getattr(self, request)(*args)
            self._requests.send_bytes(pickle.dumps(answer))
            if request == "stop":
                return

    def fork_rank(self, rank: int, folder: Path, env: dict[str, str], module: str) -> int:
        """Imports a test's module before the fork: ranks would each take seconds for it."""
        with contextlib.suppress(BaseException):  # a rank that lacks it says why
            importlib.import_module(module)
        gc.freeze()  # collections of a rank need not visit what all ranks have in common
        ours, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._socket.close()
            self._requests.close()
            _rank_main(rank, server, theirs, folder, env)
        socket.send_fds(self._socket, [b"f"], [ours.fileno()])
        ours.close()
        theirs.close()
        return pid

    def status(self, pid: int, timeout_s: float) -> str | None:
        """How a rank ended, or None when it is still there after the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                return "no child of the server"
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
                return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)

    def stop(self, timeout_s: float) -> list[str]:
        """Names processes that are still there; as a subreaper the server has orphans as well."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return []
            if ended == 0 and time.monotonic() >= deadline:
                return self._kill_children()
            if ended == 0:
                time.sleep(0.005)

    def _kill_children(self) -> list[str]:
        named = []
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            named.append(f"pid {pid}: {Path(f'/proc/{pid}/cmdline').read_text()[:200]}")
            os.kill(pid, signal.SIGKILL)
        return named


def _rank_main(
    rank: int, server: int, calls: socket.socket, folder: Path, env: dict[str, str]
) -> NoReturn:
    code = 1
    try:
        _die_with(server)
        _redirect(folder / f"rank{rank}.log")
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(env)
        seed = int(os.environ.get(SEED, "0"))
        os.environ[SEED] = str(MAX_RANKS * seed + rank)  # no two ranks have the same delays
        import torch

        torch.set_num_threads(1)
        _answer_calls(rank, Connection(calls.detach()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _answer_calls(rank: int, calls: Connection) -> None:
    while True:
        try:
            message = calls.recv_bytes()
        except EOFError:
            return
        # Plain pickle: torch's own for Connection.send would share tensors' memory.
        try:
            fn, args = pickle.loads(message)
            reply: tuple[str, Any] = ("result", fn(rank, *args))
            data = pickle.dumps(reply)
            if os.environ.get(DROPS_GROUPS):
                _drop_groups()
        except BaseException:
            data = pickle.dumps(("error", traceback.format_exc()))
        calls.send_bytes(data)


def _drop_groups() -> None:
    """All but the default group."""
    import torch.distributed as dist

    for group in [*dist.distributed_c10d._world.pg_map] if dist.is_initialized() else []:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
