"""What sharding leaves to a rank, in bytes kept and bytes sent, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from typing_extensions import Unpack

from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.model_units import default_units, params_of_units
from ringcomm.parallel.sharded_unit import PACKED_BYTES
from ringcomm.parallel.zero.bucket import peak_elems, plan_buckets
from ringcomm.parallel.zero.inner import is_offloaded
from ringcomm.parallel.zero.options import ShardArguments, ShardOptions
from ringcomm.parallel.zero.stage3 import units_apart
from ringcomm.parallel.zero.statistics import statistics_bytes


class Memory(NamedTuple):
    """Bytes of one rank at the end of a backward pass.

    Attributes:
        parameters: the weights that the model computes with.
        gradients: of these.
        states: of the optimizer, with float32 weights where the model's have 16 bits.
        buffers: at stage 2 the whole gradients of the largest bucket, until it is reduced (of
            several where dtypes alternate); at stage 3 the largest unit's whole weights and
            gradients, those in `reduce_dtype` as well; with offload_weights the model's own and the
            largest unit's whole weights, this one's shards twice, and the largest gradient. What
            an update streams through comes after it.
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
    **options: Unpack[ShardArguments],
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
    if chosen.offload_weights:
        return _memory_of_infinity(model, world_size, rank, units, chosen)
    if stage == 3:
        return _memory_of_stage3(model, optimizer, world_size, rank, units, chosen)
    return _memory_of_buckets(model, optimizer, stage, world_size, rank, chosen)


