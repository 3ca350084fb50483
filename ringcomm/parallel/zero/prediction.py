"""Predicts the memory and traffic of a rank before anything is sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.clip import bytes_over_all_ranks
from ringcomm.parallel.expert.local_experts import LocalExperts, split_experts
from ringcomm.parallel.flat_collectives import place_in
from ringcomm.parallel.model.describe import Model, describe
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.optimizer_classes import (
    needs_whole,
    optimizers_of,
    state_elems,
)
from ringcomm.parallel.shards.sharded_unit import PACKED_BYTES
from ringcomm.parallel.shards.units import fsdp_units, params_of_units
from ringcomm.parallel.zero.bucket import BucketPlan, plan_buckets
from ringcomm.parallel.zero.optimizer import ShardOptions
from ringcomm.parallel.zero.whole import owners_of, rows_of


class Memory(NamedTuple):
    """Bytes of one rank at the end of a backward pass.

    Attributes:
        parameters: the weights that the model computes with.
        gradients: of these.
        states: of the optimizer, with float32 weights where the model's have 16 bits.
        buffers: at stage 2 the unsharded gradients of the largest bucket, until it is reduced; of
            all with sharded experts. At stage 3 the largest unit's gathered weights and gradients,
            including those in `reduce_dtype`. With offload_weights the gathered weights of the
            model itself and of the largest unit, this unit's shards twice, and the largest
            gradient. The buffers of the update come later and are not included.
    """

    parameters: int
    gradients: int
    states: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all parts, which need not exist at the same time."""
        return sum(self)


def predict_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    units: Iterable[nn.Module] | None = None,
    whole: Collection[type] = (),
    **options: Any,
) -> Memory:
    """Predicts the memory of a rank; call it before shard(), with the same arguments.

    The model may be on any device, including "meta". Stage 0 means no sharding. Shards of the
    `world_size` ranks differ by an element, at stage 3 by a row.

    Raises:
        ValueError: there is no such stage or rank.
    """
    ranks = _Ranks(stage, world_size, rank, ShardOptions(**options))
    if ranks.options.offload_weights:
        return _of_infinity(ranks, params_of_units(model, units), model)
    optimizers = optimizers_of(optimizer)
    states = _states_of(optimizers, whole)
    if stage < 3:
        buckets = _planned(model, optimizers, whole, ranks)
        parts = [_of_bucket(ranks, bucket, states) for bucket in buckets]
    else:
        owners = _owners(describe(model), optimizers, whole, ranks)
        parts = [_of_unit(ranks, own, states, owners) for _, own in fsdp_units(model, units)]
    parameters, gradients, kept, buffers = zip(*parts, strict=True)
    # With sharded experts stage 2 reduces at the end of a pass.
    all_at_once = stage == 2 and split_experts(model)
    total = sum(buffers) if all_at_once else max(buffers)
    return Memory(sum(parameters), sum(gradients), sum(kept), total)


