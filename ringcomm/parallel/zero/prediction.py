"""Predicts the memory and traffic of a rank before anything is sharded."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.clip import bytes_over_all_ranks
from ringcomm.parallel.flat_collectives import place_in
from ringcomm.parallel.model.describe import describe
from ringcomm.parallel.model.units import device_of_model, fsdp_units, params_of_units
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.offload.shard_store import MAX_COMING_BYTES
from ringcomm.parallel.offload.sharded_unit import PACKED_BYTES
from ringcomm.parallel.optimizer_classes import optimizers_of, params_in, state_elems
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.parallel.zero.bucket_plan import BucketPlan, plan_buckets
from ringcomm.parallel.zero.inner import NUM_OPTION_BYTES, ShardOptions
from ringcomm.parallel.zero.owners import owners_by_group, rows_of
from ringcomm.parallel.zero.reducer import NUM_FACTS


class Memory(NamedTuple):
    """Bytes of one rank at the end of a backward pass.

    Attributes:
        parameters: the weights that the model computes with.
        gradients: of these. Where a model on an accelerator has an offloaded optimizer at stage 2,
            they are on the host.
        states: of the optimizer, with float32 weights where the model's have 16 bits.
        buffers: temporary memory. At stage 2 the unsharded gradients of the largest bucket, until
            it is reduced; of all with sharded experts. At stage 3 the largest unit's gathered
            weights and gradients, including those in `reduce_dtype`. On an accelerator, the next
            bucket's gradients or the next unit's weights come to them. With offload_weights the
            gathered weights of the model itself and of the largest unit, this unit's shards twice,
            and the largest gradient. On an accelerator these shards are the largest unit's, and
            shards of gradients on their way to the host come to them; the host then has
            `parameters` and `gradients`. The buffers of the update come later and are not included,
            nor is the gradient that autograd computes.
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
    elementwise: Collection[type] = (),
    whole: Collection[type] = (),
    **options: Any,
) -> Memory:
    """Predicts the memory of a rank; call it before shard(), with the same arguments.

    The model may be on any device, including "meta". Stage 0 means no sharding. Shards of the
    `world_size` ranks differ by an element, at stage 3 by a row.

    Raises:
        ValueError: there is no such stage or rank.
    """
    ranks = _Ranks(model, stage, world_size, rank, ShardOptions(**options))
    if ranks.options.offload_weights:
        return _of_infinity(ranks, params_of_units(ranks.model, units), model)
    optimizers = optimizers_of(optimizer)
    wholes = [each for each in optimizers if needs_whole(each, elementwise, whole)]
    states, owners = _states_of(optimizers, wholes), _owners(wholes, ranks)
    if stage < 3:
        buckets = _planned(optimizers, owners, ranks)
        parts = [_of_bucket(ranks, bucket, states, owners) for bucket in buckets]
        coming = [*(part.buffers for part in parts[1:]), 0]
    else:
        of_units = list(fsdp_units(ranks.model, units))
        by_unit = {m: _of_unit(ranks, own, states, owners) for m, own in of_units}
        parts = [
            of._replace(buffers=of.buffers + max((by_unit[m].buffers for m in inside), default=0))
            for unit, of in by_unit.items()
            for inside in [ranks.experts_in(unit, by_unit)]
        ]
        coming = [0, *(_gathered(ranks, own) for _, own in of_units)][:-1]
    parameters, gradients, kept, buffers = zip(*parts, strict=True)
    # With sharded experts stage 2 reduces at the end of a pass.
    all_at_once = stage == 2 and ranks.model.experts
    if device_of_model(model.parameters()).type == "cpu":
        coming = [0 for _ in parts]
    total = sum(buffers) if all_at_once else max(map(add, buffers, coming))
    return Memory(sum(parameters), sum(gradients), sum(kept), total)


