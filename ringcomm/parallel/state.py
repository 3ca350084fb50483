"""State dicts of models and optimizers on any mesh: in parts, or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ringcomm.parallel.tensor.splits import Split, split_params
from ringcomm.parallel.tensor_part import TensorPart
from ringcomm.parallel.whole_tensors import box_of, gather_whole, local_of, scatter_whole

__all__ = ["get_state_dict", "set_state_dict"]

State = dict[str, Any]


def get_state_dict(
    model: Any,
    optimizer: Any = None,
    *,
    full: bool = False,
    rank0_only: bool = False,
    cpu: bool = False,
) -> tuple[State, State]:
    """The state of a model and of its optimizer, under the names of the whole model.

        values, state = get_state_dict(train.model, train.optimizer)
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)   # or dcp.async_save

    Layers in tensor parallelism, stages of a pipeline, experts, DTensors, and shards of ZeRO are
    parts of whole tensors: torch.distributed.checkpoint saves each element once, and loads it on
    any other mesh, by torch.distributed.checkpoint.state_dict into plain torch too.

    Args:
        model: an nn.Module, a pipeline.Pipeline, or what parallelize() returned.
        optimizer: over its parameters: of torch, zero.shard(), ringcomm.optim or offload. State
            that it does not have yet is made, of zeros, as torch's get_state_dict() does.
        full: whether tensors are whole, as in a model of one process. Otherwise each rank has its
            part: TensorPart, DTensor, or a tensor that all ranks have.
        rank0_only: with `full`: ranks other than 0 get two empty dicts, and hold one tensor at a
            time.
        cpu: whether tensors are copied to memory of the CPU; those of `full` are anyway.

    Returns:
        The model's {name: tensor} and the optimizer's {"state": {name: {key: value}},
        "param_groups": [{"params": [names], ...}]}, as torch.distributed.checkpoint.state_dict has
        them. Tensors in parts share memory with the model, unless `cpu` is set.

    Raises:
        ValueError: rank0_only without full; the optimizer has other parameters than the model.

    Collective over the default group with `full`, and for the parameter groups.
    """
    if rank0_only and not full:
        raise ValueError("rank0_only is for full=True: parts are every rank's own")
    module = _module_of(model)
    boxes = _Boxes(module)
    values = {name: boxes.part_of(value, value) for name, value in _entries(module)}
    state: State = {}
    if optimizer is not None:
        found = _OptimizerState(optimizer, boxes)
        state = {"state": found.named, "param_groups": found.groups}
    flat = _flat(values, state)
    if full:
        flat = gather_whole(flat, rank0_only=rank0_only)
        if rank0_only and dist.is_initialized() and dist.get_rank():
            return {}, {}
    elif cpu:
        flat = {
            path: value.to("cpu", copy=True) if _is_tensor(value) else value
            for path, value in flat.items()
        }
    values = {path[1]: value for path, value in flat.items() if path[0] == "model"}
    if state:
        state["state"] = {}
        for kind, name, *keys in flat:
            if kind == "optimizer":
                state["state"].setdefault(name, {})[keys[0]] = flat[kind, name, keys[0]]
    return values, state


def set_state_dict(
    model: Any,
    optimizer: Any,
    values: Mapping[str, Any],
    state: Mapping[str, Any] | None = None,
    *,
    rank0_only: bool = False,
) -> None:
    """Goes on from get_state_dict(), or from whole states of plain torch.

        values, state = get_state_dict(train.model, train.optimizer)
        dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(train.model, train.optimizer, values, state)

    Args:
        model: as get_state_dict()'s.
        optimizer: likewise; None for the model's state alone.
        values: of the model. Each tensor is whole, or this rank's part as get_state_dict() has it;
            keys of other ranks' stages and experts are left out.
        state: of the optimizer, likewise.
        rank0_only: whether only rank 0 has the states, whole; the others give empty dicts.

    Raises:
        ValueError: a name or a shape is another model's, or parts are those of another mesh, on any
            rank. Nothing has been written.

    Collective over the default group.
    """
    module = _module_of(model)
    boxes = _Boxes(module)
    mine = {name: boxes.part_of(value, value) for name, value in _entries(module)}
    found = None if optimizer is None or state is None else _OptimizerState(optimizer, boxes)
    wanted = _flat(mine, {} if found is None else {"state": found.named})
    given, groups = _flat(values, state or {}), (state or {}).get("param_groups")
    if rank0_only:
        given, groups = scatter_whole(given, groups, wanted)
    names = None if found is None else [group["params"] for group in found.groups]
    problem = _problem_of(wanted, given, names, groups)
    for rank, text in enumerate(_all_gathered(problem)):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")
    with torch.no_grad():
        for path, part in wanted.items():
            if _is_tensor(part):
                _fill(part, given[path])
    if found is not None:
        for number, of_param in found.native["state"].items():
            for key, value in of_param.items():
                if not _is_tensor(value):
                    of_param[key] = given["optimizer", found.names[number], key]
        found.load(optimizer, groups)


def _problem_of(
    wanted: Mapping[tuple[str, ...], Any],
    given: Mapping[tuple[str, ...], Any],
    names: list[list[str]] | None,
    groups: list[State] | None,
) -> str | None:
    """What is wrong with a state for this rank, in words."""
    known = {path for paths in _all_gathered([*wanted]) for path in paths}
    missing = sorted(".".join(path[1:]) for path in wanted.keys() - given.keys())
    strangers = sorted(".".join(path[1:]) for path in given.keys() - known)
    if missing or strangers:
        return f"the state lacks {missing[:3]} and has {strangers[:3]} besides"
    if names is not None and groups is not None:
        sizes = [len(own) for own in names], [len(group["params"]) for group in groups]
        if sizes[0] != sizes[1]:
            return f"the state has parameter groups of {sizes[1]}, and the optimizer of {sizes[0]}"
    for path, part in wanted.items():
        value, name = given[path], ".".join(path[1:])
        if not _is_tensor(part):
            continue
        if not isinstance(value, Tensor) and part.dim():
            return f"{name} is a tensor, got a {type(value).__name__}"
        if isinstance(value, Tensor) and value.shape != part.shape:
            return f"{name} is {tuple(value.shape)} in the state, and {tuple(part.shape)} here"
        is_part = isinstance(value, TensorPart | DTensor)
        if is_part and not box_of(part).is_box_of(box_of(value)):
            return (
                f"{name} is another part than this rank's: load a state of another mesh by"
                " torch.distributed.checkpoint into get_state_dict(), or take full=True"
            )
    return None


def _fill(part: Tensor, value: Any) -> None:
    """Writes a value, whole or this rank's part, into a part."""
    if not isinstance(value, TensorPart | DTensor):
        value = box_of(part).cut(torch.as_tensor(value))
    local, value = local_of(part), local_of(value)
    if local.data_ptr() != value.data_ptr():
        local.copy_(value)


