"""get_state_dict and set_state_dict: between any meshes, whole, in parts, and by plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from test_parallelize import KINDS, SIZES, ids_of, make, transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict as get_by_torch
from torch.distributed.checkpoint.state_dict import set_state_dict as set_by_torch

from ringcomm.parallel import ParallelDims, get_state_dict, parallelize, set_state_dict

assert KINDS, SIZES
assert transformers

# Sizes of the mesh, options.
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({}, {}),
    "tp, sp": ({"tp": 2}, {"sequence_parallel": True}),
    "tp of copied heads": ({"tp": 4}, {}),
    "pp, tp": ({"pp": 2, "tp": 2}, {}),
    "hsdp": ({"dp": 2, "fsdp": 2}, {}),
    "fsdp, tp": ({"dp": 1, "fsdp": 2, "tp": 2}, {}),
    "fsdp, pp": ({"dp": 1, "fsdp": 2, "pp": 2}, {}),
    "zero 1, pp": ({"pp": 2}, {"zero_stage": 1}),
    "zero 2, tp": ({"tp": 2}, {"zero_stage": 2}),
}
EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep": ({"ep": 2}, {}),
    "ep, pp": ({"ep": 4, "pp": 1}, {}),
    "ep, tp": ({"ep": 2, "tp": 2}, {}),
}


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups, one without decay; a large eps, so that roundings of small gradients stay so."""
    listed = list(params)
    groups: list[dict[str, Any]] = [
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
        train.optimizer.step()
        train.optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def alone(kind: str = "Llama") -> tuple[Any, Any, list[float]]:
    """One process: two steps; then what the next two lose."""
    model = make(kind)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(4):
        if step == 2:
            states = dict(model.state_dict()), get_by_torch(model, optimizer)[1]
            saved = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, states)
        loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return *saved, losses[2:]


def save(rank: int, name: str, kind: str, folder: Path) -> None:
    train, _ = trained(name, kind)
    values, state = get_state_dict(train, train.optimizer)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder / name)


def load(rank: int, names: list[str], name: str, kind: str, folder: Path) -> list[list[float]]:
    found = []
    for source in names:
        train, _ = trained(name, kind, range(0))
        values, state = get_state_dict(train, train.optimizer)
        dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder / source)
        set_state_dict(train, train.optimizer, values, state)
        found.append(run(train, range(2, 4)))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("meshes")
    for name in MESHES:
        run_ranks(4, save, name, "Llama", folder)
    return folder


@pytest.mark.parametrize("idx", range(len(MESHES)), ids=list(MESHES))
def test_checkpoints_of_other_meshes_go_on_on_this_one(idx: int, checkpoints: Path) -> None:
    name, *others = [*MESHES][idx:] + [*MESHES][:idx]
    sources, expected = [others[0], others[3]], alone()[2]
    for found in run_ranks(4, load, sources, name, "Llama", checkpoints):
        for source, losses in zip(sources, found, strict=True):
            assert losses == pytest.approx(expected, rel=2e-5), (source, name)


@pytest.mark.parametrize("name", MESHES)
def test_plain_torch_goes_on_from_it(name: str, checkpoints: Path) -> None:
    model = make("Llama")
    optimizer = adamw(model.parameters())
    values, state = get_by_torch(model, optimizer)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=checkpoints / name)
    set_by_torch(model, optimizer, model_state_dict=values, optim_state_dict=state)
    assert_goes_on(model, optimizer, alone()[2])


def assert_goes_on(model: nn.Module, optimizer: Any, expected: list[float]) -> None:
    losses = []
    for step in (2, 3):
        loss = model(input_ids=ids_of(step), labels=ids_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-5)


# ---- whole states


def whole_states(rank: int, name: str, kind: str) -> Any:
    train, _ = trained(name, kind)
    everywhere = get_state_dict(train, train.optimizer, full=True)
    first = get_state_dict(train, train.optimizer, full=True, rank0_only=True)
    parts = get_state_dict(train, train.optimizer, cpu=True)
    assert (first == ({}, {})) == (rank != 0)
    if rank == 0:
        assert_same(first, everywhere)
    # Back from whole ones that all ranks have, that rank 0 has, and from this mesh's parts.
    resumed = []
    for states, rank0_only in ((everywhere, False), (first, True), (parts, False)):
        again, _ = trained(name, kind, range(0))
        set_state_dict(again, again.optimizer, *states, rank0_only=rank0_only)
        resumed.append(run(again, range(2, 4)))
    return everywhere, resumed


