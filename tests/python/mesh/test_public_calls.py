"""The public names: how many there are, and that what takes a group takes a mesh in its place."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import all_equal
from ranks import in_ranks, place
from torch import Tensor, nn

from ringcomm import lazy, ops
from ringcomm.nn import (
    ColumnParallelLinear,
    CrossEntropyLoss,
    LinearCrossEntropyLoss,
    MixtureOfExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.parallel import ParallelDims, expert, get_state_dict, set_state_dict, tensor

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    *("ringcomm", "ringcomm.nn", "ringcomm.ops", "ringcomm.optim", "ringcomm.planner"),
    *("ringcomm.integrations.accelerate", "ringcomm.integrations.transformers"),
    *("ringcomm.parallel", "ringcomm.parallel.activations"),
    *("ringcomm.parallel.expert", "ringcomm.parallel.offload", "ringcomm.parallel.pipeline"),
    *("ringcomm.parallel.tensor", "ringcomm.parallel.zero", "ringcomm.testing"),
)
MOST_NAMES = 68
# What takes a group and no mesh.
WITHOUT = {
    # As torch.distributed.
    *("empty_shared", "health", "monitored_barrier", "peer_stats", "shrink", "stats"),
    *("all_gather", "all_reduce", "reduce_scatter"),
    *("reduce_scatter_update_all_gather_", "ZeroOptimizer"),  # made by zero.shard()
    "all_reduce_add_rms_norm_",
}


def public() -> dict[str, Any]:
    """What users import, by its module and name; no modules."""
    names: dict[str, Any] = {}
    for module_name in MODULES:
        module: Any = importlib.import_module(module_name)
        names |= {f"{module_name}.{name}": getattr(module, name) for name in module.__all__}
    return {name: found for name, found in names.items() if not inspect.ismodule(found)}


def test_the_public_names_are_few_and_in_the_table_of_the_architecture_page() -> None:
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ringcomm[a-z_.]*)` \| (.*) \|$", page, re.MULTILINE)
    listed = [
        f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)
    ]
    assert listed == [name for name in public() if not name.endswith("__")]
    assert len(listed) <= MOST_NAMES
    # What users are told to import from is a module of the table.
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    told = set(re.findall(r"(?:from|import) (ringcomm(?:\.[a-z_]+)*)", text))
    assert told - {*MODULES} == set()


@pytest.mark.parametrize("name", lazy.GONE)
def test_a_name_that_is_gone_names_what_to_use(name: str) -> None:
    package, _, own = name.rpartition(".")
    module: Any = importlib.import_module(package)
    words = f"{re.escape(name)} is gone; use {re.escape(lazy.GONE[name])}$"
    with pytest.raises(AttributeError, match=words):
        getattr(module, own)
    assert not hasattr(module, own)
    assert own not in dir(module)
    # Python asks a package for the name, and says of another module that it has none.
    with pytest.raises(ImportError, match=words if hasattr(module, "__path__") else own):
        exec(f"from {package} import {own}")


def calls() -> Iterator[tuple[str, Any]]:
    """Public functions, classes and their methods."""
    for name, found in public().items():
        if inspect.isclass(found):
            methods = inspect.getmembers(found, callable)
            yield from ((name, method) for n, method in methods if not n.startswith("_"))
        yield name, found


def parameters_of(call: Callable[..., Any]) -> Any:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # of C
        return ()


def test_what_takes_a_group_takes_a_mesh() -> None:
    takes_group = [(name, call) for name, call in calls() if "group" in parameters_of(call)]
    assert len(takes_group) > 15
    without = {name for name, call in takes_group if "mesh" not in parameters_of(call)}
    assert {name.rpartition(".")[2] for name in without} - WITHOUT == set()


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


@in_ranks(4)
def test_a_mesh_gives_the_bits_of_its_group(rank: int, device: str) -> None:
    dims = ParallelDims(dp=2, tp=2, device_type=device)
    groups: list[Any] = [{"group": dims.group(axis)} for axis in ("tp", "batch")]
    meshes: list[Any] = [{"mesh": dims[axis]} for axis in ("tp", "batch")]
    of_groups = results_of(groups[0], groups[1], place(device, rank))
    of_meshes = results_of(meshes[0], meshes[1], place(device, rank))
    assert all_equal(of_groups, of_meshes)
    with pytest.raises(ValueError, match="a group or a mesh, not both"):
        ColumnParallelLinear(6, 8, **groups[0], **meshes[0])
    with pytest.raises(
        ValueError, match=r"the mesh must have one dimension.*got \(pp, dp, fsdp, tp\)"
    ):
        tensor.copy_to_tp(torch.ones(2), mesh=dims.mesh)
