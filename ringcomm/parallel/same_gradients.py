"""Ranks that cannot reduce a gradient that some of them lack compare their weights first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ringcomm.parallel.unit_hooks import untraced

__all__ = ["check_same_gradients", "largest_of", "progress", "watch_whole_weights"]


def largest_of(
    values: list[int], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[int]:
    """The largest of the values, each, of all ranks of a mesh with these groups. Collective."""
    tensor = torch.tensor(values, dtype=torch.int32, device=device)
    if isinstance(tensor, FakeTensor):
        return values
    for group in groups:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    found: list[int] = tensor.tolist()
    return found


def progress(num_before: int, *, is_coming: bool, is_by_hand: bool) -> int:
    """How far a weight is, for check_same_gradients().

    Args:
        num_before: in how many earlier backward passes since the last step it got a gradient.
        is_coming: whether it gets one in this pass.
        is_by_hand: whether the user has put one there.
    """
    return 4 * num_before + 2 * is_coming + is_by_hand


def check_same_gradients(
    names: Collection[str],
    mine: list[int],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    *,
    who: str,
    instead: str,
) -> None:
    """Raises RuntimeError on all ranks where a weight's progress() differs.

    Args:
        names: of the weights, the same on all ranks.
        mine: progress() of each on this rank.
        groups: of a mesh, whose ranks compare.
        device: of the weights.
        who: cannot reduce such gradients.
        instead: what to use.

    Collective.
    """
    found = largest_of([*mine, *(-value for value in mine)], groups, device)
    for name, most, least in zip(names, found[: len(mine)], found[len(mine) :], strict=True):
        if most != -least:
            raise RuntimeError(
                f"{name} gets a gradient on some ranks only, which {who} cannot reduce, and no"
                " weight has been written: let every rank use it in every backward pass (add 0"
                f" times it to the loss), or {instead}"
            )


def watch_whole_weights(
    unit: nn.Module, seen: Callable[[nn.Module, str, nn.Parameter], None]
) -> Callable[[], Any]:
    """Calls seen(module, name, weight) once for each of a unit's whole weights that are trained.

    Autograd brings gradients to them, which fully_shard reduces into the sharded parameters'. They
    are there when the unit runs for the first time.

    Returns:
        What ends it.
    """
    found: set[nn.Parameter] = set()

    @untraced
    def before_forward(*_: Any) -> None:
        for module in unit.modules():
            for name, param in module.named_parameters(recurse=False):
                is_whole = not hasattr(param, "device_mesh")
                if is_whole and param.requires_grad and param not in found:
                    found.add(param)
                    seen(module, name, param)

    return unit.register_forward_pre_hook(before_forward).remove
