"""What several ranks hold of one model."""

from ringcomm.parallel import activations, constant_buffer, expert, offload, tensor, zero
from ringcomm.parallel.parameter_server import ParameterServer
from ringcomm.parallel.weight_shards import WeightShards, find_shards

__all__ = [
    "ParameterServer",
    "WeightShards",
    "activations",
    "constant_buffer",
    "expert",
    "find_shards",
    "offload",
    "tensor",
    "zero",
]
