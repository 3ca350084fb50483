"""Modules over ringcomm's operators."""

from ringcomm.ops.losses.modules import CrossEntropyLoss, LinearCrossEntropyLoss
from ringcomm.parallel.expert.layer import MixtureOfExperts
from ringcomm.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "MixtureOfExperts",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]
