"""Parallel training: one model on several ranks."""

from typing import TYPE_CHECKING

from ringcomm import lazy
from ringcomm.parallel import activations, expert, offload, tensor, zero
from ringcomm.parallel.clip import clip_grad_norm_
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.parallel.optimizer_kinds import declare_optimizers
from ringcomm.parallel.parallelize import parallelize
from ringcomm.parallel.parameter_server import ParameterServer

if TYPE_CHECKING:
    from ringcomm.parallel import pipeline
    from ringcomm.parallel.state import get_state_dict, set_state_dict

__all__ = [
    "ParallelDims",
    "ParameterServer",
    "activations",
    "clip_grad_norm_",
    "declare_optimizers",
    "expert",
    "get_state_dict",
    "offload",
    "parallelize",
    "pipeline",
    "set_state_dict",
    "tensor",
    "zero",
]

# torch.distributed.pipelining and .checkpoint, which these need, are slow to import.
__getattr__, __dir__ = lazy.attributes(
    __name__, "pipeline", get_state_dict="state", set_state_dict="state"
)
