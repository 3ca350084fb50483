"""Every public call that takes a group takes a one-dimensional DeviceMesh in its place."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import place, run_ranks
from torch import Tensor, nn

from ringcomm import ops
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    LinearCrossEntropyLoss,
    MixtureOfExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import ParallelDims, expert, get_state_dict, set_state_dict, tensor

IN_PARALLEL = ("tensor", "expert", "pipeline", "zero", "activations", "constant_buffer", "offload")
MODULES = (
    *("", ".ops", ".nn", ".optim", ".planner", ".tuning", ".parallel"),
    *(f".parallel.{name}" for name in IN_PARALLEL),
    *(".integrations.transformers", ".integrations.accelerate"),
)
TO_COME = "its folder has no mesh= yet"
# What takes a group and no mesh, and why.
WITHOUT = {
    **dict.fromkeys(("empty_shared", "monitored_barrier", "stats"), "as torch.distributed has it"),
    **dict.fromkeys(
        ("all_gather", "all_reduce", "all_reduce_", "broadcast", "broadcast_"), TO_COME
    ),
    **dict.fromkeys(("new_shard_state", "reduce", "reduce_scatter", "ring_all_reduce_"), TO_COME),
    "reduce_scatter_update_all_gather_": TO_COME,
    **dict.fromkeys(("Split", "Lomo", "AdaLomo", "ParameterServer", "WeightShards"), TO_COME),
    **dict.fromkeys(("Pipeline", "Auto", "auto", "partition", "all_reduce_mean_"), TO_COME),
    **dict.fromkeys(
        ("ZeroAdamW", "ZeroSGD", "ZeroOptimizer", "ZeroInfinity"), "made by zero.shard()"
    ),
}


def public() -> Iterator[tuple[str, Any]]:
    """All public callables, methods of classes too."""
    for name in MODULES:
        module: Any = importlib.import_module(f"ringcomm{name}")
        for public_name in module.__all__:
            found = getattr(module, public_name)
            if inspect.isclass(found):
                methods = inspect.getmembers(found, callable)
                yield from ((public_name, m) for n, m in methods if not n.startswith("_"))
            if callable(found):
                yield public_name, found


def parameters_of(call: Callable[..., Any]) -> Any:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # of C
        return ()


def test_what_takes_a_group_takes_a_mesh() -> None:
    takes_group = [(name, call) for name, call in public() if "group" in parameters_of(call)]
    assert len(takes_group) > 15
    without = {name for name, call in takes_group if "mesh" not in parameters_of(call)}
    assert without - WITHOUT.keys() == set()


def results_of(where: dict[str, Any], data: dict[str, Any], device: torch.device) -> list[Tensor]:
    """Results and gradients of the calls, over a group or a mesh."""
    torch.manual_seed(0)
    first = VocabParallelEmbedding(11, 6, device=device, **where)
    up = ColumnParallelLinear(6, 8, device=device, **where)
    down = RowParallelLinear.from_linear(nn.Linear(8, 6, device=device), **where)
    made = iter([nn.Linear(6, 6, device=device) for _ in range(4)])
    mixture = MixtureOfExperts(6, made.__next__, 4, device=device, **data)
    head = ColumnParallelLinear(6, 11, bias=False, copy_input=False, device=device, **where)
    ids, targets = torch.arange(10, device=device), torch.arange(1, 11, device=device)
    hidden = tensor.copy_to_tp(mixture(down(up(first(ids)))), **where)
    tensor.all_reduce_grad_(hidden, **where)
    num, start = head.weight.shape[0], head.features[0]
    rest = {"vocab_start": start, "vocab_size": 11, **where}
    losses = [
        CrossEntropyLoss(num_columns=num, **where)(head(hidden), targets),
        LinearCrossEntropyLoss(num_columns=num, **where)(hidden, head.weight, targets),
        ops.cross_entropy(head(hidden), targets, **rest),
        ops.linear_cross_entropy(hidden, head.weight, targets, **rest),
    ]
    sizes = [end - begin for begin, end in head.splits["weight"].ranges]
    whole = tensor.gather_from_tp(head(hidden), sizes, **where)
    total = torch.stack(losses).sum() + tensor.reduce_from_tp(whole, **where).square().mean()
    total.backward()
    model = nn.ModuleList([first, up, down, mixture, head])
    expert.average_gradients(model, **data)
    values, _ = get_state_dict(model, full=True, **where)
    set_state_dict(model, None, values, **where)
    return [*losses, total, *(p.grad for p in model.parameters()), *values.values()]


def both(rank: int, device: str) -> None:
    dims = ParallelDims(dp=2, tp=2, device_type=device)
    groups: list[Any] = [{"group": dims.group(axis)} for axis in ("tp", "batch")]
    meshes: list[Any] = [{"mesh": dims[axis]} for axis in ("tp", "batch")]
    of_groups = results_of(groups[0], groups[1], place(device, rank))
    of_meshes = results_of(meshes[0], meshes[1], place(device, rank))
    assert all(map(torch.equal, of_groups, of_meshes))
    with pytest.raises(ValueError, match="a group or a mesh, not both"):
        ColumnParallelLinear(6, 8, **groups[0], **meshes[0])
    with pytest.raises(
        ValueError, match=r"wants a mesh of one dimension.*got \(pp, dp, fsdp, tp\)"
    ):
        tensor.copy_to_tp(torch.ones(2), mesh=dims.mesh)


def test_a_mesh_gives_the_bits_of_its_group(device: str) -> None:
    run_ranks(4, both, device)
