"""Modules over ringcomm's operators."""

from ringcomm.nn.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from ringcomm.nn.parallel_embedding import VocabParallelEmbedding
from ringcomm.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]
