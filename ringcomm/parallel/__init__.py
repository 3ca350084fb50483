"""What several ranks hold of one model."""

from ringcomm.parallel import activations, constant_buffer, offload, pipeline, tensor, zero
from ringcomm.parallel.parameter_server import ParameterServer
from ringcomm.parallel.weight_shards import WeightShards, find_shards

__all__ = [
    "ParameterServer",
    "WeightShards",
    "activations",
    "constant_buffer",
    "find_shards",
    "offload",
    "pipeline",
    "tensor",
    "zero",
]
