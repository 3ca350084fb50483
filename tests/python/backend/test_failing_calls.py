"""A system call of one rank fails: all ranks work, or all raise its reason at once.

Libraries that are preloaded make calls fail, and count malloc().

RINGCOMM_FAULTS=1 runs every case of failing_calls.py, RINGCOMM_FAULTS=20:3 every twentieth from
number 3 on; `.ci/run stress` runs all.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_programs import run_command, run_program

from ringcomm import ops
from ringcomm.testing import run_ranks
from ringcomm.torch_names import TORCH_VERSION

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"
# Of every kind of call.
SAMPLE = (
    "memory/init/connect/EPERM/all/lives on",
    "memory/init/memfd_create/ENOMEM/first/lives on",
    "memory/init/mmap/ENOMEM/first/ends",
    "memory/init/pthread_create/EAGAIN/all/lives on",
    "memory/init/socket/EMFILE/first/ends",
    "memory/first use/accept4/EMFILE/all/ends",
    "memory/first use/accept4/EPERM/all/lives on",
    "memory/first use/fstat/EIO/all/lives on",
    "memory/first use/recvmsg/EINTR/first/lives on",
    "memory/steady/poll/EINTR/first/ends",
    "messages/init/listen/EPERM/all/lives on",
    "messages/first use/accept4/EPERM/all/ends",
    "messages/first use/sendmsg/EPERM/all/lives on",
    "messages/steady/mmap/ENOMEM/all/lives on",
    "messages/steady/recvmsg/ENOBUFS/first/ends",
    "hosts/init/eventfd/EMFILE/all/lives on",
    "hosts/first use/accept4/EPERM/first/lives on",
    "hosts/steady/mmap/ENOMEM/all/ends",
)


# A rank whose poll() a sandbox refuses from now on, while its peer dies.
REFUSED_POLL = """
import ctypes, errno, os, signal, sys
import torch
import torch.distributed as dist
import ringcomm
from ranks import init_group

rank, shim = int(sys.argv[1]), ctypes.CDLL(None)
init_group(rank, 2, sys.argv[2], 90)
if rank == 0:
    shim.fail_calls(b"poll", errno.EPERM, 1, True)
tensor = torch.ones(4)
dist.all_reduce(tensor, group=dist.new_group([0, 1]))  # who watches returns from its last poll()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(tensor)
except ringcomm.PeerDiedError as error:
    print(error.rank, shim.count_calls(b"poll") > 0)
"""

pytestmark = [
    pytest.mark.skipif(
        os.uname().sysname != "Linux" or not shutil.which("c++"), reason="no compiler"
    ),
    pytest.mark.skipif(
        "gnu" not in str(sysconfig.get_config_var("HOST_GNU_TYPE")), reason="no glibc"
    ),
]


def preload(name: str, folder: Path) -> dict[str, str]:
    """The environment of a program with a library of SUPPORT."""
    library, source = str(folder / f"{name}.so"), str(SUPPORT / f"{name}.cc")
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    return {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return preload("failing_calls", tmp_path_factory.mktemp("shim"))


def test_a_death_is_noticed_where_poll_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/14170"""
    ranks = run_program(REFUSED_POLL, tmp_path / "store", env=env)
    assert [rank.out for rank in ranks] == ["1 True\n", ""], ranks
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]


def test_one_failing_call(env: dict[str, str]) -> None:
    """https://github.com/pytorch/pytorch/issues/14170 https://github.com/vllm-project/vllm/issues/16259

    Of each transport, in each phase of a group; the rank's process then ends or lives on.
    """
    step = os.environ.get("RINGCOMM_FAULTS")
    program = [sys.executable, "-W", "ignore", str(HERE / "failing_calls.py")]
    limit_s = 4 * 3600 if step else 900
    done = run_command(*program, *([step] if step else SAMPLE), env=env, timeout_s=limit_s)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case["problem"]] == []
    assert done.returncode == 0
    if not step:
        # How often a phase makes a call is not promised.
        assert [case["case"] for case in cases] == list(SAMPLE)
        assert sum(case["calls"] > 0 for case in cases) > len(cases) // 2
    latest_s = max(case["apart_s"] for case in cases)
    print(f"{len(cases)} cases; the ranks said their last at most {latest_s} s apart")


# ---- calls in place allocate nothing

NUM_CALLS = 200
# pybind11 3.0.1, which torch 2.11 brings, has the arguments of each call on the heap.
NUM_OF_PYBIND11 = 3 if TORCH_VERSION < (2, 12) else 0


def allocations_of_calls(rank: int) -> list[int]:
    """The fewest of a call: a wait that sleeps tells the recorder for whom, and allocates."""
    count = ctypes.CDLL(None).count_allocations
    count.restype = ctypes.c_long
    found = []
    for num_elems in (4096, 32768):
        x, residual, weight = (torch.zeros(num_elems, dtype=torch.bfloat16) for _ in range(3))
        calls: tuple[Callable[[], object], ...] = (
            partial(ops.all_reduce, x, out=x),
            partial(ops.all_reduce, x, out=residual),
            partial(ops.all_reduce_add_rms_norm_, x, residual, weight),
            partial(ops.all_reduce, x),
        )
        for call in calls:
            numbers = []
            for _ in range(NUM_CALLS):
                before = count()
                call()
                numbers.append(count() - before)
            found.append(min(numbers))
    return found


def test_calls_in_place_allocate_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 and 64 KiB of bfloat16; a call that returns a new tensor is seen."""
    monkeypatch.setenv("LD_PRELOAD", preload("count_allocations", tmp_path)["LD_PRELOAD"])
    for counts in run_ranks(2, allocations_of_calls):
        found = [num > NUM_OF_PYBIND11 for num in counts]
        assert found == [False, False, False, True] * 2, counts
