"""A case of a table of pairs on ranks: its steps, a checkpoint on the way, and what they raise."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pair_lomo
import pair_loops
import pair_mesh
import pair_zero
import torch
import torch.distributed as dist
from pair_model import STEPS, WORLD_SIZE
from pair_table import Case, Table
from ranks import end_groups
from torch import Tensor

RESUME_STEP = 2
TIMEOUT = datetime.timedelta(seconds=30)
Oracle = Callable[[Case, list[Any]], Any]

# By name: the table, what trains a case, and the optimizer of one process.
TABLES: dict[str, tuple[Table, Any, Oracle]] = {
    "zero.shard": (pair_zero.TABLE, pair_zero.ZeroTraining, pair_zero.oracle),
    "Lomo and AdaLomo": (pair_lomo.TABLE, pair_lomo.LomoTraining, pair_lomo.oracle),
    "Meshes": (pair_mesh.TABLE, pair_mesh.MeshTraining, pair_mesh.oracle),
}


def world_size(table: str) -> int:
    """The ranks that a table's cases run on."""
    return pair_mesh.WORLD_SIZE if table == "Meshes" else WORLD_SIZE


def num_data_ranks(case: Case) -> int:
    """How many of them have rows of their own."""
    return pair_mesh.DATA_RANKS[case["mesh"]] if "mesh" in case else WORLD_SIZE


def train(rank: int, table: str, case: Case, folder: Path) -> dict[str, Tensor]:
    """Trains a case, in a group of its own; the whole weights at the end."""
    with _group(rank, table, case, folder):
        return _train(rank, _training(table, case, folder), case, folder)


def raised(rank: int, table: str, case: Case, folder: Path) -> tuple[str, str, bool]:
    """Trains a case: the kind and text of what was raised, and whether weights are as before."""
    with _group(rank, table, case, folder):
        try:
            training = _training(table, case, folder)
        except Exception as error:
            return type(error).__name__, str(error), True
        before = training.snapshot()
        try:
            _train(rank, training, case, folder)
        except Exception as error:
            is_same = all(map(torch.equal, before, training.snapshot()))
            return type(error).__name__, str(error), is_same
    return "", "", False


@contextlib.contextmanager
def _group(rank: int, table: str, case: Case, folder: Path) -> Iterator[None]:
    """A default group for a case: what an error leaves of it harms no other case."""
    num_ranks = world_size(table)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group(
        case["backend"], store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT
    )
    try:
        if case["backend"] == "gloo":  # a rank that ends would break what another still connects
            dist.barrier()
        with pair_loops.launched(case, rank, num_ranks):
            yield
    finally:
        end_groups()
        torch.compiler.reset()  # graphs of other cases have other shapes


def _training(table: str, case: Case, folder: Path) -> Any:
    return TABLES[table][1](case, dist.group.WORLD, _sub(folder, "first"))


def _train(rank: int, training: Any, case: Case, folder: Path) -> dict[str, Tensor]:
    ranks, steps = range(rank, rank + 1), range(STEPS)
    if case["resume"] != "no":
        training.loop.run(steps[:RESUME_STEP], ranks)
        steps = steps[RESUME_STEP:]
        saved = training.saved()
        if "mesh" in case:
            mesh = pair_mesh.mesh_to_go_on(case)
            training = pair_mesh.MeshTraining(case, dist.group.WORLD, _sub(folder, "second"), mesh)
        elif case["resume"] == "one rank":  # that stands for all
            group = [dist.new_group([r]) for r in range(WORLD_SIZE)][rank]
            ranks = range(WORLD_SIZE)
            with pair_loops.launched(case, rank, 1):
                training = type(training)(case, group, _sub(folder, f"alone{rank}"))
        else:
            training = type(training)(case, dist.group.WORLD, _sub(folder, "second"))
        training.load(saved)
    training.loop.run(steps, ranks)
    whole: dict[str, Tensor] = training.whole_weights()
    return whole


def _sub(folder: Path, name: str) -> Path:
    found = folder / name
    found.mkdir(parents=True, exist_ok=True)
    return found
