"""Starts the server of the ranks before the first test, and looks at the end what they have left.

With pytest-xdist several processes run test files, each with a server of its own. The process that
shares the files out has none; it collects what the servers have found at their end.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# For tests and their ranks. Names of modules are unique over all folders of tests.
_HERE = Path(__file__).parent
_OTHERS = ("benchmarks", "tools", "tests/clients", "tests/ptx")
_FOLDERS = [*_HERE.iterdir(), *(_HERE.parents[1] / name for name in _OTHERS)]
sys.path[:0] = [str(folder) for folder in _FOLDERS if folder.is_dir()]
# A shell ignores SIGINT in its background jobs, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports torch: what forks ranks must have no threads of it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# torch's store looks up the names of addresses, where a lost request costs 5 s without this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# To ask whether there is a GPU must not start CUDA in what forks ranks.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import ranks  # noqa: E402
from browsers import browser  # noqa: E402, F401  a fixture

_HAS_GPU = Path("/dev/nvidiactl").exists()

_left: list[str] = []  # behind, by ranks of the processes that run the tests


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """`make test` gives options of pytest-xdist; without it this process runs the tests."""
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option)
        parser.addoption("--no-loadscope-reorder", action="store_true")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Jobs of .ci/run keep the result of each test, for `.ci/run --skipped`."""
    folder = os.environ.get("RINGCOMM_TEST_RESULTS")
    if folder and not config.option.xmlpath:
        config.option.xmlpath = f"{folder}/{os.getpid()}.xml"


# What tests import at their top and ringcomm goes without.
_OPTIONAL = "accelerate|hypothesis|matplotlib|peft|playwright|rich|transformers|triton"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Tests whose packages are missing are left out, by name: the others run."""
    report = yield
    missing = re.search(f"No module named '({_OPTIONAL})\\b", str(report.longrepr))
    if report.failed and missing:
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, f"Skipped: needs the package {missing[1]}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process computes on GPUs: tests there count its free memory and its blocks."""
    return 0 if _HAS_GPU else 2


def _shares_out(config: pytest.Config) -> bool:
    return bool(config.pluginmanager.hasplugin("dsession"))


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


_num_threads_at_start = _num_threads()  # those of pytest-xdist


def pytest_sessionstart(session: pytest.Session) -> None:
    """With a GPU: modules of tests ask for it, and a fork of a process that did cannot use CUDA."""
    if _HAS_GPU and not _shares_out(session.config):
        ranks.start()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without one: all modules are imported, which the server has then, and no test has run."""
    gc.freeze()  # gc.collect() of a test visits the objects of tests, and not those of torch
    if not (_HAS_GPU or session.config.option.collectonly):
        assert _num_threads() == _num_threads_at_start, "a module starts threads at its import"
        ranks.start()
        if os.environ.get("RINGCOMM_TEST_DEVICE") == "emugpu" and not _shares_out(session.config):
            import emulated_gpu

            os.environ["RINGCOMM_EMULATOR_BOX"] = str(Path(ranks.server().folder) / "box")
            emulated_gpu.load()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device`: "cpu", and "cuda" where there is a GPU; ranks.place() takes it.

    With RINGCOMM_TEST_DEVICE=emugpu the emulated GPU alone.
    """
    if "device" in metafunc.fixturenames:
        import torch

        cuda = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
        asked = os.environ.get("RINGCOMM_TEST_DEVICE")
        metafunc.parametrize("device", [asked] if asked else ["cpu", *cuda])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A process that runs tests has ended; one that was killed says nothing, and xdist fails."""
    _left.extend(getattr(node, "workeroutput", {}).get("left", []))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After Ctrl-C pytest ends its fixtures here, before, and they need the server."""
    left = _left if _shares_out(session.config) else ranks.stop()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = left
        return
    left = [*left, *ranks.shared_memory_left()]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nleft behind by the ranks:", *left, sep="\n  ")


@pytest.fixture(autouse=True)
def _handlers_end_with_their_test() -> Iterator[None]:
    """A test that leaves another handler of signals fails, and not a later one that meets it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.fixture(scope="module", autouse=True)
def _pools_end_with_their_file() -> Iterator[None]:
    yield
    ranks.server().close_pools()
