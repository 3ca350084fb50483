"""Tensor parallelism: what modules of ringcomm.nn and a model's own code communicate with."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.tensor.heads import HeadShares, share_heads
from ringcomm.parallel.tensor.regions import (
    all_reduce_grad_,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    summed_over,
)
from ringcomm.parallel.tensor.splits import Split, SplitModule, split_params

__all__ = [
    "HeadShares",
    "Split",
    "SplitModule",
    "all_reduce_grad_",
    "copy_to_tp",
    "gather_from_tp",
    "reduce_from_tp",
    "share_heads",
    "split_params",
    "summed_over",
]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
