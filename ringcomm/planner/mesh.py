"""How ranks are arranged, and which arrangements a model or a machine does not allow."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.planner.shapes import ModelShape

__all__ = ["Mesh", "mesh_fault"]


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; their product is the number of ranks.

    Attributes:
        dp: data-parallel replicas, or shards of them.
        pp: stages of a pipeline.
        tp: ranks that share every layer.
        ep: ranks of the data-parallel ones that share experts.
        is_sequence_split: whether tensor-parallel ranks share the tokens between layers.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1
    is_sequence_split: bool = False

    @property
    def num_ranks(self) -> int:
        """Of all axes; experts are shared among the data-parallel ranks."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        parts = [f"dp {self.dp}"]
        parts += [f"{name} {size}" for name, size in (("pp", self.pp), ("tp", self.tp)) if size > 1]
        if self.is_sequence_split:
            parts.append("sp")
        if self.ep > 1:
            parts.append(f"ep {self.ep}")
        return " × ".join(parts)


def mesh_fault(shape: ModelShape, mesh: Mesh, sequence: int) -> str | None:
    """Why a model cannot be arranged so; None if it can."""
    tp, kv = mesh.tp, shape.kv_heads
    if shape.heads % tp:
        return f"tp {tp} does not divide {shape.heads} heads"
    if kv % tp and tp % kv:
        return f"tp {tp} neither divides {kv} query groups nor is a multiple of them"
    if shape.ffn < tp or shape.vocab < tp:
        return f"tp {tp} is more than there are rows to share"
    if mesh.is_sequence_split and tp == 1:
        return "sequence parallelism shares tokens among tensor-parallel ranks: it needs tp > 1"
    if mesh.is_sequence_split and sequence % tp:
        return f"sequence parallelism: tp {tp} does not divide sequences of {sequence} tokens"
    if mesh.pp > shape.layers:
        return f"pp {mesh.pp} is more than {shape.layers} layers"
    return _expert_fault(shape, mesh)


def _expert_fault(shape: ModelShape, mesh: Mesh) -> str | None:
    ep = mesh.ep
    if ep == 1:
        return None
    if not shape.experts:
        return f"ep {ep}: {shape.name} has no experts"
    if mesh.dp == 1:
        return "expert parallelism shares experts among data-parallel ranks: it needs dp > 1"
    if mesh.dp % ep:
        return f"ep {ep} does not divide dp {mesh.dp}"
    if shape.experts % ep:
        return f"ep {ep} does not divide {shape.experts} experts"
    return None
