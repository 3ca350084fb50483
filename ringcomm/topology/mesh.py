"""Rings in a mesh: as many directed Hamiltonian cycles as the lanes allow.

That is a hard problem in general and an easy one for the handful of GPUs that are ever wired
directly to each other. The search is depth-first with backtracking over whole sets of rings, in a
fixed order and within a budget of steps, so it is deterministic and ends.

In a mesh whose cables work both ways every ring also runs backwards. Pairs of opposite rings are
tried first: half the depth, and wirings are made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Packing", "PathSearch", "pack_rings"]

Order = tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Rings that share no lane.

    Attributes:
        rings: the orders, each beginning with 0.
        is_maximum: more were shown to be impossible, or as many as asked for were found.
    """

    rings: tuple[Order, ...]
    is_maximum: bool


class PathSearch:
    """Walks through lanes that are taken and given back.

    Args:
        lanes: lanes[i][j] is the number of free lanes from i to j; changed while searching.
        budget: how many steps the searches may take together.
    """

    def __init__(self, lanes: Sequence[Sequence[int]], budget: int) -> None:
        self.lanes = [list(row) for row in lanes]
        self.size = len(lanes)
        self.budget = budget
        # A step looks at every node once.
        self._step_cost = max(1, self.size // 8)
        # Bit j of _out[i], and bit i of _into[j]: a lane from i to j is free.
        self._out = [_bits(row) for row in self.lanes]
        self._into = [_bits(column) for column in zip(*self.lanes, strict=True)]

    def _take(self, i: int, j: int, amount: int, mirrored: bool) -> None:
        """Takes free lanes, or gives them back where the amount is negative."""
        for a, b in ((i, j), (j, i)) if mirrored else ((i, j),):
            self.lanes[a][b] -= amount
            if self.lanes[a][b] > 0:
                self._out[a] |= 1 << b
                self._into[b] |= 1 << a
            else:
                self._out[a] &= ~(1 << b)
                self._into[b] &= ~(1 << a)

    def _candidates(self, i: int, visited: int) -> list[int]:
        """Where to go next, in the order to try: to those with the fewest ways on (Warnsdorff)."""
        row, open_ = self.lanes[i], ~visited
        return sorted(
            (j for j in range(self.size) if self._out[i] & open_ & 1 << j),
            key=lambda j: ((self._out[j] & open_).bit_count(), -row[j], (j - i) % self.size),
        )

    def _is_stuck(self, current: int, visited: int, end: int) -> bool:
        """Whether an unvisited node cannot be entered, or cannot be left, any more."""
        unvisited = ((1 << self.size) - 1) & ~visited
        before, after = unvisited | 1 << current, unvisited | 1 << end
        return any(
            unvisited >> v & 1
            and not (self._into[v] & before and (v == end or self._out[v] & after))
            for v in range(self.size)
        )

    def paths(
        self, start: int, end: int, *, mirrored: bool = False, min_second: int = 0
    ) -> Iterator[Order]:
        """Yields orders through all nodes from start to end; a closed ring where they are equal.

        The lanes of an order stay taken while it is yielded, and for good when the caller stops
        asking. Ends early when the budget is spent.

        Args:
            start: first node.
            end: last node, or start for a ring; 2 nodes at least.
            mirrored: take the lanes of the opposite direction too.
            min_second: skip orders whose second node is smaller, to see sets of rings once.
        """
        order, visited = [start], 1 << start
        choices = [iter([j for j in self._candidates(start, visited) if j >= min_second])]
        while choices and self.budget > 0:
            node = next(choices[-1], None)
            last = order[-1]
            if node is None:
                choices.pop()
                order.pop()
                visited &= ~(1 << last)
                if order:
                    self._take(order[-1], last, -1, mirrored)
                continue
            is_full = len(order) == self.size - 1
            if node == end and not is_full:
                continue
            self.budget -= self._step_cost
            self._take(last, node, 1, mirrored)
            if is_full:
                if end != start:
                    if node == end:
                        yield (*order, node)
                elif self.lanes[node][start] > 0 and not (mirrored and order[1] > node):
                    self._take(node, start, 1, mirrored)
                    yield (*order, node)
                    self._take(node, start, -1, mirrored)
                self._take(last, node, -1, mirrored)
                continue
            order.append(node)
            visited |= 1 << node
            stuck = self._is_stuck(node, visited, end)
            choices.append(iter([] if stuck else self._candidates(node, visited)))

    def _can_hold(self, num_rings: int, mirrored: bool) -> bool:
        needed = 2 * num_rings if mirrored else num_rings
        return all(
            sum(self.lanes[v]) >= needed and sum(row[v] for row in self.lanes) >= needed
            for v in range(self.size)
        )

    def pack(self, num_rings: int, mirrored: bool) -> list[Order] | None:
        """Finds that many rings, or pairs of opposite rings, or None.

        None proves that there are none if there is budget left.
        """
        if not self._can_hold(num_rings, mirrored):
            return None
        rings: list[Order] = []
        searches = [self.paths(0, 0, mirrored=mirrored)]
        while searches:
            ring = next(searches[-1], None)
            if ring is None:
                searches.pop()
                if rings:
                    rings.pop()
                continue
            rings.append(ring)
            if len(rings) == num_rings:
                return rings
            if self._can_hold(num_rings - len(rings), mirrored):
                searches.append(self.paths(0, 0, mirrored=mirrored, min_second=ring[1]))
            else:
                rings.pop()
        return None


def _bits(row: Sequence[int]) -> int:
    return sum(1 << j for j, free in enumerate(row) if free > 0)


def pack_rings(lanes: Sequence[Sequence[int]], bound: int, budget: int) -> Packing:
    """Finds many directed rings through all nodes that share no lane.

    First as many as the bound allows are tried; if that fails, rings are taken one by one, and
    then one more than those is tried until that fails too.

    Args:
        lanes: lanes[i][j] from i to j, square, at least 2 x 2.
        bound: an upper bound on the number of rings, not below 0.
        budget: steps of the search.

    Returns:
        The rings, none if there is none or none was found.
    """
    is_symmetric = all(
        row[j] == lanes[j][i] for i, row in enumerate(lanes) for j in range(len(lanes))
    )
    # With two nodes the opposite of a ring is the ring itself.
    can_mirror = is_symmetric and len(lanes) > 2
    left = budget

    def attempt(num_rings: int, share: int) -> tuple[list[Order] | None, bool]:
        """Rings or None, and whether None is a proof."""
        nonlocal left
        if can_mirror and num_rings % 2 == 0:
            search = PathSearch(lanes, min(share, left) // 2)
            pairs = search.pack(num_rings // 2, mirrored=True)
            left -= min(share, left) // 2 - search.budget
            if pairs is not None:
                return [ring for pair in pairs for ring in (pair, _reverse(pair))], True
        search = PathSearch(lanes, min(share, left))
        rings = search.pack(num_rings, mirrored=False)
        left -= min(share, left) - search.budget
        return rings, search.budget > 0

    if bound == 0:
        return Packing((), True)
    rings, _ = attempt(bound, budget // 4)
    if rings is not None:
        return Packing(tuple(rings), True)
    best = _one_by_one(lanes, bound, can_mirror, budget // 4)
    is_maximum = len(best) == bound
    while not is_maximum and left > 0:
        rings, is_proof = attempt(len(best) + 1, left // 2 + 1)
        if rings is None:
            is_maximum = is_proof
            break
        best = rings
        is_maximum = len(best) == bound
    return Packing(tuple(best), is_maximum)


def _reverse(ring: Order) -> Order:
    return (ring[0], *ring[:0:-1])


def _one_by_one(
    lanes: Sequence[Sequence[int]], bound: int, can_mirror: bool, budget: int
) -> list[Order]:
    """Takes the first ring found, then the first in what is left, and so on."""
    search = PathSearch(lanes, budget)
    rings: list[Order] = []
    for mirrored in (True, False) if can_mirror else (False,):
        while len(rings) + mirrored < bound:
            # Asked for one ring only, the search leaves that ring's lanes taken.
            ring = next(search.paths(0, 0, mirrored=mirrored), None)
            if ring is None:
                break
            rings += [ring, _reverse(ring)] if mirrored else [ring]
    return rings
