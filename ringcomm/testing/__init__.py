"""Runs functions on several ranks, each a process of its own: for tests and notebooks.

    from ringcomm.testing import run_ranks

    sums = run_ranks(2, total, 5.0)  # calls total(rank, 5.0) on two ranks of a group

ringcomm.testing.plugin has a fixture for pytest.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.backend import report_handled_exception
from ringcomm.measure import job
from ringcomm.process import interpreter

__all__ = ["RanksFailedError", "run_ranks"]

# The program of a rank: its arguments are a file and its number. The attribute makes run_ranks()
# raise where the test's program, which is imported, calls it again.
_START = """import pickle, sys
from multiprocessing import process, spawn
file, rank = sys.argv[1:]
with open(file, "rb") as start:
    data, rest = pickle.load(start)
process.current_process()._inheriting = True
spawn.prepare(data)
del process.current_process()._inheriting
from ringcomm.testing import _run_rank
_run_rank(int(rank), *rest)
"""
GRACE_S = 3.0  # for the other ranks to end by themselves, after the first error


class RanksFailedError(AssertionError):
    """Ranks raised, died or hung; the text has each one's traceback or end.

    Attributes:
        errors: the text of each rank that failed, by rank, in the order in which they failed.
    """

    def __init__(self, about: str, errors: dict[int, str]) -> None:
        texts = [f"rank {rank}: {text.rstrip()}" for rank, text in errors.items()]
        super().__init__("\n\n".join([about, *texts]))
        self.errors, self._about = errors, about

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that send it to others, such as those of pytest-xdist."""
        return type(self), (self._about, self.errors)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 60.0,
    backend: str = "ringcomm",
) -> list[Any]:
    """Calls function(rank, *arguments) on each rank of a group; returns the results by rank.

    Every rank is a new process with one thread and a default process group. No rank, and no process
    that ranks have started, outlives the call.

    Args:
        world_size: the number of ranks.
        function: at the top level of a module that can be imported: it is pickled by name.
        *arguments: of the function after the rank; pickled, as results are. Each rank has its own
            copy of a tensor.
        timeout_s: after half of it a collective raises an error that names the missing rank, and
            after all of it the ranks are killed.
        backend: of the group, such as "gloo" to compare with.

    Raises:
        RanksFailedError: a rank raised an exception, was ended by a signal, or did not end in
            time; for a group of ringcomm with the doctor's verdict, which rank is the cause.
        RuntimeError: sys.executable is not a Python interpreter.
        TypeError: the function or an argument cannot be pickled.
        unittest.SkipTest: every rank that failed has skipped the test.
    """
    python = interpreter()
    if python is None:
        raise RuntimeError(
            "run_ranks() starts Python interpreters, and sys.executable is none: "
            f"{sys.executable!r}"
        )
    call = _pickled(function, arguments)
    # As multiprocessing starts processes by "spawn", which also import the program again.
    data = spawn.get_preparation_data("ringcomm rank")
    data["authkey"] = bytes(data["authkey"])
    with tempfile.TemporaryDirectory(prefix="ringcomm-testing-") as folder:
        start = Path(folder, "start")
        start.write_bytes(pickle.dumps((data, (world_size, folder, timeout_s, backend, call))))
        command = [python, "-IS", str(Path(__file__).with_name("guard.py")), str(os.getpid())]
        reports, writable = os.pipe()
        command += [str(writable), str(world_size), *spawn.get_command_line()[:-3]]  # with flags
        guard = subprocess.Popen([*command, "-c", _START, str(start)], pass_fds=[writable])
        os.close(writable)
        try:
            about, codes = _wait(reports, guard.pid, world_size, timeout_s)
        finally:
            os.close(reports)
            guard.terminate()
            guard.wait()
        errors = _errors(Path(folder), codes)
        reasons = {Path(folder, f"skip.{rank}") for rank in errors}
        if errors and all(path.exists() for path in reasons):
            raise unittest.SkipTest(min(path.read_text(encoding="utf-8") for path in reasons))
        if about or errors:
            raise RanksFailedError(about or "a rank failed", errors)
        paths = [f"{folder}/result.{rank}" for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in paths]


