"""The classes that zero.shard() was given, and their steps on parts of weights, or by owners."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import device_of, place_in
from ringcomm.parallel.gradient_placeholder import largest_of
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import Tier
from ringcomm.parallel.optimizer_classes import (
    of_parts,
    options_of,
    params_in,
    run_on_parts,
    take_options,
)
from ringcomm.parallel.zero.states import States

Grads = Mapping[Any, Tensor | None]  # by weight


class Inner(NamedTuple):
    """One of the optimizers that zero.shard() was given.

    Attributes:
        optimizer: the given object, or a copy of it without groups, which steps on parts.
        groups: its parameter groups, which are those of the returned optimizer.
        is_whole: whether each of its weights is updated as a whole, by one rank.
        takes_empty: whether it can step where it has no weights, which may count a group's steps.
        before: in a step of several calls, the options of the groups at its beginning.
    """

    optimizer: Any
    groups: list[dict[str, Any]]
    is_whole: bool
    takes_empty: bool
    before: list[dict[str, Any]] | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether its states are in a tier."""
        return isinstance(self.optimizer, Offloaded)

    @property
    def plain(self) -> Any:
        """The optimizer of the class that updates weights, which an Offloaded one contains."""
        return getattr(self.optimizer, "inner", self.optimizer)


class Parts(Operands):
    """Operands of offloaded optimizers: parts of weights and their gradients, during a step."""

    def __init__(self) -> None:
        self.shapes: dict[Any, torch.Size] = {}
        self.of: dict[Any, tuple[Tensor, Tensor | None]] = {}

    def shape(self, param: Any) -> torch.Size:
        """See Operands."""
        return self.shapes[param]

    def get(self, param: Any) -> tuple[Tensor, Tensor | None]:
        """See Operands."""
        return self.of[param]


