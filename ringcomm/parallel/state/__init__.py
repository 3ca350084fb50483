"""State dicts of models and optimizers on any mesh: sharded or full."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import all_gathered, raise_on_all
from ringcomm.parallel.model.cut import find_shards
from ringcomm.parallel.optimizer_classes import MASTER, State
from ringcomm.parallel.parameter_server import ParameterServer
from ringcomm.parallel.state.own_parts import ModelParts, OptimizerParts
from ringcomm.parallel.state.tensor_part import (
    Path,
    SameAs,
    TensorPart,
    fill,
    gather_whole,
    own_elements,
    part_of,
    scatter_whole,
)
from ringcomm.parallel.tensor.regions import give_memory
from ringcomm.torch_names import tree_map_only

__all__ = ["get_state_dict", "set_state_dict"]


@torch.inference_mode(False)  # DTensors cannot be detached there
def get_state_dict(
    model: Any,
    optimizer: Any = None,
    *,
    full: bool = False,
    rank0_only: bool = False,
    cpu: bool = False,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[State, State]:
    """Returns the state of a model and of its optimizer, with the names of the unsharded model.

        values, state = get_state_dict(train.model, train.optimizer)
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)

    dcp.async_save() runs collectives during the next steps: make `group = dist.new_group()` once,
    and pass process_group=group.

    Tensor-parallel layers, pipeline stages, experts, DTensors, and shards of ZeRO are parts of full
    tensors. torch.distributed.checkpoint saves each element once and loads it on any other mesh,
    and with torch.distributed.checkpoint.state_dict into plain torch.

    Args:
        model: an nn.Module, a pipeline.Pipeline, or the result of parallelize().
        optimizer: an optimizer over its parameters: of torch, zero.shard(), ringcomm.optim or
            offload; or a wrapper that has it as `optimizer`. Missing state is made until the next
            step. The float32 values of 16-bit weights have the key "master".
        full: return full tensors, as in a model of one process, in CPU memory. Otherwise each rank
            has its part: a TensorPart, a DTensor, or a replicated tensor.
        rank0_only: with `full`: ranks other than 0 get two empty dicts, and need memory for one
            tensor at a time.
        cpu: copy tensors to CPU memory; with `full` they always are.
        group: the ranks of the model, which all call this. Default: all ranks.
        mesh: a one-dimensional DeviceMesh of them, instead of a group.

    Returns:
        The model's {name: tensor} and the optimizer's {"state": {name: {key: value}},
        "param_groups": [{"params": [names], ...}]}, as torch.distributed.checkpoint.state_dict has
        them. A loss scale is in the groups: delete its keys "loss_scale" and
        "loss_scale_good_steps" before torch's set_optimizer_state_dict(full_state_dict=True) loads
        the state into an optimizer without one. Sharded tensors share memory with the model, unless
        `cpu` is set or they are in files or in an optimizer of offload.

    Raises:
        TypeError: a wrapper of an optimizer has weights or a state of its own, or no `optimizer`;
            or it is a ParameterServer, which has states at its servers.
        ValueError: rank0_only without full; the optimizer has other parameters than the model, or
            states that cannot be combined; a FullyShardedDataParallel; with full, ranks of other
            groups have elements.

    Collective with `full`, and for the parameter groups.
    """
    if rank0_only and not full:
        raise ValueError("rank0_only needs full=True: without it, every rank has its own shards")
    group = _group_of(optimizer, group, mesh)
    has_state = not rank0_only or group is None or group.rank() == 0
    parts = ModelParts(_module_of(model))
    first: dict[Tensor, Path] = {}
    flat: dict[Path, Any] = {}
    for name, value in parts.values.items():
        path = ("model", name)
        is_again = full and first.setdefault(value, path) != path
        flat[path] = SameAs(first[value]) if is_again else parts.of_value(value, is_stored=full)
    state: State = {}
    if optimizer is not None:
        found = OptimizerParts(optimizer, parts, group, is_stored=full)
        state = {"state": {}, "param_groups": found.groups}
        flat |= found.parts
    if full:
        flat = gather_whole(flat, rank0_only=rank0_only, group=group)
    elif cpu:
        flat = {
            path: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            for path, value in flat.items()
        }
    values: State = {}
    for (kind, name, *keys), value in flat.items():
        of_name = values if kind == "model" else state["state"].setdefault(name, {})
        of_name[keys[0] if keys else name] = value
    # Ranks may have different ones.
    extra = {name: value for name, (value, _) in parts.extra.items()}
    extra = tree_map_only(Tensor, Tensor.cpu, extra) if full or cpu else extra
    for of_rank in all_gathered(extra, group) if full else [extra]:
        values |= {name: value for name, value in of_rank.items() if name not in values}
    return (values, state) if has_state else ({}, {})


@torch.inference_mode(False)  # updates must be able to write states
def set_state_dict(
    model: Any,
    optimizer: Any,
    values: Mapping[str, Any] | None,
    state: Mapping[str, Any] | None = None,
    *,
    rank0_only: bool = False,
    strict: bool = True,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Loads the result of get_state_dict(), or full states of plain torch.

        values, state = get_state_dict(train.model, train.optimizer)
        dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(train.model, train.optimizer, values, state)

    Args:
        model: as for get_state_dict(). Parameters on the meta device get memory.
        optimizer: likewise; None for the model's state only.
        values: the model's state. Each tensor is full, or this rank's part as from
            get_state_dict(); keys of other ranks' stages and experts are ignored. From a file that
            was loaded with torch.load(mmap=True), only this rank's parts are read. None for the
            optimizer's state only.
        state: the optimizer's state, likewise. A weight without state has not been updated;
            "master" may be missing.
        rank0_only: only rank 0 has the states, which are full; the others pass empty dicts.
        strict: whether names must be those of the model. Otherwise others are ignored, with a
            warning for an optimizer's state.
        device: the device for parameters that are on the meta device. Default: that of their
            values.
        group: as for get_state_dict().
        mesh: likewise.

    Raises:
        ValueError: on all ranks: a name or a shape does not match the model, or parts are from
            another mesh. Nothing has been written.
        TypeError: as from get_state_dict().
        RuntimeError: inside a backward pass, with offloaded weights.

    Collective.
    """
    group = _group_of(optimizer, group, mesh)
    if len(set(all_gathered((values is None, state is None), group))) > 1:
        raise ValueError("values and state must be None on all ranks or on none: pass empty dicts")
    parts = ModelParts(_module_of(model))
    mine: dict[Path, Any] = {
        ("model", name): parts.of_value(value, is_stored=True)
        for name, value in ({} if values is None else parts.values).items()
    }
    if values is not None:
        mine |= {("model", name): owner for name, (_, owner) in parts.extra.items()}
    found = None
    if optimizer is not None and (state or (state is not None and rank0_only)):
        found = OptimizerParts(optimizer, parts, group, is_stored=True)
    wanted = mine | ({} if found is None else found.parts)
    given: dict[Path, Any] = {("model", name): value for name, value in (values or {}).items()}
    for names in () if strict else parts.names_of_tied:  # ranks may have it under other names
        if is_given := [("model", name) for name in names if ("model", name) in given]:
            given = {("model", name): given[is_given[0]] for name in names} | given
    for name, of_param in (state or {}).get("state", {}).items():
        known = {key: value for key, value in of_param.items() if value is not None}
        given |= {("optimizer", name, key): value for key, value in known.items()}
    more: Any = (state or {}).get("param_groups")
    if rank0_only and group is not None:
        given, more = scatter_whole(given, more, wanted, group)
    groups, problem = _matched([] if found is None else found.groups, more, strict=strict)
    problem = _problem_of(wanted, given, group, strict=strict) or problem
    raise_on_all(problem, group)
    for shards in parts.shards:
        shards.release_all()
    with torch.no_grad():
        for path, part in mine.items():
            if path in given and isinstance(part, nn.Module):
                part.set_extra_state(given[path])
            elif path in given:
                _write(parts.values[path[1]], part, given[path], device)
    if found is not None:
        found.load(given, groups)


