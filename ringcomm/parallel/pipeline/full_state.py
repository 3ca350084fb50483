"""Checkpoints of the whole model, as it was before it was cut: for any number of stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel.flat_collectives import device_of

__all__ = ["gather_state", "load_state"]


class _Entry(NamedTuple):
    block_idx: int
    name: str
    shape: tuple[int, ...] | None  # None: no tensor, and `value` is what it is
    dtype: torch.dtype | None
    value: Any


def gather_state(
    blocks: Mapping[str, nn.Module],
    names: list[str],
    group: dist.ProcessGroup,
    rank0_only: bool,
) -> dict[str, Any]:
    """The state_dict() of the whole model, in memory of the CPU.

    Blocks are this rank's, names those of all, in the order of the model. Collective: one object,
    and one message or broadcast for each tensor.
    """
    mine: dict[str, Any] = {}
    entries: list[_Entry] = []
    for name, block in blocks.items():
        for key, value in block.state_dict(prefix=f"{name}.").items():
            mine[key] = value
            is_tensor = isinstance(value, Tensor)
            entries.append(
                _Entry(
                    names.index(name),
                    key,
                    tuple(value.shape) if is_tensor else None,
                    value.dtype if is_tensor else None,
                    None if is_tensor else value,
                )
            )
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, entries, group=group)
    owners = [(entry, rank) for rank, found in enumerate(everyone) for entry in found]
    state = {}
    for entry, owner in sorted(owners, key=lambda pair: pair[0].block_idx):
        value = _travel(entry, owner, mine.get(entry.name), group, rank0_only)
        if not rank0_only or group.rank() == 0:
            state[entry.name] = value
    return state


def _travel(
    entry: _Entry, owner: int, mine: Any, group: dist.ProcessGroup, rank0_only: bool
) -> Any:
    """One entry from its owner to rank 0, or to all."""
    if entry.shape is None:
        return entry.value
    if group.rank() == owner:
        value = mine.detach().contiguous()
    elif rank0_only and group.rank() != 0:
        return None
    else:
        value = torch.empty(entry.shape, dtype=entry.dtype, device=device_of(group))
    if not rank0_only:
        dist.broadcast(value, group=group, group_src=owner)
    elif owner != 0:
        if group.rank() == owner:
            dist.send(value, group=group, group_dst=0)
        else:
            dist.recv(value, group=group, group_src=owner)
    return value.to("cpu", copy=True)


def load_state(blocks: Mapping[str, nn.Module], names: list[str], state: Mapping[str, Any]) -> None:
    """Takes what belongs to this rank's blocks.

    Raises:
        ValueError: names or shapes do not fit. Nothing has been written.
    """
    mine = {
        f"{name}.{key}": value
        for name, block in blocks.items()
        for key, value in block.state_dict(keep_vars=True).items()
    }
    others = tuple(f"{name}." for name in names if name not in blocks)
    missing = sorted(mine.keys() - state.keys())
    unknown = sorted(k for k in state.keys() - mine.keys() if not k.startswith(others or ("\0",)))
    if missing or unknown:
        raise ValueError(f"names do not fit the model: missing {missing}, unknown {unknown}")
    for key, value in mine.items():
        if isinstance(value, Tensor) and value.shape != state[key].shape:
            raise ValueError(f"{key} is {tuple(value.shape)}, got {tuple(state[key].shape)}")
    for name, block in blocks.items():
        prefix = f"{name}."
        block.load_state_dict(
            {key.removeprefix(prefix): state[key] for key in mine if key.startswith(prefix)}
        )
