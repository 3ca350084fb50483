"""Starts the server of the ranks before anything else, and looks at the end what they have left."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For tests and their ranks. Names of modules are unique over all folders of tests.
_HERE = Path(__file__).parent
_OTHERS = ("benchmarks", "tools", "tests/clients")
_FOLDERS = [*_HERE.iterdir(), *(_HERE.parents[1] / name for name in _OTHERS)]
sys.path[:0] = [str(folder) for folder in _FOLDERS if folder.is_dir()]
# A shell ignores SIGINT in its background jobs, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports torch: what forks ranks must have no threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# torch's store looks up the names of addresses, where a lost request costs 5 s without this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# To ask whether there is a GPU must not start CUDA in what forks ranks.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import ranks  # noqa: E402


def pytest_sessionstart(session: pytest.Session) -> None:
    ranks.start()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # gc.collect() of a test visits the objects of tests, and not those of torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device`: "cpu", and "cuda" where there is a GPU; ranks.place() takes it."""
    if "device" in metafunc.fixturenames:
        import torch

        cuda = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
        metafunc.parametrize("device", ["cpu", *cuda])


def pytest_sessionfinish(session: pytest.Session) -> None:
    left = ranks.server().stop()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nleft behind by the ranks:", *left, sep="\n  ")


@pytest.fixture(scope="module", autouse=True)
def _pools_end_with_their_file() -> Iterator[None]:
    yield
    ranks.server().close_pools()
