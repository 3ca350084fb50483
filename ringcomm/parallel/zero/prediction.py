"""What sharding leaves to a rank, in bytes kept and bytes sent, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.clip import bytes_over_all_ranks
from ringcomm.parallel.model_axes import axes_of
from ringcomm.parallel.shards.sharded_unit import PACKED_BYTES
from ringcomm.parallel.shards.units import default_units, params_of_units, units_apart
from ringcomm.parallel.zero.bucket import plan_buckets
from ringcomm.parallel.zero.optimizer import ShardOptions, is_offloaded


class Memory(NamedTuple):
    """Bytes of one rank at the end of a backward pass.

    Attributes:
        parameters: the weights that the model computes with.
        gradients: of these.
        states: of the optimizer, with float32 weights where the model's have 16 bits.
        buffers: at stage 2 the whole gradients of the largest bucket, until it is reduced; at stage
            3 the largest unit's whole weights and gradients, those in `reduce_dtype` as well; with
            offload_weights the model's own and the largest unit's whole weights, this one's shards
            twice, and the largest gradient. What an update streams through comes after it.
    """

    parameters: int
    gradients: int
    states: int
    buffers: int

    @property
    def total(self) -> int:
        """Of all parts, which need not be there at one moment."""
        return sum(self)


def predict_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    units: Iterable[nn.Module] | None = None,
    **options: Any,
) -> Memory:
    """What a rank will hold; the arguments are those of shard(), before it.

    Args:
        model: on any device, "meta" too.
        optimizer: AdamW keeps two float32 numbers for a weight, SGD one if it has momentum; those
            of ringcomm.parallel.offload keep nothing here.
        stage: 0 for no sharding, 1, 2 or 3.
        world_size: of the ranks to be.
        rank: one of them; shards differ by an element, at stage 3 by a row.
        units: as shard()'s.
        options: as shard()'s.

    Raises:
        ValueError: there is no such stage or rank.
    """
    chosen = ShardOptions(**options)
    _check(stage, world_size, rank)
    found = list(default_units(model) if units is None else units)
    if chosen.offload_weights:
        return _memory_of_infinity(model, world_size, rank, found, chosen)
    states_of = {
        param: _num_states(optimizer, group)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    if stage == 3:
        return _memory_of_stage3(model, states_of, world_size, rank, found, chosen)
    buckets = _buckets(model, optimizer, stage, chosen)
    return _memory_of_buckets(buckets, states_of, stage, world_size, rank, chosen)


def predict_traffic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    num_backwards: int = 1,
    **options: Any,
) -> int:
    """The bytes that a rank sends in a step over ringcomm, of weights and gradients.

    Exact, uneven shards and stage 3's padding included, and to each other rank a byte for each
    weight, and at stages 1 and 2 for each bucket and one more; at stage 2 in each backward pass,
    too. With offload_weights it is 8 bytes for each trained weight, then and in each pass. With
    clip_grad_norm or loss_scale 8 bytes go to each other rank, and to those of each other
    dimension of the model's mesh.

    Arguments as predict_memory()'s, of which `rank` matters: the one with the longer shard sends
    less of gradients and more of weights. `num_backwards` is the number of backward passes before
    step(): stages 2 and 3 reduce in each, and stage 3 gathers.

    Raises:
        ValueError: there is no such stage or rank.
    """
    chosen = ShardOptions(**options)
    _check(stage, world_size, rank)
    if stage == 0:
        raise ValueError("traffic without sharding is the all_reduce's: stage is 1, 2 or 3")
    grad_itemsize = chosen.grad_dtype.itemsize
    num_trained = sum(len(group["params"]) for group in optimizer.param_groups)
    looks = bytes_over_all_ranks(axes_of(model), 8, world_size) if chosen.looks_first else 0
    total = 0
    if stage == 3:
        itemsize = (chosen.param_dtype or torch.float32).itemsize
        for param in model.parameters():
            grad_bytes = grad_itemsize if param.requires_grad else 0
            if chosen.offload_weights:
                mine = _shard_elems(param.numel(), world_size, rank)
                total += 2 * param.element_size() * (world_size - 1) * mine
                total += grad_bytes * (param.numel() - mine)
            else:  # two gathers, and a gradient's way back, of shards as long as the longest
                rows = _row_elems(param, world_size)
                total += (2 * itemsize + grad_bytes) * (world_size - 1) * rows
        num_facts = 8 * (num_backwards + 1) if chosen.offload_weights else 1
        return num_backwards * total + (world_size - 1) * num_facts * num_trained + looks
    buckets = _buckets(model, optimizer, stage, chosen)
    # Whether a pass begins, which weights have a gradient, and which buckets are to be reduced.
    facts = (world_size - 1) * (1 + sum(1 + len(params) for params in buckets))
    total = looks + facts * (1 + num_backwards if stage == 2 else 1)
    for params in buckets:
        num_elems = sum(param.numel() for param in params)
        mine = _shard_elems(num_elems, world_size, rank)
        # All but the own shard of gradients; the own shard of weights, to all others.
        num_reductions = 1 if stage == 1 else num_backwards
        total += num_reductions * grad_itemsize * (num_elems - mine)
        total += (chosen.param_dtype or params[0].dtype).itemsize * (world_size - 1) * mine
    return total


def _check(stage: int, world_size: int, rank: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is 0, 1, 2 or 3, got {stage!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}")


def _num_states(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int | None:
    """Of an element; None if they are elsewhere, masters too."""
    if is_offloaded(optimizer):
        return None
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return 3 if group.get("amsgrad") else 2


def _shard_elems(num_elems: int, world_size: int, rank: int) -> int:
    begin, end = shard_range(num_elems, world_size, rank)
    return end - begin


def _buckets(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, options: ShardOptions
) -> list[list[nn.Parameter]]:
    return plan_buckets(
        model, optimizer.param_groups, stage, options.bucket_bytes, options.param_dtype
    )


def _memory_of_buckets(
    buckets: list[list[nn.Parameter]],
    states_of: dict[nn.Parameter, int | None],
    stage: int,
    world_size: int,
    rank: int,
    options: ShardOptions,
) -> Memory:
    parameters = gradients = states = buffers = 0
    for params in buckets:
        num_elems = sum(param.numel() for param in params)
        itemsize = (options.param_dtype or params[0].dtype).itemsize
        grad_itemsize = options.grad_dtype.itemsize if stage else itemsize
        mine = _shard_elems(num_elems, world_size, rank) if stage else num_elems
        parameters += itemsize * num_elems
        gradients += grad_itemsize * (mine if stage == 2 else num_elems)
        counts = [states_of[param] for param in params]
        if None not in counts:
            num_masters = 1 if itemsize == 2 and stage else 0
            states += 4 * (max(count or 0 for count in counts) + num_masters) * mine
        buffers = max(buffers, grad_itemsize * num_elems if stage == 2 else 0)
    return Memory(parameters, gradients, states, buffers)


def _memory_of_stage3(
    model: nn.Module,
    states_of: dict[nn.Parameter, int | None],
    world_size: int,
    rank: int,
    units: list[nn.Module],
    options: ShardOptions,
) -> Memory:
    parameters = gradients = states = buffers = 0
    itemsize = (options.param_dtype or torch.float32).itemsize
    grad_itemsize = options.grad_dtype.itemsize
    grad_bytes = itemsize + grad_itemsize if grad_itemsize != itemsize else itemsize
    seen: set[nn.Parameter] = set()
    for unit in [*units_apart(model, units), model]:
        whole = 0
        for param in unit.parameters():
            if param in seen:
                continue
            seen.add(param)
            rows = _row_elems(param, world_size)
            parameters += 4 * rows
            whole += (itemsize + (grad_bytes if param.requires_grad else 0)) * world_size * rows
            if param.requires_grad:
                gradients += 4 * rows
                first = min(param.numel(), rank * rows)
                states += 4 * (states_of.get(param) or 0) * min(rows, param.numel() - first)
        buffers = max(buffers, whole)
    return Memory(parameters, gradients, states, buffers)


def _memory_of_infinity(
    model: nn.Module,
    world_size: int,
    rank: int,
    units: list[nn.Module],
    options: ShardOptions,
) -> Memory:
    resident = gradients = root = buffers = 0
    grad_itemsize = options.grad_dtype.itemsize
    for module, params in params_of_units(model, units):
        whole = shards = largest = 0
        for param in params:
            mine = _shard_elems(param.numel(), world_size, rank)
            whole += param.nbytes
            is_cast = options.grad_dtype != param.dtype
            largest = max(largest, param.nbytes + is_cast * grad_itemsize * param.numel())
            if param.nbytes >= PACKED_BYTES:
                shards += mine * param.element_size()
            else:
                resident += mine * param.element_size()
                gradients += grad_itemsize * mine if param.requires_grad else 0
        if module is model:
            root, whole = whole, 0
        buffers = max(buffers, whole + 2 * shards + largest)
    return Memory(resident, gradients, 0, root + buffers)


def _row_elems(param: nn.Parameter, world_size: int) -> int:
    """The elements of a rank's shard of whole rows, padded to the longest."""
    num_rows = param.shape[0] if param.dim() else 1
    return -(-num_rows // world_size) * (param.numel() // max(1, num_rows))
