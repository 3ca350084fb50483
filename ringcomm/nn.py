"""Modules over ringcomm's operators."""

from ringcomm.ops.losses.modules import CrossEntropyLoss, LinearCrossEntropyLoss
from ringcomm.parallel.expert.layer import MixtureOfExperts
from ringcomm.parallel.expert.router import Routing, TopKRouter
from ringcomm.parallel.tensor.embedding import VocabParallelEmbedding
from ringcomm.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "MixtureOfExperts",
    "Routing",
    "RowParallelLinear",
    "TopKRouter",
    "VocabParallelEmbedding",
]
