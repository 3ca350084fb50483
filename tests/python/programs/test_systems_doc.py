"""docs/systems.md: the lines that start each system run, and train."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

PAGE = Path(__file__).resolve().parents[3] / "docs" / "systems.md"
SYSTEMS = re.findall(
    r"^## (.+?)$.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.M | re.S
)
NUM_BATCHES = 4


def loss_of(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    loss: Tensor = nn.functional.mse_loss(model(x).float(), y)
    return loss


def run_block(rank: int, code: str, folder: Path) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 2)]
    model = nn.Sequential(*layers)
    # What is partitioned, or goes through layers in parts, is the same on all ranks.
    is_shared = any(word in code for word in ("activations.", "ParallelLinear", "pipeline."))
    torch.manual_seed(0 if is_shared else rank)
    x = torch.randn(8, 6)
    losses: list[float] = []

    def seen(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        losses.append(float(loss.detach()))
        return loss

    names: dict[str, Any] = {
        "model": model,
        "loss_of": seen,
        "batches": [(x, x[:, :2].sin())] * NUM_BATCHES,
        "folder": folder,
    }
    exec(compile(code, str(PAGE), "exec"), names)
    return losses or names["losses"]


def test_the_page_has_systems() -> None:
    assert len(SYSTEMS) >= 5
    for name, code in SYSTEMS:
        lines = [line for line in code.splitlines() if line and "import " not in line]
        assert len(lines) <= 10, name


@pytest.mark.parametrize(("name", "code"), SYSTEMS, ids=[name for name, _ in SYSTEMS])
def test_its_lines_train(name: str, code: str, tmp_path: Path) -> None:
    for losses in run_ranks(2, run_block, code, tmp_path):
        assert len(losses) == NUM_BATCHES
        assert losses[-1] < losses[0]
