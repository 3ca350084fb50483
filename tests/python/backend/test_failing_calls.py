"""A system call of one rank fails: all ranks work, or all raise its reason at once.

`make stress` runs every case of failing_calls.py, and the ordinary tests one of SHORT.
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
# Coprime to the cases of a call, so that the short run has all calls and errors in turn.
SHORT = 37


@pytest.mark.skipif(os.uname().sysname != "Linux" or not shutil.which("c++"), reason="no compiler")
@pytest.mark.skipif("gnu" not in str(sysconfig.get_config_var("HOST_GNU_TYPE")), reason="no glibc")
def test_one_failing_call(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/14170 https://github.com/vllm-project/vllm/issues/16259

    Of each transport, in each phase of a group; the rank's process then ends or lives on.
    """
    library = str(tmp_path / "failing_calls.so")
    source = str(SUPPORT / "failing_calls.cc")
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    step = 1 if os.environ.get("RINGCOMM_FAULTS") == "all" else SHORT
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "failing_calls.py"), "0", str(step)],
        env={**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600 if step > 1 else 7200,
        check=False,
    )
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case["problem"]] == []
    assert done.returncode == 0
    assert {case["transport"] for case in cases} == {"memory", "messages", "hosts"}
    latest_s = max(case["apart_s"] for case in cases)
    print(f"{len(cases)} cases; the ranks said their last at most {latest_s} s apart")