def predict_traffic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    num_backwards: int = 1,
    **options: Unpack[ShardArguments],
) -> int:
    """The bytes that a rank sends in a step over ringcomm, of weights and gradients.

    Exact, uneven shards and stage 3's padding included, and to each other rank a byte for each
    weight, and at stages 1 and 2 for each bucket and one more; at stage 2 in each backward pass,
    too. With offload_weights it is 8 bytes for each trained weight, then and in each pass. With
    clip_grad_norm or loss_scale 32 bytes go to each other rank, and to those of each other
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
    looks = statistics_bytes(model, world_size) if chosen.looks_first else 0
    if chosen.offload_weights:
        total = 0
        for param in model.parameters():
            begin, end = shard_range(param.numel(), world_size, rank)
            mine = end - begin
            gradient = param.numel() - mine if param.requires_grad else 0
            total += param.element_size() * 2 * (world_size - 1) * mine + grad_itemsize * gradient
        num_trained = sum(len(group["params"]) for group in optimizer.param_groups)
        facts = (num_backwards + 1) * 8 * (world_size - 1) * num_trained
        return num_backwards * total + facts + looks
    if stage == 3:
        itemsize = (chosen.param_dtype or torch.float32).itemsize
        # Two gathers, and a gradient's way back.
        parts = (
            (2 * itemsize + (grad_itemsize if p.requires_grad else 0)) * _rows(p, world_size)
            for p in model.parameters()
        )
        num_trained = sum(len(group["params"]) for group in optimizer.param_groups)
        return (world_size - 1) * (num_backwards * sum(parts) + num_trained) + looks
    buckets = _buckets(model, optimizer, stage, chosen)
    # Whether a pass begins, which weights have a gradient, and which buckets are to be reduced.
    facts = (world_size - 1) * (1 + sum(1 + len(params) for params in buckets))
    total = looks + facts * (1 + num_backwards if stage == 2 else 1)
    for params in buckets:
        num_elems = sum(param.numel() for param in params)
        begin, end = shard_range(num_elems, world_size, rank)
        mine = end - begin
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


def _num_states(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    if is_offloaded(optimizer):
        return 0
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return 3 if group.get("amsgrad") else 2


def _states_by_param(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    return {
        param: _num_states(optimizer, group)
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _buckets(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, options: ShardOptions
) -> list[list[nn.Parameter]]:
    return plan_buckets(
        model, optimizer.param_groups, stage, options.bucket_bytes, options.param_dtype
    )


def _memory_of_buckets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    world_size: int,
    rank: int,
    options: ShardOptions,
) -> Memory:
    states_of = _states_by_param(optimizer)
    keeps_states = not is_offloaded(optimizer)
    parameters = gradients = states = 0
    buckets = _buckets(model, optimizer, stage, options)
    for params in buckets:
        num_elems = sum(param.numel() for param in params)
        itemsize = (options.param_dtype or params[0].dtype).itemsize
        begin, end = shard_range(num_elems, world_size, rank)
        mine = num_elems if stage == 0 else end - begin
        num_states = max(states_of[param] for param in params)
        parameters += itemsize * num_elems
        gradients += (options.grad_dtype.itemsize if stage else itemsize) * (
            mine if stage == 2 else num_elems
        )
        if keeps_states:
            states += 4 * (num_states + (1 if itemsize == 2 and stage else 0)) * mine
    buffers = options.grad_dtype.itemsize * peak_elems(model, buckets) if stage == 2 else 0
    return Memory(parameters, gradients, states, buffers)


def _memory_of_stage3(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world_size: int,
    rank: int,
    units: Iterable[nn.Module] | None,
    options: ShardOptions,
) -> Memory:
    states_of = _states_by_param(optimizer)
    parameters = gradients = states = buffers = 0
    itemsize = (options.param_dtype or torch.float32).itemsize
    grad_itemsize = options.grad_dtype.itemsize
    for params in _params_of_units(model, units):
        whole = 0
        for param in params:
            rows = _rows(param, world_size)
            parameters += 4 * rows
            gradient = itemsize + grad_itemsize if grad_itemsize != itemsize else itemsize
            whole += (itemsize + (gradient if param.requires_grad else 0)) * world_size * rows
            if param.requires_grad:
                gradients += 4 * rows
                states += 4 * states_of.get(param, 0) * _own_elems(param, world_size, rank)
        buffers = max(buffers, whole)
    return Memory(parameters, gradients, states, buffers)


def _memory_of_infinity(
    model: nn.Module,
    world_size: int,
    rank: int,
    units: Iterable[nn.Module] | None,
    options: ShardOptions,
) -> Memory:
    resident = gradients = root = buffers = 0
    found = default_units(model) if units is None else units
    for module, params in params_of_units(model, found):
        whole = shards = largest = 0
        for param in params:
            begin, end = shard_range(param.numel(), world_size, rank)
            mine = (end - begin) * param.element_size()
            whole += param.nbytes
            is_cast = options.grad_dtype != param.dtype
            cast_bytes = options.grad_dtype.itemsize * param.numel() if is_cast else 0
            largest = max(largest, param.nbytes + cast_bytes)
            if param.nbytes >= PACKED_BYTES:
                shards += mine
            else:
                resident += mine
                grad_bytes = options.grad_dtype.itemsize * (end - begin)
                gradients += grad_bytes if param.requires_grad else 0
        if module is model:
            root = whole
        buffers = max(buffers, (0 if module is model else whole) + 2 * shards + largest)
    return Memory(resident, gradients, 0, root + buffers)


def _params_of_units(
    model: nn.Module, units: Iterable[nn.Module] | None
) -> Iterator[list[nn.Parameter]]:
    """By unit of fully_shard, the root last."""
    seen: set[nn.Parameter] = set()
    for unit in units_apart(model, default_units(model) if units is None else units):
        params = [param for param in unit.parameters() if param not in seen]
        seen.update(params)
        yield params
    yield [param for param in model.parameters() if param not in seen]


def _rows(param: nn.Parameter, world_size: int) -> int:
    """The elements of a rank's shard of whole rows, padded to the longest."""
    num_rows = param.shape[0] if param.dim() else 1
    return -(-num_rows // world_size) * (param.numel() // max(1, num_rows))


def _own_elems(param: nn.Parameter, world_size: int, rank: int) -> int:
    """Those of a rank without padding."""
    num_rows = param.shape[0] if param.dim() else 1
    longest = -(-num_rows // world_size)
    mine = max(0, min(longest, num_rows - rank * longest))
    return mine * (param.numel() // max(1, num_rows))