def _write(value: Tensor, part: Tensor, given: Any, device: torch.device | str | None) -> None:
    """Writes a given value into a parameter or buffer; `part` is this rank's part of it."""
    shards = find_shards(value)
    if value.is_meta:
        give_memory(value, own_elements(part, given), device)
    elif shards is not None:
        shards.unit_of(value).write_shard(value, own_elements(part, given))
    else:
        fill(part, given)


def _problem_of(
    wanted: Mapping[Path, Any],
    given: Mapping[Path, Any],
    group: dist.ProcessGroup | None,
    *,
    strict: bool,
) -> str | None:
    """The error message for a state that does not match on this rank, or None. Collective."""
    known = {path for paths in all_gathered([*wanted], group) for path in paths}
    unknown = {path for path in given.keys() - known if path[0] == "optimizer"}
    dropped = sorted(".".join(path[1:]) for path in unknown if path[-1] != MASTER)
    if dropped and not strict and (group is None or group.rank() == 0):
        warnings.warn(
            f"set_state_dict(strict=False) ignores {len(dropped)} values of the optimizer's state"
            f" for which this optimizer has no weight or key, such as {dropped[0]}",
            stacklevel=3,
        )
    if strict:
        updated = {path[:2] for path in given}
        missing = sorted(
            ".".join(path[1:])
            for path in wanted.keys() - given.keys()
            if path[0] == "model" or (path[:2] in updated and path[2] != MASTER)
        )
        strangers = sorted(
            ".".join(path[1:])
            for path in given.keys() - known
            if path[-1] != MASTER or ("model", path[1]) not in known
        )
        if missing or strangers:
            return f"the state lacks {missing[:3]} and has unknown names {strangers[:3]}"
    for path, part in wanted.items():
        if path in given and (problem := _misfit(".".join(path[1:]), part, given[path])):
            return problem
    return None


