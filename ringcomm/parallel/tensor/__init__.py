"""Tensor parallelism: communication for a model's own code. The layers are in ringcomm.nn."""

from ringcomm.parallel.tensor.layers import share_heads
from ringcomm.parallel.tensor.regions import (
    all_reduce_grad_,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
)
from ringcomm.parallel.tensor.replicas import check_replicas

__all__ = [
    "all_reduce_grad_",
    "check_replicas",
    "copy_to_tp",
    "gather_from_tp",
    "reduce_from_tp",
    "share_heads",
]
