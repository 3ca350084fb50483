"""get_state_dict and set_state_dict: between any meshes, whole, in parts, and by plain torch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import quick
from full_states import load_parts, save_parts
from ranks import in_ranks, run_ranks
from steps import apply_steps, train_step
from test_parallelize import KINDS, SIZES, ids_of, make, transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict as get_by_torch
from torch.testing import assert_close

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import ParallelDims, get_state_dict, parallelize, set_state_dict

assert KINDS, SIZES
assert transformers

# Sizes of the mesh, options.
MESHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tp of copied heads": ({"tp": 4}, {"sequence_parallel": True}),
    "pp, tp": ({"pp": 2, "tp": 2}, {}),
    "hsdp": ({"dp": 2, "fsdp": 2}, {}),
    "fsdp, tp": ({"dp": 1, "fsdp": 2, "tp": 2}, {}),
    "fsdp, pp": ({"dp": 1, "fsdp": 2, "pp": 2}, {}),
    "zero 1, pp": ({"pp": 2}, {"zero_stage": 1}),
    "zero 2, tp": ({"tp": 2}, {"zero_stage": 2}),
}
EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ep": ({"ep": 2}, {}),
    "ep, pp": ({"ep": 4, "pp": 1}, {}),
    "ep, tp": ({"ep": 2, "tp": 2}, {}),
    "ep, fsdp": ({"dp": 1, "fsdp": 4, "ep": 2}, {}),
    "tp, zero 1": ({"tp": 2}, {"zero_stage": 1}),
}


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups, one without decay; a large eps, so that roundings of small gradients stay so."""
    listed = list(params)
    groups: Any = [
        {"params": [p for p in listed if p.dim() > 1]},
        {"params": [p for p in listed if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)


def trained(name: str, kind: str = "Llama", steps: range = range(2)) -> tuple[Any, list[float]]:
    sizes, options = (MESHES | EXPERTS)[name]
    train = parallelize(make(kind), ParallelDims(**sizes), adamw, **options)
    return train, run(train, steps)


def run(train: Any, steps: range) -> list[float]:
    batch, losses = train.dims["batch"], []
    num_rows = 8 // batch.size()
    for step in steps:
        mine = ids_of(step).split(num_rows)[batch.get_local_rank()]
        loss = train.step(mine, mine).reshape(1)
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=batch.get_group())
        apply_steps(train.optimizer)
        losses.append(float(loss))
    return losses


def run_alone(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
        losses.append(train_step(loss, optimizer))
    return losses


@cache
def alone(kind: str = "Llama") -> tuple[Any, Any, list[float]]:
    """One process: two steps; then what the next two lose."""
    model = make(kind)
    optimizer = adamw(model.parameters())
    run_alone(model, optimizer, range(2))
    states = dict(model.state_dict()), get_by_torch(model, optimizer)[1]
    saved = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, states)
    return *saved, run_alone(model, optimizer, range(2, 4))


def load(rank: int, source: str, name: str, kind: str, folder: Path) -> list[float]:
    train, _ = trained(name, kind, range(0))
    load_parts(train, train.optimizer, folder / source)
    return run(train, range(2, 4))


def save(rank: int, name: str, folder: Path) -> Any:
    """In parts for all tests; the whole state, and how training goes on from one way to have it."""
    train, _ = trained(name)
    parts = get_state_dict(train, train.optimizer, cpu=True)
    save_parts(train, train.optimizer, folder / name, cpu=True)
    everywhere = get_state_dict(train, train.optimizer, full=True)
    first = get_state_dict(train, train.optimizer, full=True, rank0_only=True)
    assert (first == ({}, {})) == (rank != 0)
    if rank == 0:
        assert_same(first, everywhere)
    # Whole ones that all ranks have, that rank 0 has, or this mesh's parts.
    ways = ((everywhere, False), (first, True), (parts, False))
    states, rank0_only = ways[[*MESHES].index(name) % 3]
    again, _ = trained(name, steps=range(0))
    set_state_dict(again, again.optimizer, *states, rank0_only=rank0_only)
    return everywhere, run(again, range(2, 4))


def assert_same(one: Any, other: Any) -> None:
    assert_close(one[0], other[0], rtol=0, atol=0)
    assert one[1]["param_groups"] == other[1]["param_groups"]
    assert_close(one[1]["state"], other[1]["state"], rtol=0, atol=0)


class Checkpoints:
    """A folder of checkpoints, of each mesh that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """What save() returned on each rank."""
        if name not in self._saved:
            self._saved[name] = run_ranks(4, save, name, self.folder)
        return self._saved[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: Any) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("meshes"))


NAMES = [*MESHES]
SAVED = ("pp, tp", "fsdp, tp")  # in quick tests
PAIRS = [(NAMES[(i + 3) % len(NAMES)], name) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize(("source", "name"), quick(PAIRS, *(p for p in PAIRS if p[0] in SAVED)))
def test_checkpoints_of_another_mesh_go_on_on_this_one(
    source: str, name: str, checkpoints: Checkpoints
) -> None:
    checkpoints.of(source)
    for found in run_ranks(4, load, source, name, "Llama", checkpoints.folder):
        assert found == pytest.approx(alone()[2], rel=2e-5)


@pytest.mark.parametrize("name", quick(MESHES, *SAVED))
def test_plain_torch_goes_on_from_it(name: str, checkpoints: Checkpoints) -> None:
    checkpoints.of(name)
    model = make("Llama")
    optimizer = adamw(model.parameters())
    load_parts(model, optimizer, checkpoints.folder / name, by_torch=True)
    losses = run_alone(model, optimizer, range(2, 4))
    assert losses == pytest.approx(alone()[2], rel=2e-5)


@pytest.mark.parametrize("name", quick(MESHES, *SAVED))
def test_whole_states_are_those_of_one_process(name: str, checkpoints: Checkpoints) -> None:
    values, state, losses = alone()
    for (mine, of_optimizer), resumed in checkpoints.of(name):
        assert_close(mine, values, rtol=1e-4, atol=1e-5)
        assert_close(of_optimizer["state"], state["state"], rtol=1e-3, atol=1e-6)
        for given, wanted in zip(of_optimizer["param_groups"], state["param_groups"], strict=True):
            assert sorted(given["params"]) == sorted(wanted["params"])
            assert given["weight_decay"] == wanted["weight_decay"]
        assert resumed == pytest.approx(losses, rel=2e-5)


def experts_between_meshes(rank: int, folder: Path) -> list[list[float]]:
    """From each mesh to the next one."""
    found, names = [], [*EXPERTS]
    for name in EXPERTS:
        train, _ = trained(name, "Mixtral")
        save_parts(train, train.optimizer, folder / name)
        found.append(run(train, range(2, 4)))
    for source, name in zip(names, names[1:] + names[:1], strict=True):
        found.append(load(rank, source, name, "Mixtral", folder))
    return found


@pytest.mark.slow
def test_experts_go_between_meshes(tmp_path: Path) -> None:
    expected = alone("Mixtral")[2]
    for found in run_ranks(4, experts_between_meshes, tmp_path, timeout_s=120):
        for losses in found:
            assert losses == pytest.approx(expected, rel=2e-5)
    for name in EXPERTS:
        model = make("Mixtral")
        optimizer = adamw(model.parameters())
        load_parts(model, optimizer, tmp_path / name, by_torch=True)
        assert run_alone(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=2e-5)


# ---- saved while training goes on, and what is refused


@in_ranks(4)
def test_an_asynchronous_save_has_the_state_of_its_call(rank: int, tmp_path: Path) -> None:
    train, _ = trained("pp, tp")
    values, state = get_state_dict(train, train.optimizer)
    gloo = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save(
        {"model": values, "optimizer": state}, checkpoint_id=tmp_path / "a", process_group=gloo
    )
    losses = run(train, range(2, 4))
    saving.result(60)
    assert load(rank, "a", "pp, tp", "Llama", tmp_path) == losses


def with_key(state: dict[str, Any], name: str, key: str, value: Any) -> dict[str, Any]:
    """An optimizer's state that has one key more for the weight."""
    states = state["state"]
    return {**state, "state": {**states, name: {**states.get(name, {}), key: value}}}


@in_ranks(4)
def test_a_state_of_another_model_is_refused_before_anything_is_written(rank: int) -> None:
    train, _ = trained("pp, tp")
    values, state = get_state_dict(train, train.optimizer, full=True)
    parts, own = get_state_dict(train, train.optimizer)
    other, _ = trained("tp of copied heads")
    with pytest.raises(ValueError, match="has blocks of a Pipeline with stages on other ranks"):
        get_state_dict(next(train.model.children()))
    before = {name: param.detach().clone() for name, param in other.model.named_parameters()}
    name = "model.layers.0.mlp.up_proj.weight"
    without = {n: v for n, v in values.items() if n != name}
    groups = {**state, "param_groups": state["param_groups"][:1]}
    for text, wrong, wrong_state in (
        (
            f"{name} must have shape (64, 48), got (63, 48) in the state",
            {**values, name: values[name][:-1]},
            state,
        ),
        (f"the state lacks ['{name}'] and has unknown names []", without, state),
        (
            "lacks [] and has unknown names ['stranger']",
            {**values, "stranger": values[name]},
            state,
        ),
        ("parameter groups of [30] parameters, but the optimizer has [30, 9]", values, groups),
        ("the state lacks", parts, own),
        (f"names ['{name}.stranger']", values, with_key(state, name, "stranger", values[name])),
        ("names ['gone.exp_avg']", values, with_key(state, "gone", "exp_avg", values[name])),
    ):
        with pytest.raises(ValueError, match="rank 0: .*" + re.escape(text)):
            set_state_dict(other, other.optimizer, wrong, wrong_state)
    with pytest.raises(ValueError, match="None on all ranks or on none"):
        set_state_dict(other, None, values if rank == 0 else None, rank0_only=True)
    with pytest.raises(ValueError, match="rank0_only needs full=True"):
        get_state_dict(train, rank0_only=True)
    assert all(torch.equal(p, before[n]) for n, p in other.model.named_parameters())


@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(4)
def test_flat_weights_of_uneven_parts(rank: int, stage: int, tmp_path: Path) -> None:
    """Parts of 5 and 4 features: tensor-parallel ranks cut the second layer at other elements."""
    dims = ParallelDims(dp=2, tp=2)

    def made() -> Any:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 9), nn.Linear(9, 40)
        split = ColumnParallelLinear.from_linear(first, mesh=dims["tp"], gather_output=True)
        loss_fn = nn.functional.mse_loss
        model = nn.Sequential(split, second)
        return parallelize(model, dims, adamw, loss_fn=loss_fn, zero_stage=stage)

    train, again = made(), made()
    rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank // 2))
    for _ in range(2):
        train.step(rows, torch.ones(2, 40))
        apply_steps(train.optimizer)
    save_parts(train, train.optimizer, tmp_path)
    load_parts(again, again.optimizer, tmp_path)
    expected, found = (get_state_dict(each, each.optimizer, full=True) for each in (train, again))
    assert expected[1]["state"]
    assert_same(found, expected)
