"""Tensor parallelism: communication for a model's own code. The layers are in ringcomm.nn."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.tensor.layers import share_heads
from ringcomm.parallel.tensor.regions import (
    all_reduce_grad_,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
)

__all__ = ["all_reduce_grad_", "copy_to_tp", "gather_from_tp", "reduce_from_tp", "share_heads"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
