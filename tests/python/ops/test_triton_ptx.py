"""The Triton kernels run on this CPU by the PTX that Triton compiles for GPUs (tests/ptx)."""

from __future__ import annotations

import json
from typing import Any

import loss_cases
import pytest
import triton_mutants
import update_cases
from triton_scripts import run, runs_ptx, start

pytestmark = runs_ptx
NAMES: dict[str, list[str]] = {
    "loss_cases": list(loss_cases.CHECKS),
    "update_cases": update_cases.NAMES,
}
# Every kernel; the others run in the slow test.
FEW = {
    "loss_cases": ["beyond_32_bits", "no_class"],
    "update_cases": [
        "sgd-2500-bfloat16-bfloat16-random",
        "sgd-shift-split",
        "embedding-padded",
        "beyond_32_bits",
        "adalomo-row",
    ],
}
# From nothing, a kernel takes three seconds of a core, and there are some hundred.
TIMEOUT_S = 1800


def check_cases(script: str, arch: int, names: list[str]) -> None:
    said = json.loads(run(f"{script}.py", str(arch), *names, timeout_s=TIMEOUT_S))
    assert sorted(said) == sorted(names)
    assert {name: text for name, text in said.items() if text} == {}


@pytest.mark.parametrize("script", FEW)
def test_some_cases(script: str) -> None:
    check_cases(script, 90, FEW[script])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 80, 100])
@pytest.mark.parametrize("script", NAMES)
def test_kernels_do_what_the_cpu_and_the_oracle_do(script: str, arch: int) -> None:
    check_cases(script, arch, NAMES[script])
