"""Ranks as a box of data, pipeline and tensor parallelism, and the groups that a rank is in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.model import ModelConfig
from training.wire import Wire


@dataclass(frozen=True)
class MeshSizes:
    """How many ranks share what; data parallelism has the rest of them.

    Attributes:
        tp: ranks that share each layer, next to each other.
        pp: stages of the pipeline.
        ep: ranks inside of data parallelism that share the experts.
        shares_tokens: whether the tp ranks share the tokens between layers.
        schedule: of the pipeline.
        num_microbatches: of the pipeline; 0: two for each stage.
        zero_stage: of data parallelism; 0: gradients are averaged.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    shares_tokens: bool = False
    schedule: str = "1f1b"
    num_microbatches: int = 0
    zero_stage: int = 0

    @property
    def is_one(self) -> bool:
        """Whether there is nothing but data parallelism."""
        return self.tp == self.pp == self.ep == 1

    @property
    def num_microbatches_or_default(self) -> int:
        """Of the pipeline."""
        return self.num_microbatches or 2 * self.pp

    def why_impossible(self, world_size: int, config: ModelConfig) -> str | None:
        """What is wrong with so many ranks, for the user; None if nothing is."""
        if world_size % (self.tp * self.pp):
            return (
                f"--tp {self.tp} times --pp {self.pp} are {self.tp * self.pp} ranks, and"
                f" {world_size} is no multiple of that: change --world"
            )
        dp = world_size // (self.tp * self.pp)
        if dp % self.ep:
            return (
                f"--ep {self.ep} shares experts inside data parallelism, which has {dp} ranks here:"
                " take one that divides it, or more ranks"
            )
        if self.ep > 1 and not config.num_experts:
            return f"--ep {self.ep} shares experts, and the model has none: add --experts 4"
        if self.pp > config.num_layers:
            return f"--pp {self.pp} stages of {config.num_layers} layers: take fewer stages"
        if self.shares_tokens and self.tp == 1:
            return "--sp shares tokens between the ranks of tensor parallelism: add --tp 2"
        if self.zero_stage == 3 or (self.zero_stage and self.ep > 1):
            return "with --tp or --pp ZeRO has stage 1 or 2, and with --ep none"
        return None


class Mesh:
    """This rank's groups; making them is collective.

    Attributes:
        dp: ranks with other rows and the same part of the model.
        pp, tp, ep: as in MeshSizes.
        replicas: the ranks of dp that have the same experts.
    """

    def __init__(self, sizes: MeshSizes, wire: Wire) -> None:
        self.sizes = sizes
        dp = wire.world_size // (sizes.tp * sizes.pp)
        # Who talks most stands closest: layers in parts, then experts, replicas, stages.
        box = torch.arange(wire.world_size).view(sizes.pp, dp // sizes.ep, sizes.ep, sizes.tp)
        self._backend = wire.backend
        self.dp = self._group(box.flatten(1, 2), 1)
        self.pp, self.tp = self._group(box, 0), self._group(box, 3)
        self.ep, self.replicas = self._group(box, 2), self._group(box, 1)

    def _group(self, box: torch.Tensor, dim: int) -> dist.ProcessGroup:
        """Of the ranks along a dimension."""
        lines = box.movedim(dim, -1).reshape(-1, box.shape[dim]).tolist()
        group, _ = dist.new_subgroups_by_enumeration(lines, backend=self._backend)
        assert isinstance(group, dist.ProcessGroup)
        return group
