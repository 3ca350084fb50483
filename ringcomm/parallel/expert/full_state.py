"""Whole checkpoints of models whose experts are shared among ranks, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.constant_buffer import broadcast_
from ringcomm.parallel.expert.local_experts import LocalExperts, split_experts
from ringcomm.parallel.flat_collectives import device_of

__all__ = ["full_state_dict", "load_full_state_dict"]


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state_dict() that the model with all experts in one place would have.

    In memory of the CPU. torch.distributed.checkpoint needs it not: the keys of different experts
    differ, and it saves what each rank has, and loads for other numbers of ranks.

    Args:
        model: with layers of experts.
        rank0_only: whether only the first rank of each layer's group keeps experts, and the others'
            dict has what is replicated alone.

    Collective: every rank broadcasts its experts to those that share the layer.
    """
    layers = split_experts(model)
    prefixes = tuple(f"{name}." if name else "" for name in layers)
    mine = model.state_dict()
    state = {
        key: _copied(value)
        for key, value in mine.items()
        if not prefixes or not key.startswith(prefixes)
    }
    for prefix, experts in zip(prefixes, layers.values(), strict=True):
        is_kept = not rank0_only or experts.group.rank() == 0
        state.update(_gathered(experts, prefix, is_kept))
    return state


def _gathered(experts: LocalExperts, prefix: str, is_kept: bool) -> dict[str, Any]:
    group = experts.group
    mine = experts.state_dict(prefix=prefix)
    kinds = {key: v.to("meta") if isinstance(v, Tensor) else v for key, v in mine.items()}
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, kinds, group=group)
    device = device_of(group)
    state: dict[str, Any] = {}
    for rank, theirs in enumerate(of_ranks):
        values = mine if rank == group.rank() else theirs
        tensors = {
            key: value.detach().contiguous().to(device)
            if rank == group.rank()
            else torch.empty(value.shape, dtype=value.dtype, device=device)
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        broadcast_(tensors.values(), group, group_src=rank)
        if is_kept:
            state.update({key: _copied(tensors.get(key, value)) for key, value in values.items()})
    return state


def _copied(value: Any) -> Any:
    if isinstance(value, DTensor):  # of fully_shard
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Takes this rank's part of a whole checkpoint, of any number of ranks.

    Args:
        model: whose values are replaced.
        state_dict: of full_state_dict(), or of the model with all experts in one place.

    Raises:
        ValueError: names or shapes do not fit, or the model has no memory; nothing was written.
    """
    elsewhere = tuple(
        f"{name}.{idx}." if name else f"{idx}."
        for name, experts in split_experts(model).items()
        for idx in range(experts.num_experts)
        if str(idx) not in experts
    )
    given = {k: v for k, v in state_dict.items() if not k.startswith(elsewhere)}
    mine = model.state_dict()
    if given.keys() != mine.keys():
        missing, strangers = sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
        raise ValueError(f"the state lacks {missing[:3]} and has {strangers[:3]} besides")
    for name, value in mine.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"{name} is on the meta device: call model.to_empty(device=...) before"
            )
        if isinstance(value, Tensor) and given[name].shape != value.shape:
            raise ValueError(
                f"{name} is {tuple(given[name].shape)} in the state, and {tuple(value.shape)} in"
                " the model"
            )
    model.load_state_dict(given)
