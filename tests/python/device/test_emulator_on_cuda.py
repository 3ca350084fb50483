"""The emulator's rules that are CUDA's own, with CUDA's driver: they must hold there as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import buildconfig
import emulator_driver
import pytest
import torch
from test_emulator import RULES_OF_CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("rules", RULES_OF_CUDA, ids=lambda rules: rules.__name__)
def test_the_rules_are_cudas(rules: Callable[..., None], tmp_path: Path) -> None:
    emulator_driver.run(rules, folder=tmp_path, is_cuda=True)


@pytest.mark.skipif(buildconfig.find_nvcc() is None, reason="no nvcc here")
def test_toy_kernels_compile_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_CUDA_ARCHS", "90")
    emulator_driver.compile_toys(tmp_path / "toys")
    image = (tmp_path / "toys").read_bytes()
    assert all(f"toy_{name}".encode() in image for name in emulator_driver.TOYS_OF_CUDA)