def predict_traffic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    stage: int,
    *,
    world_size: int,
    rank: int = 0,
    num_backwards: int = 1,
    elementwise: Collection[type] = (),
    whole: Collection[type] = (),
    **options: Any,
) -> int:
    """Predicts the bytes of weights and gradients that a rank sends in a step with ringcomm.

    The result is exact: it includes uneven shards, stage 3's padding, and the agreement on
    gradients. With offload_weights and optimizers that need full weights, a few bytes are missing
    on ranks with fewer experts than others. Arguments are those of predict_memory();
    `num_backwards` is the number of backward passes before step(): stages 2 and 3 reduce in each,
    and stage 3 gathers.

    Raises:
        ValueError: there is no such stage or rank.
    """
    chosen = ShardOptions(**options)
    ranks, others = _Ranks(model, stage, world_size, rank, chosen), world_size - 1
    if stage == 0:
        raise ValueError(
            "stage must be 1, 2 or 3, got 0, which shards nothing and sends what all_reduce sends"
        )
    optimizers = optimizers_of(optimizer)
    params = [param for one in optimizers for param in params_in(one.param_groups)]
    total = ranks.bytes_of_norm() if chosen.needs_all_gradients else 0
    # Whether a step on full weights has failed; with offload_weights in each of its rounds.
    wholes = [each for each in optimizers if needs_whole(each, elementwise, whole)]
    owners = _owners(wholes, ranks)
    for each in wholes:
        own = [param for param in params_in(each.param_groups) if param in owners]
        num_rounds = max(Counter((ranks.group_of(p), owners[p]) for p in own).values(), default=0)
        total += others * (num_rounds if chosen.offload_weights else 1)
        if num_rounds and chosen.offload_weights and ranks.model.experts:
            total += 4 * others  # the number of rounds
    if stage < 3:
        buckets = _planned(optimizers, owners, ranks)
        # Whether a pass begins, whether gradients were dropped or not, options, which weights have
        # one, and which buckets are to be reduced.
        num_shares = 1 + num_backwards if stage == 2 else 1
        facts = [*params, *(bucket.params[0] for bucket in buckets)]
        total += num_shares * ranks.bytes_of_facts(facts, NUM_FACTS)
        for bucket in buckets:
            place, num_ranks = ranks.place(bucket.params[0])
            num_elems, mine = sum(bucket.sizes), bucket.sizes[place]
            # Gradients: all but the own shard; weights: the own shard to all others.
            num_reductions = 1 if stage == 1 else num_backwards
            total += num_reductions * ranks.grad_itemsize * (num_elems - mine)
            total += ranks.itemsize(bucket.params[0]) * (num_ranks - 1) * mine
        return total
    if chosen.offload_weights:
        num_compared = (num_backwards + 1) * sum(ranks.place(param)[1] - 1 for param in params)
        total += 8 * num_compared + (1 + NUM_OPTION_BYTES) * others
    else:
        total += ranks.bytes_of_facts(params, 1 + NUM_OPTION_BYTES)
    for param in model.parameters():
        grad_bytes = ranks.grad_itemsize if param.requires_grad else 0
        num_others = ranks.place(param)[1] - 1
        if chosen.offload_weights:
            mine = ranks.shard(param)
            weights = 2 * param.element_size() * num_others * mine
            sent = weights + grad_bytes * (param.numel() - mine)
        else:  # two gathers and one reduction of a gradient, with shards padded to the longest
            sent = (2 * ranks.itemsize(param) + grad_bytes) * num_others * ranks.rows(param)
        total += num_backwards * sent
    for param, owner in owners.items():
        place, num_ranks = ranks.place(param)
        begin, end = rows_of(param, num_ranks, place)
        mine, grad_bytes = (end - begin) * (param.numel() // param.shape[0]), param.element_size()
        if chosen.offload_weights:
            mine, grad_bytes = ranks.shard(param), ranks.grad_itemsize
        # A weight and its gradient to the owner, and the new weight back.
        sent = mine * grad_bytes if owner != place else 0
        num_elems = mine if owner != place else param.numel() - mine
        total += sent + num_elems * param.element_size()
    return total


class _Ranks:
    """A rank's shares of weights; raises ValueError for an invalid stage or rank.

    It has the methods of the group of all data ranks, which may not be there yet.
    """

    def __init__(
        self, model: nn.Module, stage: int, world_size: int, rank: int, options: ShardOptions
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self.model, self.stage, self.options = describe(model), stage, options
        self.grad_itemsize = options.grad_dtype.itemsize
        self.size, self.rank = (lambda: world_size), (lambda: rank)

    def group_of(self, param: nn.Parameter) -> Any:
        """The ranks that share a weight; None if this one is alone."""
        everyone: Any = self
        return self.model.weights[param].data_group(everyone)

    def place(self, param: nn.Parameter) -> tuple[int, int]:
        """This rank's number among those that share a weight, and their number."""
        return place_in(self.group_of(param))

    def experts_in(self, unit: nn.Module, units: Collection[nn.Module]) -> set[nn.Module]:
        """The sharded experts that a unit runs, which are other units."""
        found: set[nn.Module] = {*self.model.experts.values()}
        return found.intersection(unit.modules(), units) - {unit}

    def itemsize(self, param: nn.Parameter) -> int:
        return (self.options.param_dtype or param.dtype).itemsize

    def shard(self, param: nn.Parameter) -> int:
        place, num_ranks = self.place(param)
        begin, end = shard_range(param.numel(), num_ranks, place)
        return end - begin if self.stage else param.numel()

    def rows(self, param: nn.Parameter) -> int:
        """The elements of a rank's shard of whole rows, padded to the longest."""
        num_rows = param.shape[0] if param.dim() else 1
        return -(-num_rows // self.place(param)[1]) * (param.numel() // max(1, num_rows))

    def bytes_of_facts(self, params: Iterable[nn.Parameter], num_others: int = 1) -> int:
        """Sent in an agreement of a byte for each parameter, and some for each group of ranks."""
        num_facts: Any = Counter([self, *map(self.group_of, params)])
        num_facts += Counter({of: num_others - (of is self) for of in num_facts})
        return sum(num * (place_in(group)[1] - 1) for group, num in num_facts.items())

    def bytes_of_norm(self) -> int:
        axes = self.model.axes()
        groups = {param: self.group_of(param) for param in axes.shardings}
        if dist.is_initialized() and dist.get_world_size() == self.size():
            world: Any = dist.group.WORLD  # which may be the group of experts
            groups = {p: world if group is self else group for p, group in groups.items()}
        return bytes_over_all_ranks(axes.sharded_over(groups), 8)


def _owners(wholes: Sequence[torch.optim.Optimizer], ranks: _Ranks) -> dict[nn.Parameter, int]:
    """Of weights of these optimizers, which need full ones."""
    params = [param for each in wholes for param in params_in(each.param_groups)]
    return owners_by_group(params, ranks.group_of) if ranks.stage else {}


def _planned(
    optimizers: Sequence[torch.optim.Optimizer], owners: Mapping[nn.Parameter, int], ranks: _Ranks
) -> list[BucketPlan]:
    groups = [optimizer.param_groups for optimizer in optimizers]
    return plan_buckets(ranks.model, groups, ranks.stage, ranks.options, owners, ranks.size())


def _states_of(
    optimizers: Sequence[torch.optim.Optimizer], wholes: Sequence[torch.optim.Optimizer]
) -> dict[nn.Parameter, int]:
    """The number of elements of states, without those that are offloaded."""
    found: dict[nn.Parameter, int] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, Offloaded):
            continue
        for group in optimizer.param_groups:
            found |= state_elems(optimizer, group, is_whole=optimizer in wholes)
    return found


def _of_bucket(
    ranks: _Ranks,
    bucket: BucketPlan,
    states: Mapping[nn.Parameter, int],
    owners: Mapping[nn.Parameter, int],
) -> Memory:
    params, num_elems = bucket.params, sum(bucket.sizes)
    itemsize = ranks.itemsize(params[0])
    place, _ = ranks.place(params[0])
    mine = bucket.sizes[place] if ranks.stage else num_elems
    whole = (ranks.grad_itemsize if ranks.stage else itemsize) * num_elems
    of_states = 0
    if params[0] in states:
        num_masters = 1 if itemsize == 2 and ranks.stage else 0
        if not ranks.stage:
            of_states = sum(states[param] for param in params)
        elif bucket.is_whole:
            of_states = sum(states[param] for param in params if owners[param] == place)
        else:
            of_states = max(states[param] // max(1, param.numel()) for param in params) * mine
        of_states += num_masters * mine
    return Memory(
        itemsize * num_elems,
        ranks.grad_itemsize * mine if ranks.stage == 2 else whole,
        4 * of_states,
        whole if ranks.stage == 2 else 0,
    )


def _gathered(ranks: _Ranks, params: Iterable[nn.Parameter]) -> int:
    return sum(ranks.itemsize(p) * ranks.place(p)[1] * ranks.rows(p) for p in params)


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
        place, num_ranks = ranks.place(param)
        parameters += 4 * rows
        buffers += itemsize * num_ranks * rows
        if param.requires_grad:
            gradients += 4 * rows
            first = min(param.numel(), place * rows)
            num_states = states.get(param, 0)
            if param in owners:
                of_states += 4 * num_states * (owners[param] == place)
            else:
                mine = min(rows, param.numel() - first)
                of_states += 4 * (num_states // max(1, param.numel())) * mine
            grad_bytes = itemsize + ranks.grad_itemsize * (ranks.grad_itemsize != itemsize)
            buffers += grad_bytes * num_ranks * rows
    return Memory(parameters, gradients, of_states, buffers)


def _of_infinity(
    ranks: _Ranks, units: list[tuple[nn.Module, list[nn.Parameter]]], model: nn.Module
) -> Memory:
    resident = gradients = coming = largest_grad = upload = 0
    is_on_device = device_of_model(model.parameters()).type != "cpu"
    wholes, extras = dict[nn.Module, int](), dict[nn.Module, int]()  # gathered, and besides
    for module, params in units:
        shards = largest = packed = 0
        for param in params:
            mine = ranks.shard(param)
            is_cast = ranks.options.grad_dtype != param.dtype
            largest = max(largest, param.nbytes + is_cast * ranks.grad_itemsize * param.numel())
            grad = ranks.grad_itemsize * mine if param.requires_grad else 0
            coming, largest_grad = coming + grad, max(largest_grad, grad)
            if param.nbytes >= PACKED_BYTES:
                shards += mine * param.element_size()
            else:
                packed += mine * param.element_size()
                gradients += grad
        resident, upload = resident + packed, max(upload, shards + packed)
        wholes[module] = sum(param.nbytes for param in params)
        extras[module] = largest + (0 if is_on_device else 2 * shards)
    peaks = []
    for module, extra in extras.items():
        inside = ranks.experts_in(module, extras)
        most = max([extra, *(wholes[m] + extras[m] for m in inside)])
        peaks.append((module is not model) * wholes[module] + most)
    buffers = wholes.get(model, 0) + max(peaks)
    if is_on_device:
        buffers += 2 * upload + min(coming, max(largest_grad, MAX_COMING_BYTES))
    return Memory(resident, gradients, 0, buffers)
