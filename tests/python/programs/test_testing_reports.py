"""What users of other helpers reported that start ranks for tests and notebooks."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from torch.utils.data import DataLoader

from ringcomm.testing import RanksFailedError, guard, run_ranks

LIMIT_S = 300.0  # a busy machine takes long for ranks that import torch


def test_the_error_goes_through_a_pipe() -> None:
    """https://github.com/pytorch/pytorch/issues/70116"""
    error = RanksFailedError("a rank failed", {1: "KeyError", 0: "a timeout"})
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.errors) == (str(error), error.errors)


def nothing(rank: int, *_: object) -> None: ...


def test_what_cannot_be_pickled_is_refused_before_a_start() -> None:
    """https://github.com/huggingface/accelerate/issues/1290"""

    def local(rank: int) -> None: ...

    calls: list[tuple[Any, ...]] = [(local,), (lambda rank: None,), (nothing, lambda x: x)]
    for call in [*calls, (nothing, open(os.devnull))]:  # noqa: SIM115
        with pytest.raises(TypeError, match="takes a function at the top level of a module"):
            run_ranks(2, *call)


def test_a_function_of_a_cell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/fastai/fastai/issues/3665"""
    cell = types.FunctionType(nothing.__code__, {"__name__": "__main__"}, "train")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(TypeError, match=r"cannot import train, .* by %%writefile"):
        run_ranks(2, cell)


def skip(rank: int, ranks: tuple[int, ...], is_pytests: bool) -> int:
    if rank not in ranks:
        return rank
    if is_pytests:
        pytest.skip("no GPU")
    raise unittest.SkipTest("no GPU")


def skip_or_fail(rank: int) -> None:
    if rank == 0:
        pytest.skip("no GPU")
    raise KeyError("the cause")


@pytest.mark.parametrize(("ranks", "is_pytests"), [((0, 1), True), slow((1,), False)])
def test_a_skip_is_a_skip(ranks: tuple[int, ...], is_pytests: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/46093"""
    with pytest.raises(unittest.SkipTest, match="no GPU"):
        run_ranks(2, skip, ranks, is_pytests, timeout_s=LIMIT_S)


@pytest.mark.slow
def test_a_skip_does_not_hide_a_failure() -> None:
    """https://github.com/pytorch/pytorch/pull/179774"""
    with pytest.raises(RanksFailedError, match="KeyError: 'the cause'"):
        run_ranks(2, skip_or_fail, timeout_s=LIMIT_S)


