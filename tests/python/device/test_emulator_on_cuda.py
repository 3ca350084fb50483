"""The emulator's rules that are CUDA's own, with CUDA's driver: they must hold there as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import emulator_driver
import pytest
import torch
from test_emulator import RULES_OF_CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("rules", RULES_OF_CUDA, ids=lambda rules: rules.__name__)
def test_the_rules_are_cudas(rules: Callable[..., None], tmp_path: Path) -> None:
    emulator_driver.run(rules, folder=tmp_path, is_cuda=True)
