"""A checkpoint that can be resumed on any mesh and stays complete after a crash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ringcomm.parallel import get_state_dict, set_state_dict


def step_of(path: Path) -> int:
    """The number of steps before a checkpoint, by its name."""
    return int(path.name.partition("-")[2])


def save(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    """Writes FOLDER/step-N, then removes older ones. Collective."""
    values, state = get_state_dict(model, optimizer)
    unfinished, finished = folder / "unfinished", folder / f"step-{step}"
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(finished)
        for path in folder.glob("step-*"):
            if path != finished:
                shutil.rmtree(path)
    dist.barrier()


def load(folder: Path, model: Any, optimizer: Any) -> int:
    """Loads the newest checkpoint in FOLDER; returns the number of steps before it. Collective.

    Raises:
        ValueError: there is no checkpoint.
    """
    newest = max(folder.glob("step-*"), key=step_of, default=None)
    if newest is None:
        raise ValueError(f"no checkpoint was found in {folder}")
    values, state = get_state_dict(model, optimizer)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=newest)
    set_state_dict(model, optimizer, values, state)
    return step_of(newest)
