"""The ranks that update whole weights for optimizers that need them, and the exchange of parts."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import place_in

Key = TypeVar("Key")


def balanced(costs: Mapping[Key, float], num_places: int) -> dict[Key, int]:
    """A place for each key: that with the least cost, for the largest first.

    The maximum is at most 4/3 of the optimum (Graham 1969).
    """
    loads, places = [0.0] * num_places, dict[Key, int]()
    for key in sorted(costs, key=costs.__getitem__, reverse=True):
        places[key] = min(range(num_places), key=loads.__getitem__)
        loads[places[key]] += costs[key]
    return places


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
    return balanced(shares, world_size)


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
