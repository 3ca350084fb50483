"""A system call of one rank fails: all ranks work, or all raise its reason at once.

RINGCOMM_FAULTS=1 runs every case of failing_calls.py, RINGCOMM_FAULTS=20:3 every twentieth from
number 3 on; `make stress` runs all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from rank_programs import run_program

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


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a program whose system calls can be made to fail."""
    library = str(tmp_path_factory.mktemp("shim") / "failing_calls.so")
    source = str(SUPPORT / "failing_calls.cc")
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    return {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(sys.path)}


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
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(HERE / "failing_calls.py"),
            *([step] if step else SAMPLE),
        ],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=4 * 3600 if step else 900,
        check=False,
    )
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case["problem"]] == []
    assert done.returncode == 0
    if not step:
        # How often a phase makes a call is not promised.
        assert [case["case"] for case in cases] == list(SAMPLE)
        assert sum(case["calls"] > 0 for case in cases) > len(cases) // 2
    latest_s = max(case["apart_s"] for case in cases)
    print(f"{len(cases)} cases; the ranks said their last at most {latest_s} s apart")
