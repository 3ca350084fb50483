"""ringcomm.testing: what users' tests get of ranks that return, raise, die or hang.

What users of other helpers reported that start ranks for tests and notebooks: the addresses.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from rank_programs import run_command
from torch.utils.data import DataLoader

from ringcomm.testing import RanksFailedError, guard, plugin, run_ranks

# Each starts processes that import torch, for which a busy machine takes long.
LIMIT_S = 300.0


def total(rank: int, factor: float) -> float:
    x = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(x)
    return float(x)


@pytest.mark.parametrize("backend", quick(["ringcomm", "gloo"], "ringcomm"))
def test_results_by_rank(backend: str) -> None:
    assert run_ranks(2, total, 2.0, backend=backend, timeout_s=LIMIT_S) == [6.0] * 2


class TwoArgumentsError(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def raises(error: type[Exception], *args: str) -> None:
    raise error(*args)


def send_itself(number: int) -> None:
    os.kill(os.getpid(), number)


# How rank 1 ends, and words of the errors, of which the first one is the cause. Stopped and after
# its result: https://github.com/pytorch/pytorch/issues/194943 and
# https://github.com/python/cpython/pull/155162; an exception that cannot be pickled:
# https://github.com/ethereum/asyncio-run-in-process/issues/28; beside a rank that skips:
# https://github.com/pytorch/pytorch/pull/179774
ENDS: dict[str, tuple[Callable[[], Any], dict[int, str]]] = {
    "raises": (
        lambda: raises(KeyError, "the cause"),
        {1: "KeyError: 'the cause'", 0: "died: KeyError: 'the cause'"},
    ),
    "raises what cannot be pickled": (
        lambda: raises(TwoArgumentsError, "stopped", "of a test"),
        {1: "TwoArgumentsError: stopped because of a test"},
    ),
    "raises beside a skip": (lambda: raises(KeyError, "the cause"), {1: "KeyError: 'the cause'"}),
    "dies": (
        lambda: send_itself(signal.SIGKILL),
        {1: "its process ended with signal SIGKILL and no result"},
    ),
    "leaves": (lambda: os._exit(0), {1: "its process ended with exit status 0 and no result"}),
    "hangs": (lambda: time.sleep(600), {0: "CollectiveTimeoutError"}),
    "is stopped": (lambda: send_itself(signal.SIGSTOP), {0: "CollectiveTimeoutError"}),
    "crashes after its result": (
        lambda: atexit.register(send_itself, signal.SIGSEGV),
        {1: "SIGSEGV"},
    ),
}


def end_on_rank_1(rank: int, how: str, folder: str) -> None:
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        ENDS[how][0]()
    elif how == "raises beside a skip":
        pytest.skip("no GPU")
    dist.barrier()


QUICK = ("raises", "raises what cannot be pickled", "crashes after its result")


@pytest.mark.parametrize("how", quick(ENDS, *QUICK))
def test_the_error_has_the_cause_first(how: str, tmp_path: Path) -> None:
    """A hang has the error of its peer and the doctor's verdict."""
    timeout_s = 60.0 if how in ("hangs", "is stopped") else LIMIT_S
    with pytest.raises(RanksFailedError, match="a rank failed") as error:
        run_ranks(2, end_on_rank_1, how, str(tmp_path), timeout_s=timeout_s)
    errors, expected = error.value.errors, ENDS[how][1]
    assert "skip" in how or next(iter(errors)) == next(iter(expected))
    for rank, words in expected.items():
        assert words in errors[rank], errors
    assert not how.startswith("raises") or "end_on_rank_1" in str(error.value)
    assert how != "hangs" or list(errors) == [0]
    assert how != "hangs" or "rank 1" in str(error.value).splitlines()[0]
    for rank in range(2):
        assert not Path("/proc", (tmp_path / f"pid{rank}").read_text()).exists()


def sleep(rank: int) -> None:
    time.sleep(30)


def test_ranks_that_are_late_are_ended() -> None:
    with pytest.raises(RanksFailedError, match=r"the ranks did not end in 1\.5 s"):
        run_ranks(1, sleep, timeout_s=1.5)


def pytest_of(folder: Path, text: str, *options: str, cwd: Path) -> str:
    """What pytest says of a file of tests, with the plugin."""
    (folder / "conftest.py").write_text('pytest_plugins = ["ringcomm.testing.plugin"]\n')
    cwd.mkdir(exist_ok=True)
    (cwd / "test_of_user.py").write_text(text)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, folder)
    return run_command(*command, cwd=cwd, timeout_s=LIMIT_S).stdout


@pytest.mark.slow
def test_the_fixture(tmp_path: Path) -> None:
    text = (
        "import pytest\n"
        "def same(rank, value): return rank, value\n"
        "def wrong(rank): assert rank == 0\n"
        "def test_two(ranks): assert ranks(same, 'x') == [(0, 'x'), (1, 'x')]\n"
        "@pytest.mark.ranks(1, 3)\n"
        "def test_others(ranks): assert len(ranks(same, 1)) == ranks.world_size\n"
        "def test_fails(ranks): ranks(wrong)\n"
    )
    said = pytest_of(tmp_path, text, cwd=tmp_path)
    for words in ("1 failed, 3 passed", "test_fails[2 ranks]", "rank 1: Traceback"):
        assert words in said, said


@pytest.mark.slow
def test_the_example_of_the_plugin(tmp_path: Path) -> None:
    """As its docstring has it, without what a reader would have to add."""
    lines = str(plugin.__doc__).splitlines()
    example = "\n".join(line[4:] for line in lines if line.startswith("    ") or not line)
    _, conftest, of_conftest, name, of_test = re.split(r"^# (\w+\.py)\n", example, flags=re.M)
    assert (conftest, name) == ("conftest.py", "test_total.py")
    (tmp_path / conftest).write_text(of_conftest)
    (tmp_path / name).write_text(of_test)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path)
    said = run_command(*command, cwd=tmp_path, timeout_s=LIMIT_S).stdout
    assert "2 passed" in said, said


@pytest.mark.slow
def test_modules_that_only_pytest_can_find(tmp_path: Path) -> None:
    """https://github.com/pytest-dev/pytest/issues/12178"""
    text = "def double(rank): return 2 * rank\ndef test(ranks): assert ranks(double) == [0, 2]\n"
    options = ("--import-mode=importlib", "--rootdir", str(tmp_path))
    # From a folder where Python finds no package tests.
    said = pytest_of(tmp_path, text, *options, cwd=tmp_path / "tests")
    assert "1 passed" in said, said


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


@pytest.mark.parametrize(("ranks", "is_pytests"), [((0, 1), True), slow((1,), False)])
def test_a_skip_is_a_skip(ranks: tuple[int, ...], is_pytests: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/46093"""
    with pytest.raises(unittest.SkipTest, match="no GPU"):
        run_ranks(2, skip, ranks, is_pytests, timeout_s=LIMIT_S)


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
        "import test_testing as t\n"
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
    done = run_command(sys.executable, program)
    assert "RanksFailedError" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr
    assert (tmp_path / "starts").read_text() == "start\n" * 3