class InnerSteps(States):
    """Steps of the given classes on this rank's parts of weights."""

    _parts: Parts

    def _place_offloaded(self, tier: Tier | None = None) -> None:
        """Makes the offloaded optimizers over the tensors `_own`."""
        first = 0
        for i, inner in enumerate(self._inners):
            if inner.is_offloaded:
                groups = [{**g, "params": [*map(self._own.get, g["params"])]} for g in inner.groups]
                made = inner.optimizer.over(groups, self._operands_of(inner), tier, first)
                self._inners[i] = inner._replace(optimizer=made)
            first += len(params_in(inner.groups))
        vars(self).pop("_inner_by_param", None)

    def _operands_of(self, inner: Inner) -> Operands:
        """Where an offloaded optimizer finds weights and gradients."""
        self._parts.shapes |= {p: self._part_of(p).shape for p in params_in(inner.groups)}
        return self._parts

    def _step_inner(self, grads: Grads, factor: float) -> None:
        """Steps of the given classes on parts of weights, by their gradients times a factor."""
        self._run_inners("step", grads, factor)
        whole = {param for param in grads if self._inner_by_param[param].is_whole}
        self.share_keys(whole - self._told)
        self._told |= whole

    def _run_inners(self, method: str, grads: Grads, factor: float = 1.0) -> None:
        """Calls a method of the given classes that have it, on parts of weights."""
        for inner in self._inners:
            own = {param: grads[param] for param in params_in(inner.groups) if param in grads}
            if not hasattr(inner.plain, method):
                continue
            if inner.is_whole:
                self._run_whole(inner, method, own, factor)
            elif own or inner.takes_empty:
                self._run_parts(inner, method, own, factor)

    def _run_parts(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        """As _run_one(), on this rank's parts."""
        self._run_one(inner, method, {p: self._part_of(p) for p in grads}, grads, factor)

    def _run_whole(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        """As _run_one(), on weights that their owners gather, in rounds. Collective."""
        inner = inner._replace(before=[options_of(group) for group in inner.groups])
        for of_groups in self._rounds(grads):
            mine: dict[Owners, dict[Any, Tensor]] = {}
            wholes, whole_grads = dict[Any, Tensor](), dict[Any, Tensor]()
            for owners, params in zip(self._owners.values(), of_groups, strict=False):
                if params:
                    mine[owners], own_grads = self._read(inner, params, grads)
                    wholes |= owners.gathered(mine[owners])
                    whole_grads |= owners.gathered(own_grads) if own_grads else {}
            self._run_owned(inner, method, wholes, dict.fromkeys(wholes) | whole_grads, factor)
            for owners, parts in mine.items():
                owners.spread(parts, {p: wholes[p] for p in parts if p in wholes})
                self._write(parts)
            inner = inner._replace(takes_empty=False)

    def _rounds(self, grads: Collection[Any]) -> list[Any]:
        """The weights that are gathered together, by group, in the order of `_owners`."""
        return [[[p for p in grads if self.group_of(p) is group] for group in self._owners]]

    def _read(
        self, inner: Inner, params: Iterable[Any], grads: Grads
    ) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """This rank's parts of weights, and of the gradients that there are."""
        found = {p: grad for p in params if (grad := grads[p]) is not None}
        return {param: self._part_of(param) for param in params}, found

    def _write(self, parts: Mapping[Any, Tensor]) -> None:
        """Takes the new values of what _read() has returned."""

    def _run_owned(
        self, inner: Inner, method: str, parts: dict[Any, Tensor], grads: Grads, factor: float
    ) -> None:
        """As _run_one() on the weights that this rank owns. Collective.

        Raises on all ranks what one raises: the others would wait for its weights.
        """
        failure: Exception | None = None
        try:
            if parts or inner.takes_empty:
                self._run_one(inner, method, parts, grads, factor)
        except Exception as error:
            failure = error
        device = device_of(self.group)
        has_failed = largest_of([failure is not None], [self.group], device, torch.uint8)
        if failure is not None:
            raise failure
        if has_failed[0]:
            raise RuntimeError(
                f"{method}() of {type(inner.optimizer).__name__} has raised an error on another"
                " rank, which owns the weight. Restart from a checkpoint: other weights may already"
                " be updated"
            )

    def _run_one(
        self, given: Inner, method: str, parts: dict[Any, Tensor], grads: Grads, factor: float
    ) -> None:
        if given.is_offloaded:
            self._parts.of = {self._own[p]: (part, grads[p]) for p, part in parts.items()}
            self._run_offloaded(given, method, parts, factor)
            self._parts.of = {}
            return
        groups = [g for g in given.groups if given.takes_empty or of_parts(g, parts)["params"]]
        states = {
            param: {key: x for key, x in self._states.get(param, {}).items() if key != "master"}
            for param in parts
        }
        own = given.optimizer, method, groups, parts, grads, factor, states
        states, called = run_on_parts(*own)
        self._states.update(states)
        for group, after in zip(groups, called, strict=True):
            take_options(group, after)

    def _run_offloaded(
        self, given: Inner, method: str, params: Iterable[Any], factor: float
    ) -> None:
        inner = given.optimizer
        for own, group in zip(inner.param_groups, given.groups, strict=True):
            take_options(own, group)
        inner.run(method, [self._own[param] for param in params], factor, given.before)
        for own, group in zip(inner.param_groups, given.groups, strict=True):
            take_options(group, own)

    def _set_mode(self, mode: str) -> None:
        """Calls train() or eval() of the given classes that have it, once. Collective."""
        if mode == self._mode or not any(hasattr(x.plain, mode) for x in self._inners):
            return
        self._mode = mode  # Trainer calls train() for each micro-batch
        with torch.no_grad():
            self._change_mode(mode)

    def _change_mode(self, mode: str) -> None:
        self._run_inners(mode, dict.fromkeys(self.all_params()))

    def inner_of(self, param: Any) -> Any:
        """The optimizer, of the given class, that updates a weight."""
        return self._inner_by_param[param].plain

    @cached_property
    def _inner_by_param(self) -> dict[Any, Inner]:
        return {param: inner for inner in self._inners for param in params_in(inner.groups)}

    # ---- the ranks that share weights, and those that own them

    def _share_out(self, group_of: dict[Any, Any]) -> None:
        """Takes the ranks that share each weight; chooses the owners of weights that need one."""
        self._group_of = group_of
        whole = [param for param, inner in self._inner_by_param.items() if inner.is_whole]
        self._owner_of = owners_by_group(whole, group_of.__getitem__)

    @cached_property
    def _groups(self) -> list[Any]:
        """The groups that share weights, that of all ranks last; experts may have others."""
        found = dict.fromkeys(map(self.group_of, self.all_params()))
        return [*(group for group in found if group is not self.group), self.group]

    @cached_property
    def _owners(self) -> "dict[Any, Owners]":
        """By group, for those that have parts of all weights."""
        by_group: dict[Any, dict[Any, int]] = {group: {} for group in self._groups}
        for param, rank in self._owner_of.items():
            by_group[self.group_of(param)][param] = rank
        return {group: Owners(own, group, self.range_of) for group, own in by_group.items()}


def owners_of(params: Iterable[nn.Parameter], world_size: int) -> dict[nn.Parameter, int]:
    """The rank that updates each weight, the same on all ranks.

    Balanced by cost and by bytes together. The cost is that of a product of a matrix with its own
    transpose, min(m, n) * m * n, as in Newton-Schulz iterations and preconditioners.
    """
    costs = dict[nn.Parameter, int]()
    for param in params:
        if param.numel():
            num_rows = param.shape[0] if param.dim() > 1 else 1
            costs[param] = min(num_rows, param.numel() // num_rows) * param.numel()
    total, num_elems = sum(costs.values()) or 1, sum(param.numel() for param in costs) or 1
    shares = {param: cost / total + param.numel() / num_elems for param, cost in costs.items()}
    loads, owners = [0.0] * world_size, {}
    for param in sorted(shares, key=shares.__getitem__, reverse=True):
        owners[param] = min(range(world_size), key=loads.__getitem__)
        loads[owners[param]] += shares[param]
    return owners


def owners_by_group(
    params: Iterable[nn.Parameter], group_of: Callable[[Any], Any]
) -> dict[nn.Parameter, int]:
    """The rank that updates each weight, among those of its group; see owners_of()."""
    by_group: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        by_group.setdefault(group_of(param), []).append(param)
    found: dict[nn.Parameter, int] = {}
    for group, own in by_group.items():
        found |= owners_of(own, place_in(group)[1])
    return found


def rows_of(param: Tensor, num_shards: int, shard: int) -> tuple[int, int]:
    """The rows [begin, end) of a shard, as fully_shard cuts them."""
    per_shard = -(-param.shape[0] // num_shards)
    begin, end = (min(param.shape[0], edge * per_shard) for edge in (shard, shard + 1))
    return begin, end


class Owners:
    """Weights of which each rank has a range of elements, and the ranks that update them whole.

    With fully_shard the ranges are rows. On a mesh of two dimensions, replicas and shards, each
    rank owns some: the shards of its own replica send it rows, and it sends the new ones to all.
    """

    def __init__(
        self,
        ranks: Mapping[Any, int],
        group: dist.ProcessGroup,
        range_of: Callable[[Any, int], tuple[int, int]],
    ) -> None:
        """`ranks`: the owner of each weight. They have ranges, or are DTensors on one mesh."""
        self.ranks, self._group, self._range_of = ranks, group, range_of
        # Of each rank: its replica and shard.
        self._num_shards, self._places = group.size(), [(0, rank) for rank in range(group.size())]
        first = next(iter(ranks), None)
        if isinstance(first, DTensor):
            grid = first.device_mesh.mesh
            self._num_shards = grid.shape[-1]
            places = {
                rank: divmod(i, self._num_shards) for i, rank in enumerate(grid.flatten().tolist())
            }
            self._places = [places[rank] for rank in dist.get_process_group_ranks(group)]

    def rounds(self, params: Collection[Any]) -> list[list[Any]]:
        """The weights in rounds with at most one of each owner, heaviest first."""
        by_rank: dict[int, list[Any]] = {}
        for param, owner in self.ranks.items():
            if param in params:
                by_rank.setdefault(owner, []).append(param)
        rounds = zip_longest(*by_rank.values())
        return [[param for param in found if param is not None] for found in rounds]

    def gathered(self, parts: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Of weights, or others of their shape, those that this rank owns, whole. Collective.

        `parts` has this rank's elements, in the same order on all ranks.
        """
        me, everyone = self._group.rank(), range(self._group.size())
        replica = self._places[me][0]
        near = [rank for rank in everyone if self._places[rank][0] == replica]
        own = [param for param in parts if self.ranks[param] == me]
        sent = [
            [part.reshape(-1) for param, part in parts.items() if self.ranks[param] == to]
            if to in near
            else []
            for to in everyone
        ]
        sizes = [[self._size(param, rank) for param in own] for rank in everyone]
        received = [sizes[rank] if rank in near else [] for rank in everyone]
        found = self._exchange(sent, received, parts)
        pieces = [found[rank] for rank in sorted(near, key=self._places.__getitem__)]
        return {
            param: torch.cat([of_rank[i] for of_rank in pieces]).view(param.shape).to(like.dtype)
            for i, (param, like) in enumerate((param, parts[param]) for param in own)
        }

    def spread(self, parts: Mapping[Any, Tensor], wholes: Mapping[Any, Tensor]) -> None:
        """Writes this rank's elements of weights from their owners' `wholes`. Collective."""
        everyone = range(self._group.size())
        sent = [
            [whole.view(-1)[slice(*self._range(param, rank))] for param, whole in wholes.items()]
            for rank in everyone
        ]
        from_rank = [[param for param in parts if self.ranks[param] == r] for r in everyone]
        me = self._group.rank()
        sizes = [[self._size(param, me) for param in owned] for owned in from_rank]
        found = self._exchange(sent, sizes, parts)
        for owned, values in zip(from_rank, found, strict=True):
            for param, value in zip(owned, values, strict=True):
                parts[param].copy_(value.view(parts[param].shape))

    def _range(self, param: Any, rank: int) -> tuple[int, int]:
        """A rank's elements [begin, end)."""
        if not isinstance(param, DTensor):
            return self._range_of(param, rank)
        begin, end = rows_of(param, self._num_shards, self._places[rank][1])
        num_columns = param.numel() // param.shape[0]
        return begin * num_columns, end * num_columns

    def _size(self, param: Any, rank: int) -> int:
        begin, end = self._range(param, rank)
        return end - begin

    def _exchange(
        self, sent: list[list[Tensor]], sizes: list[list[int]], like: Mapping[Any, Tensor]
    ) -> list[list[Tensor]]:
        """What each rank sends to this one, in parts of the given sizes; in a dtype for all."""
        device = next(iter(like.values())).device
        dtype = reduce(torch.promote_types, {part.dtype for part in like.values()})
        nothing = torch.empty(0, dtype=dtype, device=device)
        flat = torch.cat([nothing, *(part.to(dtype) for to_rank in sent for part in to_rank)])
        totals = [sum(of_rank) for of_rank in sizes]
        output = flat.new_empty(sum(totals))
        sent_totals = [sum(part.numel() for part in to_rank) for to_rank in sent]
        dist.all_to_all_single(output, flat, totals, sent_totals, group=self._group)
        return [
            [*of_rank.split(own)] if own else []
            for of_rank, own in zip(output.split(totals), sizes, strict=True)
        ]
