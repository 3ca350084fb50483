"""Faults of the CUDA kernels: nvcc's PTX of one kernel, translated and run on the CPU (tests/ptx).

Of the checkout, `.ci/run ptx-all` has built all kernels and the tests. A fault compiles the
kernel that its detail names from a copy of csrc and kernels, and links it in place of the one that
is built. The tests must fail with the words of the detail. tests/ptx/mutants_memory.py is no back
end: its mutants are not rows, but all orders of the PTX that nvcc made, and one is found in so many
of the seeds of a memory that is weak.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.judge.bounded import run_bounded
from tests.judge.table import Fault, FaultError, Verdict

# With a file of its own a kernel has no body.
_OWN_FILE = '#include "kernels/losses/loss_kernels.cu"\n'
_BY_BODY = """#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/kernel_list.h"
namespace ringcomm::cuda {{
RINGCOMM_WIDE_GPU_KERNEL({kernel}, KernelCall, ({body}))
}}
"""


def judge(fault: Fault, scratch: Path, limit_s: float) -> Verdict:
    """Noticed if the cases of the detail fail with one of its words, which `|` separates."""
    folder = scratch / "mutant"
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("csrc", "kernels"):
        shutil.copytree(fault.root / part, folder / part)
    for file, text in fault.texts().items():
        (folder / file).write_text(text, "utf-8")
    detail = fault.detail
    source = _BY_BODY.format(**detail) if detail["body"] else _OWN_FILE
    (folder / "csrc" / "mutant.cu").write_text(source, "utf-8")
    make = ["make", "-s", "-f", "tests/ptx/Makefile", "mutant", "FORM=all"]
    variables = [f"MUTANT={folder}", f"KERNEL={detail['kernel']}", f"PYTHON={sys.executable}"]
    built = run_bounded([*make, *variables], fault.root, limit_s)
    if built.status != 0:
        raise FaultError(f"{fault.id} does not compile:\n{built.output[-2000:]}")
    done = run_bounded([str(folder / "ptx_tests"), f"-tc={detail['cases']}"], fault.root, limit_s)
    seconds = built.seconds + done.seconds
    if done.status is None:
        return Verdict(True, "time", seconds, f"no end after {limit_s:.0f} s")
    lines = done.output.splitlines()
    for words in detail["said"].split("|"):
        said = next((line for line in lines if words in line), "")
        if done.status != 0 and said:
            return Verdict(True, detail["cases"], seconds, said.strip())
    if done.status != 0:
        end = done.output[-2000:]
        raise FaultError(f"{fault.id} is noticed without {detail['said']!r}:\n{end}")
    return Verdict(False, "", seconds, "")
