"""Modules over ringcomm's operators."""

from ringcomm.nn.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from ringcomm.nn.mixture_of_experts import MixtureOfExperts
from ringcomm.nn.parallel_embedding import VocabParallelEmbedding
from ringcomm.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from ringcomm.nn.top_k_router import Routing, TopKRouter

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