def predict_traffic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    num_backwards: int = 1,
    whole: Collection[type] = (),
    **options: Any,
) -> int:
    """Predicts the bytes of weights and gradients that a rank sends in a step with ringcomm.

    The result is exact: it includes uneven shards, stage 3's padding, and the agreement on
    gradients. Arguments are those of predict_memory(); `num_backwards` is the number of backward
    passes before step(): stages 2 and 3 reduce in each, and stage 3 gathers.

    Raises:
        ValueError: there is no such stage or rank.
    """
    chosen = ShardOptions(**options)
    ranks, others = _Ranks(stage, world_size, rank, chosen), world_size - 1
    if stage == 0:
        raise ValueError(
            "stage must be 1, 2 or 3, got 0, which shards nothing and sends what all_reduce sends"
        )
    total = bytes_over_all_ranks(describe(model).axes(), 8, world_size) if chosen.looks_first else 0
    # Whether a step on whole weights has failed; with offload_weights in each of its rounds.
    owners = _owners(describe(model), optimizers_of(optimizer), whole, ranks)
    for each in optimizers_of(optimizer):
        own = [p for group in each.param_groups for p in group["params"] if p in owners]
        num_rounds = max(Counter(map(owners.__getitem__, own)).values(), default=0)
        total += others * (num_rounds if chosen.offload_weights else needs_whole(each, whole))
    if stage < 3:
        buckets = _planned(model, optimizers_of(optimizer), whole, ranks)
        # Whether a pass begins, which weights have a gradient, and which buckets are to be reduced.
        num_shares = 1 + num_backwards if stage == 2 else 1
        of_group: dict[Any, int] = {None: others}
        for bucket in buckets:
            replicas = None if bucket.experts is None else bucket.experts.replica_group
            is_apart = bucket.experts is not None
            key = (replicas,) if is_apart else None
            of_group.setdefault(key, len(bucket.sizes) - 1)
            of_group[key] += (len(bucket.sizes) - 1) * (1 + len(bucket.params))
        total += num_shares * sum(of_group.values())
        for bucket in buckets:
            num_elems, mine = sum(bucket.sizes), bucket.sizes[ranks.place(bucket)]
            others = len(bucket.sizes) - 1
            # Gradients: all but the own shard; weights: the own shard to all others.
            num_reductions = 1 if stage == 1 else num_backwards
            total += num_reductions * ranks.grad_itemsize * (num_elems - mine)
            total += ranks.itemsize(bucket.params[0]) * others * mine
        return total
    num_facts = 8 * (num_backwards + 1) if chosen.offload_weights else 1
    groups = [group for one in optimizers_of(optimizer) for group in one.param_groups]
    total += others * num_facts * sum(len(group["params"]) for group in groups)
    for param in model.parameters():
        grad_bytes = ranks.grad_itemsize if param.requires_grad else 0
        if chosen.offload_weights:
            mine = ranks.shard(param.numel())
            sent = 2 * param.element_size() * others * mine + grad_bytes * (param.numel() - mine)
        else:  # two gathers and one reduction of a gradient, with shards padded to the longest
            sent = (2 * ranks.itemsize(param) + grad_bytes) * others * ranks.rows(param)
        total += num_backwards * sent
    for param, owner in owners.items():
        begin, end = rows_of(param, world_size, rank)
        mine, grad_bytes = (end - begin) * (param.numel() // param.shape[0]), param.element_size()
        if chosen.offload_weights:
            mine, grad_bytes = ranks.shard(param.numel()), ranks.grad_itemsize
        # A weight and its gradient to the owner, and the new weight back.
        sent = mine * grad_bytes if owner != rank else 0
        num_elems = mine if owner != rank else param.numel() - mine
        total += sent + num_elems * param.element_size()
    return total


class _Ranks:
    """A rank's shares of weights; raises ValueError for an invalid stage or rank."""

    def __init__(self, stage: int, world_size: int, rank: int, options: ShardOptions) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self.stage, self.world_size, self.rank, self.options = stage, world_size, rank, options
        self.grad_itemsize = options.grad_dtype.itemsize

    def itemsize(self, param: nn.Parameter) -> int:
        """Bytes of an element that the model computes with."""
        return (self.options.param_dtype or param.dtype).itemsize

    def shard(self, num_elems: int) -> int:
        """The elements of this rank's shard."""
        begin, end = shard_range(num_elems, self.world_size, self.rank)
        return end - begin if self.stage else num_elems

    def place(self, bucket: BucketPlan) -> int:
        """This rank's number among those that share a bucket."""
        return self.rank if bucket.experts is None else place_in(bucket.experts.replica_group)[0]

    def rows(self, param: nn.Parameter) -> int:
        """The elements of a rank's shard of whole rows, padded to the longest."""
        num_rows = param.shape[0] if param.dim() else 1
        return -(-num_rows // self.world_size) * (param.numel() // max(1, num_rows))


def _owners(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    asked: Collection[type],
    ranks: _Ranks,
) -> dict[nn.Parameter, int]:
    whole = [
        param
        for optimizer in optimizers
        if ranks.stage and needs_whole(optimizer, asked)
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    by_experts: dict[LocalExperts | None, list[nn.Parameter]] = {}
    for param in whole:
        by_experts.setdefault(model.weights[param].experts, []).append(param)
    found: dict[nn.Parameter, int] = {}
    for experts, params in by_experts.items():
        num = ranks.world_size if experts is None else place_in(experts.replica_group)[1]
        found |= owners_of(params, num)
    return found


def _planned(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    asked: Collection[type],
    ranks: _Ranks,
) -> list[BucketPlan]:
    groups = [optimizer.param_groups for optimizer in optimizers]
    described = describe(model)
    owners = _owners(described, optimizers, asked, ranks)
    return plan_buckets(described, groups, ranks.stage, ranks.options, owners, ranks.world_size)


def _states_of(
    optimizers: Sequence[torch.optim.Optimizer], asked: Collection[type]
) -> dict[nn.Parameter, int]:
    """The number of elements of states, without those that are offloaded."""
    found: dict[nn.Parameter, int] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, Offloaded):
            continue
        is_whole = needs_whole(optimizer, asked)
        for group in optimizer.param_groups:
            found |= state_elems(optimizer, group, is_whole=is_whole)
    return found


def _of_bucket(ranks: _Ranks, bucket: BucketPlan, states: dict[nn.Parameter, int]) -> Memory:
    params, num_elems = bucket.params, sum(bucket.sizes)
    itemsize = ranks.itemsize(params[0])
    mine = bucket.sizes[ranks.place(bucket)] if ranks.stage else num_elems
    whole = (ranks.grad_itemsize if ranks.stage else itemsize) * num_elems
    of_states = 0
    if params[0] in states:
        num_masters = 1 if itemsize == 2 and ranks.stage else 0
        if not ranks.stage:
            of_states = sum(states[param] for param in params)
        elif bucket.is_whole:
            begin = sum(bucket.sizes[: ranks.place(bucket)])
            ends = accumulate(param.numel() for param in params)
            own = [p for p, end in zip(params, ends, strict=True) if begin < end <= begin + mine]
            of_states = sum(states[param] for param in own)
        else:
            of_states = max(states[param] // max(1, param.numel()) for param in params) * mine
        of_states += num_masters * mine
    return Memory(
        itemsize * num_elems,
        ranks.grad_itemsize * mine if ranks.stage == 2 else whole,
        4 * of_states,
        whole if ranks.stage == 2 else 0,
    )


def _of_unit(
    ranks: _Ranks,
    params: list[nn.Parameter],
    states: dict[nn.Parameter, int],
    owners: dict[nn.Parameter, int],
) -> Memory:
    """The buffers of a fully_shard unit; gradients reduced in another dtype are copied."""
    parameters = gradients = of_states = buffers = 0
    for param in params:
        rows, itemsize = ranks.rows(param), ranks.itemsize(param)
        parameters += 4 * rows
        buffers += itemsize * ranks.world_size * rows
        if param.requires_grad:
            gradients += 4 * rows
            first = min(param.numel(), ranks.rank * rows)
            num_states = states.get(param, 0)
            if param in owners:
                of_states += 4 * num_states * (owners[param] == ranks.rank)
            else:
                mine = min(rows, param.numel() - first)
                of_states += 4 * (num_states // max(1, param.numel())) * mine
            grad_bytes = itemsize + ranks.grad_itemsize * (ranks.grad_itemsize != itemsize)
            buffers += grad_bytes * ranks.world_size * rows
    return Memory(parameters, gradients, of_states, buffers)


def _of_infinity(
    ranks: _Ranks, units: list[tuple[nn.Module, list[nn.Parameter]]], model: nn.Module
) -> Memory:
    resident = gradients = root = buffers = 0
    for module, params in units:
        whole = shards = largest = 0
        for param in params:
            mine = ranks.shard(param.numel())
            whole += param.nbytes
            is_cast = ranks.options.grad_dtype != param.dtype
            largest = max(largest, param.nbytes + is_cast * ranks.grad_itemsize * param.numel())
            if param.nbytes >= PACKED_BYTES:
                shards += mine * param.element_size()
            else:
                resident += mine * param.element_size()
                gradients += ranks.grad_itemsize * mine if param.requires_grad else 0
        if module is model:
            root, whole = whole, 0
        buffers = max(buffers, whole + 2 * shards + largest)
    return Memory(resident, gradients, 0, root + buffers)
