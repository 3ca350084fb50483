"""Whole weights from split ones and back: checkpoints that know nothing of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel.tensor.regions import all_reduce_grad_, summed_over
from ringcomm.parallel.tensor.splits import Split, split_params
from ringcomm.torch_names import all_gather_single

__all__ = ["full_state_dict", "load_full_state_dict", "whole_of"]


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state_dict() that the model would have unsplit, in memory of the CPU.

    Args:
        model: with modules of ringcomm.nn, split over one group.
        rank0_only: whether the group's other ranks get an empty dict.

    Collective: gathers one parameter after the other.
    """
    parts = {param: (split, module.group) for _, param, module, split in split_params(model)}
    group = next(iter(parts.values()))[1] if parts else None
    is_kept = not rank0_only or group is None or group.rank() == 0
    wholes: dict[Tensor, Tensor] = {}  # tied ones once
    for value in dict.fromkeys(model.state_dict(keep_vars=True).values()):
        whole = (
            whole_of(value.detach(), *parts[value]) if value in parts else value.detach().clone()
        )
        if is_kept:
            wholes[value] = whole.cpu()
    if not is_kept:
        return {}
    return {name: wholes[value] for name, value in model.state_dict(keep_vars=True).items()}


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> None:
    """Takes this rank's parts of whole weights.

    Args:
        model: with modules of ringcomm.nn.
        state_dict: whole, of any dtype and device, and the same on all ranks; a file that was
            loaded with torch.load(mmap=True) is read where this rank's parts are.
        strict: whether names must be those of the model.
        device: where parameters that are on the meta device get memory. None: where their values
            in the state are.

    Raises:
        ValueError: names or shapes do not fit; nothing has been written.
    """
    splits = {param: split for _, param, _, split in split_params(model)}
    mine = model.state_dict(keep_vars=True)
    if strict and mine.keys() != state_dict.keys():
        missing = sorted(mine.keys() - state_dict.keys())
        strangers = sorted(state_dict.keys() - mine.keys())
        raise ValueError(f"the state lacks {missing[:3]} and has {strangers[:3]} besides")
    names = [name for name in mine if name in state_dict]
    for name in names:
        expected = _whole_shape(mine[name], splits.get(mine[name]))
        if state_dict[name].shape != expected:
            raise ValueError(
                f"{name} is {tuple(state_dict[name].shape)} in the state, and the whole parameter"
                f" {tuple(expected)}"
            )
    with torch.no_grad():
        for name in names:
            split = splits.get(mine[name])
            part = state_dict[name] if split is None else split.cut(state_dict[name])
            if mine[name].is_meta:
                _give_memory(mine[name], part, part.device if device is None else device)
            else:
                mine[name].copy_(part)


def whole_of(part: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    """The whole of what the ranks have parts of, such as the state that an optimizer keeps.

    Args:
        part: of the shape of this rank's part of a parameter.
        split: that parameter's.
        group: whose ranks have the parts.

    Returns:
        A new tensor on all ranks.

    Collective: the parts, padded to the longest.
    """
    longest = max(end - begin for begin, end in split.ranges)
    moved = part.movedim(split.dim, 0)
    mine = moved.new_zeros(longest, *moved.shape[1:])
    mine[: len(moved)] = moved
    rows = mine.new_empty(len(split.ranges) * longest, *moved.shape[1:])
    all_gather_single(rows, mine, group=group)
    whole = moved.new_empty(split.total, *moved.shape[1:])
    for (begin, end), row in zip(split.ranges, rows.split(longest), strict=True):
        whole[begin:end] = row[: end - begin]
    return whole.movedim(0, split.dim).contiguous()


def _whole_shape(part: Tensor, split: Split | None) -> torch.Size:
    if split is None:
        return part.shape
    shape = list(part.shape)
    shape[split.dim] = split.total
    return torch.Size(shape)


def _give_memory(param: Tensor, value: Tensor, device: torch.device | str) -> None:
    """The parameter stays the object that it is; its hook does not stay by itself."""
    group = summed_over(param)
    made = torch.empty_like(param, device=device).copy_(value)
    is_param = isinstance(param, nn.Parameter)
    torch.utils.swap_tensors(
        param, nn.Parameter(made, requires_grad=param.requires_grad) if is_param else made
    )
    if group is not None:
        param._backward_hooks = None  # of the memory before
        all_reduce_grad_(param, group)
