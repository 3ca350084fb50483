"""One way to train: a system on a mesh, and how its passes go."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.planner.mesh import Mesh
from ringcomm.planner.systems import System

__all__ = ["Candidate"]


@dataclass(frozen=True)
class Candidate:
    """What is predicted, and compared.

    Attributes:
        system: how data-parallel ranks keep the model.
        mesh: how ranks are arranged.
        schedule: of the pipeline; "" where there is none.
        checkpointing: "none", "selective" or "full" recomputation.
        num_micro_batches: of a step on a replica.
        micro_batch: sequences of each.
    """

    system: System
    mesh: Mesh
    schedule: str
    checkpointing: str
    num_micro_batches: int
    micro_batch: int

    @property
    def name(self) -> str:
        """Of the system and its mesh, such as "zero1, dp 4 × tp 2 × sp"."""
        return f"{self.system.name}, {self.mesh}"

    @property
    def head_stage(self) -> int:
        """The stage of the pipeline that has the model's end: in V form the first one."""
        return 0 if self.schedule == "zbv" else self.mesh.pp - 1
