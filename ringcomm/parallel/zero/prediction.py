"""What sharding leaves to a rank, in bytes kept and bytes sent, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from typing_extensions import Unpack

from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.model_units import default_units, params_of_units
from ringcomm.parallel.offload.tiled_linear import tiles_of
from ringcomm.parallel.sharded_unit import PACKED_BYTES
from ringcomm.parallel.zero.bucket import cut_into_buckets
from ringcomm.parallel.zero.inner import is_offloaded
from ringcomm.parallel.zero.options import ShardArguments, ShardOptions
from ringcomm.parallel.zero.stage3 import units_apart


class Memory(NamedTuple):
    """Bytes of one rank at the end of a backward pass.

    Attributes:
        parameters: the weights that the model computes with.
        gradients: of these.
        states: of the optimizer, with float32 weights where the model's have 16 bits.
        buffers: at stage 2 the largest bucket's whole gradients while it is reduced, at stage 3 the
            largest unit's whole weights and gradients; with offload_weights the model's own and the
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
        return _memory_of_infinity(model, world_size, rank, units)
    if stage == 3:
        return _memory_of_stage3(model, optimizer, world_size, rank, units, chosen)
    keeps_states = not is_offloaded(optimizer)
    parameters = gradients = states = buffers = 0
    for group in optimizer.param_groups:
        per_state = 4 * _num_states(optimizer, group)
        for params in cut_into_buckets(group["params"], chosen.bucket_bytes, chosen.param_dtype):
            num_elems = sum(param.numel() for param in params)
            itemsize = (chosen.param_dtype or params[0].dtype).itemsize
            begin, end = shard_range(num_elems, world_size, rank)
            mine = num_elems if stage == 0 else end - begin
            parameters += itemsize * num_elems
            gradients += itemsize * (mine if stage == 2 else num_elems)
            if keeps_states:
                states += (per_state + (4 if itemsize == 2 and stage else 0)) * mine
            if stage == 2:
                buffers = max(buffers, itemsize * num_elems)
    return Memory(parameters, gradients, states, buffers)


def predict_traffic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    **options: Unpack[ShardArguments],
) -> int:
    """The bytes that a rank sends in a step over ringcomm, of weights and gradients.

    Exact, uneven shards and stage 3's padding included; clip_grad_norm and loss_scale add their two
    all_reduces of 24 and 4 bytes. Arguments as predict_memory()'s, of which `rank` matters: the one
    with the longer shard sends less of gradients and more of weights.

    Raises:
        ValueError: there is no such stage or rank.
    """
    chosen = ShardOptions(**options)
    _check(stage, world_size, rank)
    if stage == 0:
        raise ValueError("traffic without sharding is the all_reduce's: stage is 1, 2 or 3")
    if chosen.offload_weights:
        total = 0
        for param in model.parameters():
            begin, end = shard_range(param.numel(), world_size, rank)
            mine = end - begin
            gradient = param.numel() - mine if param.requires_grad else 0
            total += param.element_size() * (2 * (world_size - 1) * mine + gradient)
        return total
    if stage == 3:
        itemsize = (chosen.param_dtype or torch.float32).itemsize
        # Two gathers, and a gradient's way back.
        num_parts = (
            (3 if p.requires_grad else 2) * _rows(p, world_size) for p in model.parameters()
        )
        return itemsize * (world_size - 1) * sum(num_parts)
    total = 0
    for group in optimizer.param_groups:
        for params in cut_into_buckets(group["params"], chosen.bucket_bytes, chosen.param_dtype):
            num_elems = sum(param.numel() for param in params)
            begin, end = shard_range(num_elems, world_size, rank)
            mine = end - begin
            itemsize = (chosen.param_dtype or params[0].dtype).itemsize
            # All but the own shard of gradients; the own shard of weights, to all others.
            total += itemsize * (num_elems - mine + (world_size - 1) * mine)
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


def _memory_of_stage3(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world_size: int,
    rank: int,
    units: Iterable[nn.Module] | None,
    options: ShardOptions,
) -> Memory:
    states_of = {
        param: _num_states(optimizer, group)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    parameters = gradients = states = buffers = 0
    itemsize = (options.param_dtype or torch.float32).itemsize
    for params in _params_of_units(model, units):
        whole = 0
        for param in params:
            rows = _rows(param, world_size)
            parameters += 4 * rows
            whole += itemsize * world_size * rows * (2 if param.requires_grad else 1)
            if param.requires_grad:
                gradients += 4 * rows
                states += 4 * states_of.get(param, 0) * _own_elems(param, world_size, rank)
        buffers = max(buffers, whole)
    return Memory(parameters, gradients, states, buffers)


def _memory_of_infinity(
    model: nn.Module, world_size: int, rank: int, units: Iterable[nn.Module] | None
) -> Memory:
    resident = gradients = root = buffers = 0
    found = list(default_units(model) if units is None else units)
    for module, params in params_of_units(model, [*found, *tiles_of(model)]):
        whole = shards = largest = 0
        for param in params:
            begin, end = shard_range(param.numel(), world_size, rank)
            mine = (end - begin) * param.element_size()
            whole += param.nbytes
            largest = max(largest, param.nbytes)
            if param.nbytes >= PACKED_BYTES:
                shards += mine
            else:
                resident += mine
                gradients += mine if param.requires_grad else 0
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
