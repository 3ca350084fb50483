"""Faults of the Triton kernels: a case runs by the PTX that Triton compiles, on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.judge.backends import python
from tests.judge.bounded import run_bounded
from tests.judge.table import Fault, FaultError, Verdict


def judge(fault: Fault, scratch: Path, limit_s: float) -> Verdict:
    """Noticed if the case of the detail, in the script, says the words of the detail.

    These are words of the case's error, or the last ones of the machine, which ends the process.
    """
    tree = scratch / "tree"
    python.copy(fault.root, tree)
    kernels = tree / "ringcomm" / "kernels"
    if not kernels.exists():  # as it is installed
        kernels.symlink_to("../kernels")
    source = tree / fault.file
    source.write_text(fault.changed(), "utf-8")
    folders = [tree, tree / "tests/ptx", tree / "tools", *(tree / "tests/python").iterdir()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-W", "ignore", fault.tests[0], "90", "exact", fault.detail["case"]]
    try:
        done = run_bounded(command, tree, limit_s, env)
    finally:
        source.write_text((fault.root / fault.file).read_text("utf-8"), "utf-8")
    if done.status is None:
        return Verdict(True, "time", done.seconds, f"no end after {limit_s:.0f} s")
    last = done.output.rsplit("\n", 1)[-1]
    said = done.output if done.status != 0 else json.loads(last)[fault.detail["case"]]
    if not said:
        return Verdict(False, "", done.seconds, "")
    if fault.detail["said"] not in said:
        raise FaultError(f"{fault.id} is noticed without {fault.detail['said']!r}:\n{said[-2000:]}")
    return Verdict(True, fault.detail["case"], done.seconds, said.strip().splitlines()[0])
