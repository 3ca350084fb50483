"""Parallel training: one model on several ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcomm.parallel import activations, expert, offload, tensor, zero
from ringcomm.parallel.clip import clip_grad_norm_
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.parallel.parallelize import parallelize
from ringcomm.parallel.parameter_server import ParameterServer
from ringcomm.parallel.shards import WeightShards

if TYPE_CHECKING:
    from ringcomm.parallel import pipeline
    from ringcomm.parallel.state import get_state_dict, set_state_dict

__all__ = [
    "ParallelDims",
    "ParameterServer",
    "WeightShards",
    "activations",
    "clip_grad_norm_",
    "expert",
    "get_state_dict",
    "offload",
    "parallelize",
    "pipeline",
    "set_state_dict",
    "tensor",
    "zero",
]


def __getattr__(name: str) -> Any:
    """Imports lazily what needs torch.distributed.pipelining or .checkpoint, which are slow."""
    if name == "pipeline":
        return import_module("ringcomm.parallel.pipeline")
    if name in ("get_state_dict", "set_state_dict"):
        return getattr(import_module("ringcomm.parallel.state"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
