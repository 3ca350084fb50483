"""Removed public names and what to use instead. Each entry stays for one version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["getattr_of", "object_getattr"]

_SNAPSHOT = "it was removed; torch.cuda.memory._record_memory_history() records allocations"
_CUDA_STATS = "it was removed; use torch.cuda.memory_stats()"

_MEM_TRACKER = (
    "it was removed; torch.distributed._tools.mem_tracker.MemTracker measures a step, see"
    " docs/design/optim.md"
)
_CLIP_MODE = 'it was removed; use clip_mode="deferred", or "two_pass", which keeps no gradients'

_EXPLAIN = "it was removed; see the table of a step in docs/design/zero.md"

_SHARDED = "it was removed; zero.shard() returns a zero.ZeroOptimizer at every stage"
_STATISTICS = (
    "it was removed; optimizer.clip_grad_norm_(max_norm) returns the norm, and with math.inf"
    " does not clip; optimizer.grad_norm is the norm of the last step that computed it"
)

_EFFICIENCY = "it was removed; see the formula in docs/systems.md; `ringcomm plan` computes it"

_STATES = {
    "full_state_dict": "it was removed; use ringcomm.parallel.get_state_dict(full=True)",
    "load_full_state_dict": "it was removed; use ringcomm.parallel.set_state_dict(), which loads"
    " the result of ringcomm.parallel.get_state_dict()",
}

_FIND = "it was removed; ringcomm.planner.%s accepts a name or the path of a JSON file"

_PLANNERS = "it was removed; the error of an unknown name lists the known ones"

_GONE = {
    "ringcomm": {
        "topology": "it was removed; `ringcomm plan` uses the cost model of collectives",
    },
    "ringcomm.ops": {
        **{name: f"it is {name}Step now" for name in ("SGD", "AdamW", "Lomo")},
        **{
            name: f"it was removed; torch.ops.ringcomm.{name} takes the group's name"
            for name in ("all_reduce_", "broadcast_", "ring_all_reduce_")
        },
        **{
            name: f"it was removed; torch.ops.ringcomm.{name} is the operator, where -1 is no"
            " rounding_seed and no padding_idx"
            for name in ("sgd_update_", "linear_sgd_update_", "embedding_sgd_update_")
        },
        "monitored_barrier": "it is ringcomm.monitored_barrier",
        "split_weight": "it was removed; a split weight is a bfloat16 weight and an int16 tensor"
        " of zeros",
        "join_weight": "it was removed; the fp32 weight is ((weight.view(torch.int16).int() << 16)"
        " + low).view(torch.float32)",
    },
    "ringcomm.parallel.tensor": {
        "enter": "it is copy_to_tp now",
        "join": "it is gather_from_tp now",
        "leave": "it is reduce_from_tp now",
        "sum_gradients": "it is all_reduce_grad_ now",
        "whole_of": _STATES["full_state_dict"],
        **_STATES,
    },
    "ringcomm.parallel.expert": _STATES,
    "ringcomm.integrations.transformers": {
        "apply": "it is patch_loss now",
    },
    "ringcomm.optim": {
        "ClipProposal": _CLIP_MODE,
        "MemoryReport": _MEM_TRACKER,
        "memory_report": _MEM_TRACKER,
        "ZeroAdamW": _SHARDED,
        "ZeroSGD": _SHARDED,
        "propose_clip_mode": _CLIP_MODE,
        "Split": "it was removed; the layers of ringcomm.nn record their own parts",
    },
    "ringcomm.parallel.activations": {
        "Arena": "it is arena now, a class",
        "Auto": "it is auto now, a class",
        "GradientArena": "it was removed; gradient_arena() returns its buffers",
        "Partitioned": "it is partition now, a class",
        "Allocation": _SNAPSHOT,
        "DeviceFragmentation": _CUDA_STATS,
        "Replay": _SNAPSHOT,
        "device_fragmentation": _CUDA_STATS,
        "predict_saved_bytes": "it was removed; a checkpointed transformer saves"
        " num_layers * batch * seq * hidden * dtype.itemsize bytes",
        "record_allocations": _SNAPSHOT,
        "replay": _SNAPSHOT,
    },
    "ringcomm.parallel.pipeline": {
        "draw": "it was removed; use timeline.export_chrome_trace(path), and"
        " torch.distributed.pipelining._schedule_visualizer for a schedule",
    },
    "ringcomm.parallel.zero": {
        "Explanation": _EXPLAIN,
        "Statistics": _STATISTICS,
        "ZeroAdamW": _SHARDED,
        "ZeroSGD": _SHARDED,
        "explain": _EXPLAIN,
        **_STATES,
    },
    "ringcomm.parallel.offload": {
        "checkpoint_intensity": _EFFICIENCY,
        "efficiency": _EFFICIENCY,
        "optimizer_intensity": _EFFICIENCY,
        "weight_intensity": _EFFICIENCY,
        "TiledLinear": "it was removed; write a layer larger than memory as several nn.Linear,"
        " each of which is a unit of zero.shard(units=...)",
    },
    "ringcomm.planner": {
        "find_hardware": _FIND % "Cluster",
        "find_model": _FIND % "plan",
        "model_of_config": _FIND % "plan",
        **dict.fromkeys(("HARDWARE", "MODELS", "SYSTEMS"), _PLANNERS),
        "Mesh": "it was removed; use candidate.mesh of a plan",
        "Refusal": "it was removed; use plan().refused",
        "kept_bytes": "it was removed; use ringcomm.parallel.zero.predict_memory()",
    },
}

_ZERO = {"last_statistics": _STATISTICS, "statistics": _STATISTICS}

_GONE_METHODS = {
    "FlatZero": _ZERO,
    "ParameterServer": _STATES,
    "Pipeline": {**_STATES, "tied": "it was removed; use Pipeline.module.tied"},
    "WeightShards": {
        **_STATES,
        "read_shard": _STATES["full_state_dict"],
        "write_shard": _STATES["load_full_state_dict"],
    },
    "Zero3": _ZERO,
    "ZeroInfinity": {
        **_ZERO,
        "full_model_state_dict": _STATES["full_state_dict"],
        "packed_bytes": "it was removed; use the parameters of zero.predict_memory()",
        "load_full_model_state_dict": _STATES["load_full_state_dict"],
    },
}


def getattr_of(module: str) -> Callable[[str], NoReturn]:
    """A module's __getattr__: raises AttributeError, which for a removed name says what to use."""

    def module_getattr(name: str) -> NoReturn:
        _raise(f"module {module!r}", name, _GONE.get(module, {}))

    return module_getattr


def object_getattr(owner: Any, name: str) -> NoReturn:
    """A class's __getattr__, likewise for removed methods."""
    kind = type(owner).__name__
    _raise(f"{kind!r} object", name, _GONE_METHODS.get(kind, {}))


def _raise(owner: str, name: str, gone: Mapping[str, str]) -> NoReturn:
    message = f"{owner} has no attribute {name!r}"
    raise AttributeError(f"{message}: {gone[name]}" if name in gone else message)