def assert_same(one: Any, other: Any) -> None:
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[1]["param_groups"] == other[1]["param_groups"]
    for name, of_param in one[1]["state"].items():
        for key, value in of_param.items():
            assert torch.equal(value, other[1]["state"][name][key]), (name, key)


@pytest.mark.parametrize("name", MESHES)
def test_whole_states_are_those_of_one_process(name: str) -> None:
    values, state, losses = alone()
    for (mine, of_optimizer), resumed in run_ranks(4, whole_states, name, "Llama"):
        assert mine.keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)
        for key, of_param in state["state"].items():
            for kind, value in of_param.items():
                found = of_optimizer["state"][key][kind]
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-6)
        for given, wanted in zip(of_optimizer["param_groups"], state["param_groups"], strict=True):
            assert sorted(given["params"]) == sorted(wanted["params"])
            assert given["weight_decay"] == wanted["weight_decay"]
        for found in resumed:
            assert found == pytest.approx(losses, rel=2e-5)


def experts_between_meshes(rank: int, folder: Path) -> list[list[float]]:
    """From each mesh to each; the names of experts differ between ranks."""
    found = []
    for name in EXPERTS:
        train, _ = trained(name, "Mixtral")
        values, state = get_state_dict(train, train.optimizer)
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder / name)
        found.append(run(train, range(2, 4)))
    for source in EXPERTS:
        found += load(rank, [source], next(n for n in EXPERTS if n != source), "Mixtral", folder)
    return found


def test_experts_go_between_meshes(tmp_path: Path) -> None:
    expected = alone("Mixtral")[2]
    for found in run_ranks(4, experts_between_meshes, tmp_path, timeout_s=120):
        for losses in found:
            assert losses == pytest.approx(expected, rel=2e-5)


# ---- saved while training goes on, and what is refused


def save_while_training(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    train, _ = trained("pp, tp")
    values, state = get_state_dict(train, train.optimizer)
    gloo = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save(
        {"model": values, "optimizer": state}, checkpoint_id=folder / "a", process_group=gloo
    )
    losses = run(train, range(2, 4))
    saving.result(60)
    return losses, load(rank, ["a"], "pp, tp", "Llama", folder)[0]


def test_an_asynchronous_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    for losses, resumed in run_ranks(4, save_while_training, tmp_path):
        assert resumed == losses


def refused(rank: int) -> list[str]:
    train, _ = trained("pp, tp")
    values, state = get_state_dict(train, train.optimizer, full=True)
    parts, own = get_state_dict(train, train.optimizer)
    other, _ = trained("tp of copied heads")
    before = {name: param.detach().clone() for name, param in other.model.named_parameters()}
    found = []

    def attempt(values: Any, state: Any, model: Any = other) -> None:
        with pytest.raises(ValueError, match="rank 0: ") as error:
            set_state_dict(model, model.optimizer, values, state)
        found.append(str(error.value))

    name = "model.layers.0.mlp.up_proj.weight"
    attempt({**values, name: values[name][:-1]}, state)
    attempt({n: v for n, v in values.items() if n != name}, state)
    attempt({**values, "stranger": values[name]}, state)
    attempt(values, {**state, "param_groups": state["param_groups"][:1]})
    attempt(parts, own)
    with pytest.raises(ValueError, match="rank0_only is for full=True"):
        get_state_dict(train, rank0_only=True)
    assert all(torch.equal(p, before[n]) for n, p in other.model.named_parameters())
    return found


def test_a_state_of_another_model_is_refused_before_anything_is_written() -> None:
    texts = [
        "mlp.up_proj.weight is (63, 48) in the state, and (64, 48) here",
        "the state lacks ['model.layers.0.mlp.up_proj.weight'] and has []",
        "the state lacks [] and has ['stranger'] besides",
        "the state has parameter groups of [30], and the optimizer of [30, 9]",
        "the state lacks",
    ]
    for found in run_ranks(4, refused):
        for text, error in zip(texts, found, strict=True):
            assert text in error
