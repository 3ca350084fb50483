"""A case of a table of pairs on ranks: its steps, a checkpoint on the way, and what they raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pair_lomo
import pair_mesh
import pair_zero
import torch
import torch.distributed as dist
from pair_model import STEPS, WORLD_SIZE
from pair_table import Case, Table
from torch import Tensor

RESUME_STEP = 2
Oracle = Callable[[Case, list[Any]], torch.optim.Optimizer]

# By name: the table, what trains a case, and the optimizer of one process.
TABLES: dict[str, tuple[Table, Any, Oracle]] = {
    "zero.shard": (pair_zero.TABLE, pair_zero.Training, pair_zero.torch_optimizer),
    "Lomo and AdaLomo": (pair_lomo.TABLE, pair_lomo.Training, pair_lomo.oracle),
    "Meshes": (pair_mesh.TABLE, pair_mesh.Training, pair_mesh.oracle),
}


def world_size(table: str) -> int:
    """The ranks that a table's cases run on."""
    return pair_mesh.WORLD_SIZE if table == "Meshes" else WORLD_SIZE


def num_data_ranks(case: Case) -> int:
    """How many of them have rows of their own."""
    return pair_mesh.DATA_RANKS[case["mesh"]] if "mesh" in case else WORLD_SIZE


def train(rank: int, table: str, case: Case, folder: Path) -> dict[str, Tensor]:
    """Trains a case; the whole weights at the end."""
    training = TABLES[table][1](case, dist.group.WORLD, _sub(folder, "first"))
    return _train(rank, training, case, folder)


def raised(rank: int, table: str, case: Case, folder: Path) -> tuple[str, str, bool]:
    """Trains a case: the kind and text of what was raised, and whether weights are as before."""
    try:
        training = TABLES[table][1](case, dist.group.WORLD, _sub(folder, "first"))
    except Exception as error:
        return type(error).__name__, str(error), True
    before = training.snapshot()
    try:
        _train(rank, training, case, folder)
    except Exception as error:
        is_same = all(map(torch.equal, before, training.snapshot()))
        return type(error).__name__, str(error), is_same
    return "", "", False


def _train(rank: int, training: Any, case: Case, folder: Path) -> dict[str, Tensor]:
    ranks = range(rank, rank + 1)
    for step in range(STEPS):
        if step == RESUME_STEP and case["resume"] != "no":
            saved = training.saved()
            group, name = dist.group.WORLD, "second"
            if case["resume"] == "one rank":  # that stands for all
                group = [dist.new_group([r]) for r in range(WORLD_SIZE)][rank]
                ranks, name = range(WORLD_SIZE), f"alone{rank}"
            training = type(training)(case, group, _sub(folder, name))
            training.load(saved)
        training.step(step, ranks)
    whole: dict[str, Tensor] = training.whole_weights()
    return whole


def _sub(folder: Path, name: str) -> Path:
    found = folder / name
    found.mkdir(parents=True, exist_ok=True)
    return found