def _matched(
    ours: list[State], theirs: list[State] | None, *, strict: bool
) -> tuple[list[State], str | None]:
    """For each parameter group the one of a state with the same parameters, or an empty dict.

    And the error message if they do not match.
    """
    if theirs is None or not ours:
        return [{} for _ in ours], None
    sizes, given = ([len(of["params"]) for of in own] for own in (ours, theirs))
    if strict and sorted(sizes) != sorted(given):
        text = (
            f"the state has parameter groups of {given} parameters, but the optimizer has {sizes}"
        )
        return [], text
    place = {name: idx for idx, of in enumerate(theirs) for name in of["params"]}
    empty = iter([of for of in theirs if not of["params"]])
    found: list[State] = []
    for own in ours:
        places = {place.get(name) for name in own["params"]}
        known = [theirs[idx] for idx in places if idx is not None]
        if len(known) > 1 or (strict and None in places):
            return [], (
                f"the parameters of the group of {own['params'][0]} are in {len(known)} groups of"
                " the state: make the optimizer with the groups of the state"
            )
        found.append(known[0] if known else {} if places else next(empty, {}))
    return found, None


def _misfit(name: str, part: Any, value: Any) -> str | None:
    if part is None:
        return (
            f"{name} is made by a module's own saving code, and only its load_state_dict() can load"
            " it: leave it out, with strict=False"
        )
    if not isinstance(part, Tensor):
        return None
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        return f"{name} must be a tensor, got {kind}" if part.dim() else None
    if value.shape != part.shape:
        return f"{name} must have shape {tuple(part.shape)}, got {tuple(value.shape)} in the state"
    # Shapes are equal here.
    if isinstance(value, TensorPart | DTensor) and part_of(part).boxes != part_of(value).boxes:
        return (
            f"{name} is the part of another rank: load the state of another mesh with"
            " torch.distributed.checkpoint into get_state_dict(), or use full=True"
        )
    return None


def _module_of(model: Any) -> nn.Module:
    for found in (model, getattr(model, "module", None), getattr(model, "model", None)):
        if isinstance(found, nn.Module):
            return found
    raise TypeError(
        f"expected a model, a Pipeline or the result of parallelize(); got {type(model)}"
    )


def _group_of(
    optimizer: Any, group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    if isinstance(optimizer, ParameterServer):
        raise TypeError(
            "the states of a ParameterServer are at its servers: save and load the model's state"
            " alone, and on each rank that serves the state_dict() of its server_optimizer"
        )
    if group is not None or mesh is not None:
        return resolve_group(group, mesh)
    return dist.group.WORLD if dist.is_initialized() else None
