"""The weights of one rank: some layers of a model, and of every layer a share."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ringcomm.planner.mesh import Mesh
from ringcomm.planner.shapes import ModelShape, Unit, Weight

__all__ = ["RankPart", "layers_of", "rank_part"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankPart:
    """Shapes of the weights of a rank, or of those that one group of ranks has alike.

    Attributes:
        before: in front of the layers.
        layer: of one layer.
        num_layers: how many there are.
        after: behind them.
    """

    before: Shapes
    layer: Shapes
    num_layers: int
    after: Shapes

    @property
    def num_elems(self) -> int:
        """Of all."""
        return (
            sum(map(prod, self.before))
            + self.num_layers * sum(map(prod, self.layer))
            + sum(map(prod, self.after))
        )

    @property
    def largest_elems(self) -> int:
        """Of the largest weight."""
        return max((prod(s) for s in (*self.before, *self.layer, *self.after)), default=0)


def layers_of(num_layers: int, num_stages: int, stage: int) -> int:
    """A stage's number of layers; they differ by one, the first ones have more."""
    return num_layers // num_stages + (stage < num_layers % num_stages)


def rank_part(
    shape: ModelShape, mesh: Mesh, stage: int, head_stage: int
) -> tuple[RankPart, RankPart]:
    """The weights of the first rank of a pipeline's stage: those of its data group, and experts.

    Args:
        shape: of the model.
        mesh: that mesh_fault() has nothing against.
        stage: of the pipeline.
        head_stage: the one that has the model's end.
    """
    num_layers = layers_of(shape.layers, mesh.pp, stage)
    is_last = stage == head_stage
    before = [shape.embedding] if stage == 0 else []
    after = [shape.head] if is_last else []
    # A head that is the embedding is on both ends of a pipeline.
    if shape.tied and is_last and stage != 0:
        after.append(Unit("embedding", shape.embedding.weights[:1]))

    def shapes(units: list[Unit], *, experts: bool) -> Shapes:
        return tuple(
            _cut(weight, shape, mesh)
            for unit in units
            for weight in unit.weights
            if weight.is_expert == experts
        )

    dense, expert = (
        RankPart(
            shapes(before, experts=is_expert),
            shapes([shape.layer], experts=is_expert),
            num_layers,
            shapes(after, experts=is_expert),
        )
        for is_expert in (False, True)
    )
    return dense, expert


def _cut(weight: Weight, shape: ModelShape, mesh: Mesh) -> tuple[int, ...]:
    """A weight's shape on the first rank of a tensor-parallel group."""
    sizes = list(weight.shape)
    if weight.is_expert:
        sizes[0] //= mesh.ep
    if mesh.tp > 1 and weight.split is not None:
        if weight.split == "kv_heads":
            sizes[0] = max(1, shape.kv_heads // mesh.tp) * shape.head_dim
        elif weight.split == "heads":
            sizes[0] //= mesh.tp
        else:
            dim = weight.is_expert + (weight.split == "columns")
            sizes[dim] = -(-sizes[dim] // mesh.tp)
    # Experts one below the other, as matrices of their own are: shards are of whole rows.
    return (sizes[0] * sizes[1], sizes[2]) if weight.is_expert else tuple(sizes)
