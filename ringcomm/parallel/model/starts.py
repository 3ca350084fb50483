"""Equal starts: what ranks have in common becomes that of the first of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.flat_collectives import local_of, take_from_rank0
from ringcomm.parallel.model.describe import Model, Weight


def start_equal(
    model: Model, groups: Iterable[dist.ProcessGroup], tensors: Iterable[Tensor] | None = None
) -> None:
    """Replaces weights, frozen ones too, and buffers by those of rank 0 of each group in turn.

    Parts that differ between the ranks of a group stay: those of tensor-parallel layers, experts,
    DTensors and WeightShards. Tensors on the meta device stay as well. `tensors`: only these.
    Collective over each group.
    """
    known: dict[Any, Weight] = {**model.weights, **model.buffers}
    chosen = known if tensors is None else dict.fromkeys(tensors)
    for group in groups:
        shared = (t for t in chosen if not known[t].is_apart(group))
        take_from_rank0(map(local_of, shared), group)


def start_experts_equal(model: Model) -> None:
    """start_equal() of sharded experts over the ranks with the same ones. Collective."""
    found: dict[dist.ProcessGroup, list[Tensor]] = {}
    for tensor, weight in (*model.weights.items(), *model.buffers.items()):
        if weight.experts is not None and weight.experts.replica_group is not None:
            found.setdefault(weight.experts.replica_group, []).append(tensor)
    for group, tensors in found.items():
        start_equal(model, [group], tensors)