@pytest.mark.slow
def test_modules_that_only_pytest_can_find(tmp_path: Path) -> None:
    """https://github.com/pytest-dev/pytest/issues/12178"""
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["ringcomm.testing.plugin"]\n')
    (tmp_path / "tests" / "test_of_user.py").write_text(
        "def double(rank): return 2 * rank\ndef test(ranks): assert ranks(double) == [0, 2]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "--rootdir", str(tmp_path), str(tmp_path)]
    options: Any = {"capture_output": True, "text": True, "timeout": 300}
    elsewhere = tmp_path / "tests"  # from where Python finds no package tests
    done = subprocess.run(command, cwd=elsewhere, check=False, **options)
    assert "1 passed" in done.stdout, done.stdout


def load(rank: int) -> float:
    rows: Any = range(rank, 8, 2)
    total = torch.zeros(())
    for batch in DataLoader(rows, num_workers=2):
        total += batch.sum()
    dist.all_reduce(total)
    return float(total)


@pytest.mark.slow
def test_ranks_have_loaders_with_workers_and_need_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pytorch/pytorch/issues/14390 and
    https://github.com/flashinfer-ai/flashinfer/pull/5153
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert run_ranks(2, load, timeout_s=LIMIT_S) == [28.0, 28.0]


def crash_at_exit(rank: int) -> int:
    if rank == 1:
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    return rank


def test_a_crash_after_the_result_is_a_failure() -> None:
    """https://github.com/python/cpython/pull/155162"""
    with pytest.raises(RanksFailedError) as error:
        run_ranks(2, crash_at_exit, timeout_s=LIMIT_S)
    assert "SIGSEGV" in error.value.errors[1]


class TwoArgumentsError(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def raise_it(rank: int) -> None:
    raise TwoArgumentsError("stopped", "of a test")


def test_an_exception_that_cannot_be_pickled_is_told() -> None:
    """https://github.com/ethereum/asyncio-run-in-process/issues/28"""
    with pytest.raises(RanksFailedError, match="TwoArgumentsError: stopped because of a test"):
        run_ranks(1, raise_it, timeout_s=LIMIT_S)


def stop(rank: int, folder: str) -> None:
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.slow
def test_a_stopped_rank_does_not_hang_the_test(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/194943"""
    with pytest.raises(RanksFailedError) as error:
        run_ranks(2, stop, str(tmp_path), timeout_s=60.0)
    assert "CollectiveTimeoutError" in error.value.errors[0]
    assert not Path("/proc", (tmp_path / "pid1").read_text()).exists()


# Starts a child with a session of its own, and one whose parent has ended; they end with 600 s.
CHILDREN = """
import os, sys, time
def live(kind):
    os.setsid()
    with open(f"{sys.argv[1]}.{kind}.{os.getpid()}", "w"):
        time.sleep(600)
if os.fork() == 0:
    live("child")
if os.fork() == 0:
    if os.fork() == 0:
        live("orphan")
    os._exit(0)
"""
# A rank without torch: what it has started, and how it ends.
RANK = """
import os, signal, sys, time
name, end, rank = sys.argv[1:]
sys.argv[1] = name = f"{name}.{rank}"
exec(%r)
from pathlib import Path
path = Path(name)
while len(list(path.parent.glob(path.name + ".*"))) < 2:
    time.sleep(0.01)
if end == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "fails":
    os._exit(3)
if end == "hangs":
    time.sleep(600)
"""


def are_there(folder: Path) -> list[int]:
    """The children that are alive."""
    pids = [int(path.suffix[1:]) for path in folder.glob("rank.*.*.*")]
    return [pid for pid in pids if Path("/proc", str(pid)).exists()]


@pytest.mark.parametrize("end", ["returns", "fails", "is killed", "hangs"])
def test_no_process_of_a_rank_outlives_the_guard(tmp_path: Path, end: str) -> None:
    """https://github.com/sgl-project/sglang-jax/pull/1217 and
    https://github.com/onyx-dot-app/onyx/pull/13832
    """
    python = [sys.executable, "-IS"]
    own = subprocess.Popen([*python, "-c", "input()"], stdin=subprocess.PIPE)
    reports, writable = os.pipe()
    command = [*python, guard.__file__, str(os.getpid()), str(writable), "2", *python]
    program = ["-c", RANK % CHILDREN, str(tmp_path / "rank"), end]
    process = subprocess.Popen([*command, *program], pass_fds=[writable])
    os.close(writable)
    with open(reports) as file:
        if end == "hangs":
            while len(are_there(tmp_path)) < 4:
                time.sleep(0.01)
        else:
            status = {"returns": 0, "fails": 3, "is killed": -9}[end]
            assert sorted(file.readline() for _ in range(2)) == [f"0 {status}\n", f"1 {status}\n"]
        process.terminate()
        assert process.wait(60) == 0
        assert file.read() == ""
    assert len(list(tmp_path.iterdir())) == 4
    assert are_there(tmp_path) == []
    assert own.poll() is None
    own.communicate(b"\n", timeout=60)


def start_children(rank: int, folder: str) -> None:
    name = f"{folder}/rank.{rank}"
    subprocess.Popen([sys.executable, "-IS", "-c", CHILDREN, name])
    while len(list(Path(folder).glob(f"rank.{rank}.*"))) < 2:
        time.sleep(0.02)
    dist.barrier()


@pytest.mark.slow
def test_no_process_of_a_rank_outlives_the_test(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/8805"""
    run_ranks(2, start_children, str(tmp_path), timeout_s=LIMIT_S)
    assert len(list(tmp_path.iterdir())) == 4
    assert are_there(tmp_path) == []


def wait_for_the_end(rank: int, folder: str) -> None:
    start_children(rank, folder)
    Path(folder, f"here{rank}").touch()
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nor_a_test_runner_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """https://github.com/underworldcode/underworld3/issues/639"""
    program = (
        "import test_testing_reports as t\n"
        f"t.run_ranks(2, t.wait_for_the_end, {str(tmp_path)!r}, timeout_s=300)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    runner = subprocess.Popen([sys.executable, "-c", program], env=environment)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("here*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(are_there(tmp_path)) == 4
    runner.send_signal(number)
    runner.wait(60)
    while are_there(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_program_that_starts_ranks_when_it_is_imported(tmp_path: Path) -> None:
    """Each process would start two more, as a frozen program without freeze_support() does."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        f"with open({str(tmp_path / 'starts')!r}, 'a') as file: file.write('start\\n')\n"
        "from ringcomm.testing import run_ranks\n"
        "def nothing(rank): ...\n"
        "run_ranks(2, nothing)\n"
    )
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, str(program)], check=False, **options)
    assert "RanksFailedError" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr
    assert (tmp_path / "starts").read_text() == "start\n" * 3
