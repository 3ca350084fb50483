"""Modules over ringcomm's operators."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
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

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
