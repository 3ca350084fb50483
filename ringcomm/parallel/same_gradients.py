"""Ranks that cannot reduce a gradient that some of them lack compare their weights first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ringcomm.parallel.shards.unit_hooks import untraced

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

    `num_before` earlier backward passes since the last step brought it a gradient; this one will;
    or the user has put one there.
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
    """Raises RuntimeError on all ranks where progress(), `mine` here, of a weight differs.

    The message says `who` cannot reduce such gradients, and what to use `instead`. Collective over
    each of the groups, which are those of a mesh.
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
    are there when the unit runs for the first time; under DTensor's tensor parallelism they are
    DTensors too, of another mesh. Returns what ends it.
    """
    meshes = {getattr(param, "device_mesh", None) for param in unit.parameters()}
    found: set[nn.Parameter] = set()

    @untraced
    def before_forward(*_: Any) -> None:
        for module in unit.modules():
            for name, param in module.named_parameters(recurse=False):
                mesh = getattr(param, "device_mesh", None)
                is_whole = mesh is None or mesh not in meshes
                if is_whole and param.requires_grad and param not in found:
                    found.add(param)
                    seen(module, name, param)

    return unit.register_forward_pre_hook(before_forward).remove
