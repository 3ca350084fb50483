"""A system call of one rank fails: all ranks work, or all raise its reason at once.

RINGCOMM_FAULTS=1 runs every case of failing_calls.py, RINGCOMM_FAULTS=20 every twentieth. Not yet
among the ordinary tests: docs/open.md has the cases that hang.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"
STEP = os.environ.get("RINGCOMM_FAULTS")


@pytest.mark.skipif(not STEP, reason="RINGCOMM_FAULTS=1 runs every case")
@pytest.mark.skipif(os.uname().sysname != "Linux" or not shutil.which("c++"), reason="no compiler")
@pytest.mark.skipif("gnu" not in str(sysconfig.get_config_var("HOST_GNU_TYPE")), reason="no glibc")
def test_one_failing_call(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/14170 https://github.com/vllm-project/vllm/issues/16259

    Of each transport, in each phase of a group; the rank's process then ends or lives on.
    """
    library = str(tmp_path / "failing_calls.so")
    source = str(SUPPORT / "failing_calls.cc")
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "failing_calls.py"), "0", STEP or "1"],
        env={**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=7200,
        check=False,
    )
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case["problem"]] == []
    assert done.returncode == 0
    assert {case["transport"] for case in cases} == {"memory", "messages", "hosts"}
    latest_s = max(case["apart_s"] for case in cases)
    print(f"{len(cases)} cases; the ranks said their last at most {latest_s} s apart")
