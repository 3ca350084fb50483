"""Collectives, losses and optimizer steps as torch operators, which torch.compile sees.

`torch.ops.ringcomm.*` take the group's name; the functions here take the group.
"""

from ringcomm import lazy
from ringcomm.ops import weight_update_cuda as _weight_update_cuda  # noqa: F401
from ringcomm.ops.collectives import (
    all_gather,
    all_reduce,
    all_reduce_add_rms_norm_,
    reduce_scatter,
)
from ringcomm.ops.fused_update import (
    AdamWStep,
    LomoStep,
    SGDStep,
    reduce_scatter_update_all_gather_,
    shard_range,
)
from ringcomm.ops.fused_update import optimizer_update_ as optimizer_update_
from ringcomm.ops.losses import cross_entropy_cuda as _cross_entropy_cuda  # noqa: F401
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.ops.losses.linear_cross_entropy import linear_cross_entropy

__all__ = [
    "AdamWStep",
    "LomoStep",
    "SGDStep",
    "all_gather",
    "all_reduce",
    "all_reduce_add_rms_norm_",
    "cross_entropy",
    "linear_cross_entropy",
    "reduce_scatter",
    "reduce_scatter_update_all_gather_",
    "shard_range",
]

__getattr__, __dir__ = lazy.attributes(__name__)
