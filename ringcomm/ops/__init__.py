"""Collectives as torch operators: torch.compile sees them, new results are differentiable.

`torch.ops.ringcomm.*` take the group's name; the functions here take the group.
"""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.ops.collectives import (
    all_gather,
    all_reduce,
    all_reduce_,
    broadcast,
    broadcast_,
    monitored_barrier,
    reduce,
    reduce_scatter,
    ring_all_reduce_,
)
from ringcomm.ops.losses import cross_entropy_cuda as _cross_entropy_cuda  # noqa: F401
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.ops.losses.linear_cross_entropy import linear_cross_entropy
from ringcomm.ops.updates import adalomo as _adalomo  # noqa: F401
from ringcomm.ops.updates import weight_update_cuda as _weight_update_cuda  # noqa: F401
from ringcomm.ops.updates.fused_update import (
    AdamWStep,
    LomoStep,
    SGDStep,
    new_shard_state,
    optimizer_update_,
    reduce_scatter_update_all_gather_,
    shard_range,
)
from ringcomm.ops.updates.weight_update import (
    embedding_sgd_update_,
    join_weight,
    linear_sgd_update_,
    sgd_update_,
    split_weight,
)

__all__ = [
    "AdamWStep",
    "LomoStep",
    "SGDStep",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "broadcast",
    "broadcast_",
    "cross_entropy",
    "embedding_sgd_update_",
    "join_weight",
    "linear_cross_entropy",
    "linear_sgd_update_",
    "monitored_barrier",
    "new_shard_state",
    "optimizer_update_",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_update_all_gather_",
    "ring_all_reduce_",
    "sgd_update_",
    "shard_range",
    "split_weight",
]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
