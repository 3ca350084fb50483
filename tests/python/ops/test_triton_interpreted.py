"""The Triton kernels, interpreted on the CPU. Needs no part of the build for GPUs.

The newest Triton interprets them in `make compat`: Triton 3.9 refused the dtype of a mask that
earlier ones take.
"""

from __future__ import annotations

from typing import Any

import loss_cases
import pytest
import update_cases
from triton_scripts import interpreted, needs_triton

CASES: dict[str, Any] = {"loss_cases": loss_cases, "update_cases": update_cases}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("script", CASES)
def test_kernels_do_what_the_cpu_and_the_oracle_do(script: str) -> None:
    said = interpreted(f"{script}.py")
    assert sorted(said) == sorted(CASES[script].INTERPRETED)
    assert {name: text for name, text in said.items() if text} == {}
