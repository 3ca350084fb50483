"""Which modules of a model are gathered together, and which parameters belong to which of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import nn

__all__ = [
    "check_can_materialize",
    "check_params",
    "default_units",
    "materialize",
    "params_of_units",
]


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; containers such as ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def default_units(model: nn.Module) -> list[nn.Module]:
    """The entries of every outermost ModuleList, or of every outermost Sequential without one."""
    return _entries(model, nn.ModuleList) or _entries(model, nn.Sequential)


def _entries(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    if isinstance(module, kind):
        return [unit for entry in module.children() for unit in _callable_parts(entry)]
    return [unit for child in module.children() for unit in _entries(child, kind)]


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """The module, or what it contains where nobody can call it."""
    if has_forward(module):
        return [module]
    return [part for child in module.children() for part in _callable_parts(child)]


def params_of_units(
    model: nn.Module, units: Iterable[nn.Module]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The parameters of each unit, the model first; a unit without any is left out.

    A parameter belongs to the innermost unit around it. One that several units share belongs to
    the model: it is needed wherever one of them runs.

    Raises:
        TypeError: a unit is no module.
        ValueError: a unit is no part of the model, or has parameters and cannot be called.
    """
    modules = [model, *_checked_units(model, units)]
    unit_ids = {id(module) for module in modules}
    owners: dict[nn.Parameter, set[int]] = {}
    seen: set[tuple[int, int]] = set()

    def visit(module: nn.Module, owner: int) -> None:
        owner = id(module) if id(module) in unit_ids else owner
        if (id(module), owner) in seen:
            return
        seen.add((id(module), owner))
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(owner)
        for child in module.children():
            visit(child, owner)

    visit(model, id(model))
    params: dict[int, list[nn.Parameter]] = {unit_id: [] for unit_id in unit_ids}
    for param, ids in owners.items():
        params[next(iter(ids)) if len(ids) == 1 else id(model)].append(param)
    found = [(module, params[id(module)]) for module in modules if params[id(module)]]
    for module, _ in found:
        if not has_forward(module):
            kind = type(module).__name__
            raise ValueError(f"a unit with parameters is a module one can call, got a {kind}")
    return found


def _checked_units(model: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """The units, each once, without the model."""
    known = {id(module) for module in model.modules()}
    checked: dict[int, nn.Module] = {}
    for unit in units:
        if not isinstance(unit, nn.Module):
            raise TypeError(f"units are modules, got {type(unit).__name__}")
        if id(unit) not in known:
            raise ValueError(f"units are parts of the model, got another {type(unit).__name__}")
        if unit is not model:
            checked[id(unit)] = unit
    return list(checked.values())


def check_params(model: nn.Module, *, allow_meta: bool = False) -> None:
    """Whether each parameter can be cut into pieces.

    Args:
        model: whose parameters.
        allow_meta: whether they may be on the meta device.

    Raises:
        TypeError: one is no plain tensor: a DTensor, another subclass, or not initialized.
        ValueError: one is not contiguous or on the meta device, or two share their memory, or they
            are on several devices.
    """
    devices: set[torch.device] = set()
    names: dict[int, str] = {}
    for name, param in model.named_parameters():
        is_lazy = isinstance(param, nn.UninitializedParameter)
        if is_lazy or type(param.data) is not torch.Tensor:
            kind = type(param if is_lazy else param.data).__name__
            raise TypeError(f"weights to shard are plain tensors, but {name} is a {kind}")
        if param.layout != torch.strided or not param.is_contiguous():
            raise ValueError(f"weights to shard are dense and contiguous, but {name} is not")
        if param.is_meta and allow_meta:
            continue
        if param.is_meta:
            raise ValueError(f"weights to shard have values, but {name} is on the meta device")
        devices.add(param.device)
        other = names.setdefault(param.data_ptr(), name) if param.numel() else name
        if other != name:
            raise ValueError(
                f"{name} and {other} are two parameters in the same memory; tied weights are one"
            )
    if len(devices) > 1:
        raise ValueError(f"weights to shard are on one device, got {sorted(map(str, devices))}")


def check_can_materialize(model: nn.Module) -> None:
    """Whether all modules with tensors on the meta device can give them values.

    Raises:
        ValueError: one has no reset_parameters(), or has parameters with values as well.
    """
    for name, module in model.named_modules():
        tensors = list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))
        if not any(tensor.is_meta for tensor in tensors):
            continue
        kind = f"{name or 'the model'}, a {type(module).__name__},"
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{kind} is on the meta device and has no reset_parameters() to give it values"
            )
        if not all(tensor.is_meta for tensor in tensors):
            raise ValueError(f"{kind} is in parts on the meta device")


def materialize(model: nn.Module, params: Sequence[nn.Parameter], device: torch.device) -> None:
    """Gives those of these parameters that are on the meta device memory and values.

    The parameters stay the objects that they are. Modules come in the order of model.modules();
    each reset_parameters() sees all parameters of its module. Modules of buffers alone get values
    as well.
    """
    wanted = set(params)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        buffers = module.buffers(recurse=False)
        has_wanted = any(param.is_meta and param in wanted for param in own.values())
        if not has_wanted and (own or not any(buffer.is_meta for buffer in buffers)):
            continue
        for param in own.values():
            if param.is_meta:
                value = torch.empty_like(param, device=device)
                new = nn.Parameter(value, requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, new)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        module.reset_parameters()  # type: ignore[operator]
