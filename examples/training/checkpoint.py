"""The checkpoint: one file, always complete, from which any world size and system can go on."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.system import TrainState

FILE_NAME = "checkpoint.pt"
FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued from; the message says why."""


@dataclass
class Checkpoint:
    """A training state and the place in the data where it stands.

    The data of step s is a function of (seed, s), so ``step`` is the data position, and no random
    generator has a state to save. ``identity`` holds what must be the same in the run that
    continues: size, optimizer, seed, rows of the global batch, text.
    """

    state: TrainState
    step: int
    elapsed_s: float
    identity: dict[str, Any]


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> Path:
    """Writes ``checkpoint.pt``: to a temporary file, to the disk, and then in place in one move.

    Whoever is killed in the middle leaves the previous checkpoint as it was.
    """
    path = directory / FILE_NAME
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    content = {**vars(checkpoint), "state": vars(checkpoint.state), "format": FORMAT}
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def find_checkpoint(path: Path) -> Path:
    """The file that ``--resume PATH`` means: itself, or ``checkpoint.pt`` in a run's folder."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"--resume {path}: there is no {file}")
    return file


def load_checkpoint(path: Path, identity: dict[str, Any]) -> Checkpoint:
    """Reads a checkpoint and compares it with the run that wants to continue it.

    Raises:
        CheckpointError: unreadable, or written by a run that differs in ``identity``.
    """
    file = find_checkpoint(path)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"--resume {file}: written by another version of this program")
        checkpoint = Checkpoint(**{**content, "state": TrainState(**content["state"])})
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"--resume {file}: not a checkpoint of this program") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"--resume {file}: not a checkpoint of this program") from error
    differing = [
        f"{key} was {checkpoint.identity.get(key)!r} and is {value!r} now"
        for key, value in identity.items()
        if checkpoint.identity.get(key) != value
    ]
    if differing:
        raise CheckpointError(f"--resume {file}: {'; '.join(differing)}")
    return checkpoint
