"""Draws calls of random sequences, from hypothesis or from a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from sequence_calls import KINDS, REDUCTIONS
from sequence_side import MOVED, REDUCED, Call, ops_of

Value = TypeVar("Value")

# Kinds in the order in which a failure is made simpler, and how often each is drawn.
KINDS_DRAWN = [*KINDS, "all_reduce", "all_reduce", "all_to_all_single", "messages", "messages"]
# Where paths change, in bytes: a line, an envelope of messages, direct paths, one_shot, a slot of
# a link, a piece of a board, the board.
EDGES = [64, 4 << 10, 8 << 10, 48 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]
# Several pieces and slices, odd.
LARGE = [777_777, 1_500_001, 3_000_001]
# Elements of all ranks together, of which the model's table has more.
MAX_TOTAL = 3_000_000


class Source(Protocol):
    """What is drawn from; random.Random is one."""

    def choice(self, values: Sequence[Value], /) -> Value: ...
    def randint(self, low: int, high: int, /) -> int: ...


def draw_size(source: Source, dtype: str, num_ranks: int, has_shares: bool) -> int:
    """Elements of a rank's tensor, or of its share."""
    itemsize = getattr(torch, dtype).itemsize
    kind = source.randint(0, 19)
    if kind < 11:
        return source.choice([1, 0, num_ranks, num_ranks - 1, num_ranks + 1, 3, 17, 67, 1000])
    if kind < 18:
        num_elems = source.choice(EDGES) // itemsize
        if has_shares and source.choice([False, True]):
            num_elems //= num_ranks
        num_elems += source.randint(-1, 1)
    else:
        num_elems = min(source.choice(LARGE) // itemsize, 400_000)
    return min(num_elems, MAX_TOTAL // (num_ranks if has_shares else 1))


def draw_call(source: Source, kinds: Sequence[str], group: int, num_ranks: int) -> Call:
    """A call on a group of that many ranks, which all of them make."""
    kind = source.choice(kinds)
    dtype = source.choice(REDUCED if kind in REDUCTIONS else MOVED)
    has_shares = kind not in ("all_reduce", "reduce", "broadcast")
    return Call(
        kind,
        group,
        dtype,
        source.choice(ops_of(dtype)) if kind in REDUCTIONS else "sum",
        draw_size(source, dtype, num_ranks, has_shares),
        source.randint(0, 99),
        source.randint(0, num_ranks - 1),
        source.choice([0, 0, 1, 2, 5]),
        source.randint(0, 9999),
    )
