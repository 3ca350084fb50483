"""Checks that weights have gradients on all ranks, for reductions that need this."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["check_same_gradients", "largest_of", "progress"]


def largest_of(
    values: list[int], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[int]:
    """The elementwise maximum over all ranks of a mesh with these groups. Collective."""
    tensor = torch.tensor(values, dtype=torch.int32, device=device)
    if isinstance(tensor, FakeTensor):
        return values
    for group in groups:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    found: list[int] = tensor.tolist()
    return found


def progress(num_before: int, *, is_coming: bool, is_by_hand: bool) -> int:
    """The progress of a weight, for check_same_gradients().

    Counts `num_before`, the earlier backward passes since the last step with a gradient; whether
    this pass will have one; and a gradient set by the user.
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
    """Raises RuntimeError on all ranks if progress() of a weight, `mine` here, differs.

    The message says that `who` cannot reduce such gradients, and what to use `instead`. Collective
    over each of the groups, which are those of a mesh.
    """
    found = largest_of([*mine, *(-value for value in mine)], groups, device)
    for name, most, least in zip(names, found[: len(mine)], found[len(mine) :], strict=True):
        if most != -least:
            raise RuntimeError(
                f"{name} has a gradient on some ranks only, which {who} cannot reduce. No weight"
                " has been written. Use the weight on every rank in every backward pass (add 0"
                f" times it to the loss), or {instead}"
            )