def _pickled(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[str, str, bytes]:
    """The call, after the name of the function's module and its file."""
    called = getattr(function, "func", function)  # of a functools.partial
    module = sys.modules.get(getattr(called, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    if getattr(module, "__name__", "") == "__main__" and not file:
        raise TypeError(
            f"the ranks cannot import {getattr(called, '__name__', called)}, which a notebook or an"
            " interpreter has defined: write it to a file, in a notebook by %%writefile, and import"
            " it"
        )
    try:
        call = pickle.dumps((function, arguments))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            "run_ranks() takes a function at the top level of a module, and arguments that can be"
            f" pickled: {error}"
        ) from error
    return getattr(module, "__name__", ""), file, call


def _call_of(module: str, file: str, call: bytes) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function and its arguments; its module may be one that only the test runner can find."""
    if module not in sys.modules and file and not _can_be_found(module):
        for depth, folder in enumerate(Path(file).parents[: module.count(".")]):
            package = types.ModuleType(module.rsplit(".", depth + 1)[0])
            package.__path__ = [str(folder)]
            sys.modules.setdefault(package.__name__, package)
        spec: Any = importlib.util.spec_from_file_location(module, file)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return pickle.loads(call)


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def _run_rank(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    backend: str,
    call: tuple[str, str, bytes],
) -> None:
    try:
        function, arguments = _call_of(*call)
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s / 2),
        )
        torch.save(function(rank, *arguments), f"{folder}/result.{rank}")
        dist.destroy_process_group()
    except BaseException as error:
        # pytest's own, without an import of pytest.
        if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped":
            Path(folder, f"skip.{rank}").write_text(str(error), encoding="utf-8")
        path = Path(folder, f"error.{rank}")
        part = Path(folder, f"error.{rank}.part")
        part.write_text(traceback.format_exc(), encoding="utf-8")
        part.replace(path)
        report_handled_exception()
        raise SystemExit(1) from None


def _wait(
    reports: int, guard: int, world_size: int, timeout_s: float
) -> tuple[str, list[int | None]]:
    """Until all have ended, one has failed and the others had time to, or time is up.

    Returns why it failed, and the status of each rank that has ended.
    """
    deadline, about = time.monotonic() + timeout_s, ""
    codes: list[int | None] = [None] * world_size
    while None in codes:
        left = deadline - time.monotonic()
        if left <= 0:
            about = about or f"the ranks did not end in {timeout_s:g} s"
            return about + _verdict(guard), codes
        if not wait([reports], left):
            continue
        text = os.read(reports, 1 << 16).decode()
        if not text:
            return "the process that started the ranks was killed", codes
        for line in text.splitlines():
            rank, code = map(int, line.split())
            codes[rank] = code
        if not about and any(codes):
            about, deadline = "a rank failed", min(deadline, time.monotonic() + GRACE_S)
    return about, codes


def _verdict(guard: int) -> str:
    """What `ringcomm doctor --job` says of ranks that are still there."""
    try:
        return f": {job.examine(guard)['verdict']}"
    except (job.JobError, OSError):  # a group of another backend, or none yet
        return ""


def _errors(folder: Path, codes: Sequence[int | None]) -> dict[int, str]:
    """Of ranks that ended without one, which are the cause, and then by the time of the error."""
    found = {}
    for rank, code in enumerate(codes):
        names = (f"error.{rank}", *([f"result.{rank}"] if code == 0 else []))
        if code is not None and not any(Path(folder, name).exists() for name in names):
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            found[rank] = f"its process ended with {end} and no result; its output may say why"
    files = [path for path in folder.glob("error.*") if path.suffix[1:].isdecimal()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        found[int(path.suffix[1:])] = path.read_text(encoding="utf-8")
    return found