# ---- names and boxes


class _Boxes:
    """Which elements of whole tensors a rank has, and the names of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._splits = {param: split for _, param, _, split in split_params(module)}
        self.name_of: dict[Any, str] = {}
        for name, param in module.named_parameters():
            self.name_of.setdefault(param, name)

    def part_of(self, value: Tensor, param: Any, key: str = "") -> Tensor:
        """A value of a parameter, or of its state, as a part of the whole one."""
        value = value.detach()
        split = self._splits.get(param)
        if split is None or not value.dim():
            return value
        dim = _dim_in_state(split, param, value, key)
        if dim is None:
            return value
        shape, offsets = list(value.shape), [0] * value.dim()
        if isinstance(value, DTensor):
            found = compute_local_shape_and_global_offset(
                value.shape, value.device_mesh, value.placements
            )
            offsets = list(found[1])
            value = value.to_local()
        shape[dim] = split.total
        offsets[dim] += split.begin
        return TensorPart(value, offsets, shape)


def _dim_in_state(split: Split, param: Tensor, value: Tensor, key: str) -> int | None:
    """The dimension that is split, of a value as large as the parameter, or of a factor of it."""
    if value.dim() == param.dim():
        return split.dim
    is_split = key.endswith("_row") if split.dim == 0 else key.endswith("_col")
    return 0 if is_split else None


def _module_of(model: Any) -> nn.Module:
    for found in (model, getattr(model, "module", None), getattr(model, "model", None)):
        if isinstance(found, nn.Module):
            return found
    raise TypeError(f"wants a model, a Pipeline, or what parallelize() made; got {type(model)}")


def _entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers by name; tied ones under each of their names."""
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            yield name, value


class _OptimizerState:
    """An optimizer's state_dict(), and the same in parts under the names of parameters.

    The parts share memory with the tensors of the state_dict(). Collective.
    """

    def __init__(self, optimizer: Any, boxes: _Boxes) -> None:
        _init_state(optimizer)
        self.native = optimizer.state_dict()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        strangers = [tuple(p.shape) for p in params if p not in boxes.name_of]
        if strangers:
            raise ValueError(f"the optimizer has a weight of shape {strangers[0]}, no model's")
        self.names = [boxes.name_of[param] for param in params]
        self.named = {
            self.names[number]: {
                key: boxes.part_of(value, params[number], key) if _is_tensor(value) else value
                for key, value in of_param.items()
            }
            for number, of_param in self.native["state"].items()
        }
        self.own_names = [
            [self.names[number] for number in group["params"]]
            for group in self.native["param_groups"]
        ]
        # Stages and experts of other ranks have other parameters.
        everyone = [*zip(*_all_gathered(self.own_names), strict=True)]
        self.groups = [
            {**group, "params": list(dict.fromkeys(name for names in of_ranks for name in names))}
            for group, of_ranks in zip(self.native["param_groups"], everyone, strict=True)
        ]

    def load(self, optimizer: Any, groups: list[State] | None) -> None:
        """Has the optimizer take what was written into the parts, and options of groups."""
        for own, given in zip(self.native["param_groups"], groups or (), strict=groups is not None):
            own.update({key: value for key, value in given.items() if key != "params"})
        optimizer.load_state_dict(self.native)


def _flat(values: Mapping[str, Any], state: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Both states in one dict, without the parameter groups."""
    flat: dict[tuple[str, ...], Any] = {("model", name): value for name, value in values.items()}
    for name, of_param in state.get("state", {}).items():
        flat |= {("optimizer", name, key): value for key, value in of_param.items()}
    return flat


def _init_state(optimizer: Any) -> None:
    """Makes state that an optimizer of torch has only after its first step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or any(param.grad is not None for param in params):
        return
    for param in params:
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _all_gathered(mine: Any) -> list[Any]:
    """Everybody's objects; this rank's alone where there is no group. Collective."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
