"""What a run was asked to do."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from training.mesh import MeshSizes
from training.model import PRESETS, ModelConfig

# One row of text, in every phase.
CONTEXT_BYTES = 128
# Rows per rank and step while learning. Small batches make many steps out of little time.
LEARN_ROWS_PER_RANK = 8
# Rows per rank and bytes per row in the races.
RACE_TOKENS = {"default": (4, 128), "small": (1, 64)}
PEAK_LR = {"adamw": 4e-3, "sgd": 0.5, "lomo": 0.5}


class InputError(ValueError):
    """The user asked for something that cannot be; the message says what to do instead."""


@dataclass(frozen=True)
class Options:
    """The command line, checked; see ``cli.make_parser`` for what each means."""

    world_size: int
    backends: tuple[str, ...]
    parallel: str
    optimizer: str
    size: str
    race_size: str
    text: Path | None
    steps: int | None
    seconds: float
    race_seconds: float
    race: bool
    device: str
    resume: Path | None
    tokens: str
    out: Path
    seed: int
    offload: Literal["cpu", "nvme"] | None = None
    offload_path: Path | None = None
    partition_activations: bool = False
    clip_grad_norm: float | None = None
    mesh: MeshSizes | None = None
    num_experts: int = 0

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model that learns."""
        return replace(PRESETS[self.size], num_experts=self.num_experts)

    @property
    def learn_rows(self) -> int:
        """Rows of the global batch while learning."""
        return LEARN_ROWS_PER_RANK * self.world_size

    @property
    def why_no_race(self) -> str | None:
        """The reason why nothing will be raced, None if something will."""
        if not self.race:
            return "--no-race"
        if len(self.backends) < 2:
            return "--backend names one backend"
        if "ringcomm" not in self.backends or self.device != "cpu":
            return "it is between ringcomm and another backend, on CPUs"
        if "RANK" in os.environ:
            return "a launcher has started these ranks; run `ringcomm bench systems` instead"
        if self.mesh is not None or self.num_experts:
            return "meshes and experts have none"
        if self.world_size < 2:
            return "one rank has nobody to communicate with"
        return None

    def identity(self, text_sha256: str) -> dict[str, Any]:
        """What a run that continues this one has to share with it."""
        return {
            "size": self.size,
            "experts": self.num_experts,
            "optimizer": self.optimizer,
            "norm that gradients are clipped to": self.clip_grad_norm,
            "seed": self.seed,
            "rows of the global batch": self.learn_rows,
            "sha256 of the text": text_sha256,
        }

    def as_json(self) -> dict[str, Any]:
        """For the log: every option, paths as text."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
