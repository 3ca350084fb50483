"""Random sequences of calls on overlapping groups, run by one rank; strategies draw them.

See sequence_side.py for what a call is and what it must give, test_random_sequences.py for how a
sequence is run again.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from sequence_calls import KINDS, REDUCTIONS
from sequence_side import CPU, MOVED, REDUCED, Call, Side, ops_of

import ringcomm
from ringcomm import Options

WORLD = 4
SUBSETS = [members for size in (4, 3, 2) for members in itertools.combinations(range(WORLD), size)]
# All groups of two ranks and more, and some with other options.
FAMILY: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *((members, {}) for members in SUBSETS),
    ((0, 1, 2, 3), {"algorithm": "ring"}),
    ((0, 1, 2, 3), {"algorithm": "two_shot", "deterministic": "rank_order"}),
    ((0, 1, 2, 3), {"algorithm": "ring", "deterministic": "rank_order"}),
    ((0, 2, 3), {"algorithm": "two_shot"}),
    ((1, 2, 3), {"algorithm": "ring"}),
    ((1, 3), {"algorithm": "one_shot"}),
    ((0, 1), {"algorithm": "ring"}),
]
# The environment of each rank.
POOLS: dict[str, list[dict[str, str]]] = {
    "shm": [{}] * WORLD,
    "messages": [{"RINGCOMM_TRANSPORT": "messages"}] * WORLD,
    "hosts": [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in "aabb"],
}
# A call that is not over by then never will be.
WAIT_S = 60.0
# An error that another rank has found, on a busy machine.
SOON_S = 10.0


@dataclass(frozen=True)
class Case:
    """What all ranks do.

    Attributes:
        calls: in an order that is the same on all ranks; each is made by its group's members.
        fresh: the ranks of a group made for the case and destroyed after it; empty for none.
        pool: how the ranks reach each other; a key of POOLS.
        deviation: a call, a rank of the fresh group, and what this rank has otherwise in that call.
            All calls are then synchronous ones of that group, and all its ranks must raise.
    """

    calls: tuple[Call, ...]
    fresh: tuple[int, ...] = ()
    pool: str = "shm"
    deviation: tuple[int, int, dict[str, Any]] | None = None


def new_group(members: tuple[int, ...], options: Options) -> Any:
    timeout = timedelta(seconds=WAIT_S)
    return dist.new_group(list(members), timeout, pg_options=options)


# The global ranks of a group's members, and the group; None is the default group.
Member = tuple[tuple[int, ...], Any]


def make_groups(family: Sequence[tuple[tuple[int, ...], dict[str, Any]]]) -> list[Member]:
    """Makes these groups. Collective over all ranks."""
    return [(members, new_group(members, Options(**options))) for members, options in family]


@cache
def family() -> list[Member]:
    return make_groups(FAMILY)


def make_marks(path: Path) -> str:
    """Makes a file with a number for each rank, for barriers."""
    np.zeros(WORLD, np.int64).tofile(path)
    return str(path)


@cache
def marks_of(path: str) -> Any:
    return np.memmap(path, dtype=np.int64, mode="r+", shape=(WORLD,))


class Run:
    """One rank's run of a case. `groups` are those that its calls count, by default FAMILY's."""

    def __init__(
        self,
        rank: int,
        case: Case,
        serial: int,
        marks: str,
        mutation: str = "",
        groups: Sequence[Member] | None = None,
    ) -> None:
        self.rank = rank
        self.case = case
        self.serial = serial
        self.marks = marks_of(marks)
        self.mutation = mutation
        self.groups = family() if groups is None else groups
        self.fresh: Any = None
        self.wrong: list[str] = []
        # What is not over: when to wait, what for, and of which call.
        self.pending: list[tuple[int, Any, Side]] = []

    def side(self, call: Call, idx: int) -> Side | None:
        is_fresh = call.group < 0
        members, group = (self.case.fresh, self.fresh) if is_fresh else self.groups[call.group]
        if self.rank not in members:
            return None
        number = self.serial * 100 + idx
        rank = members.index(self.rank)
        is_swapped = self.mutation == "swapped"
        return Side(call, number, rank, members, group, self.marks, is_swapped)

    def make_group(self) -> None:
        if self.case.fresh:
            group = new_group(self.case.fresh, Options())
            self.fresh = group if self.rank in self.case.fresh else None

    def make_calls(self) -> None:
        for idx, call in enumerate(self.case.calls):
            if (side := self.side(call, idx)) is not None:
                self.begin(side, idx)
            self.finish_until(idx)
        self.finish_until(len(self.case.calls) + 100)

    def begin(self, side: Side, idx: int) -> None:
        call = side.call
        if call.variety > 0 and side.own_random.random() < 0.25:
            time.sleep(side.own_random.random() * 2e-3)
        works = KINDS[call.kind](side)
        works = works if isinstance(works, list) else [works]
        works = [work for work in works if work is not None]
        if call.variety > 0:
            side.own_random.shuffle(works)
        self.pending += [(idx + call.wait, work, side) for work in works]
        if not works:
            self.look_at(side)

    def finish_until(self, idx: int) -> None:
        """Waits for what is due, in any order; looks at calls of which no work is left."""
        due = [entry for entry in self.pending if entry[0] <= idx]
        self.pending = [entry for entry in self.pending if entry[0] > idx]
        random.Random(f"{self.rank} {idx} {len(due)}").shuffle(due)
        for _, work, side in due:
            if side.call.variety % 5 == 4 and hasattr(work, "get_future"):
                work.get_future().wait()
            else:
                work.wait()
        for side in {id(side): side for _, _, side in due}.values():
            self.look_at(side)

    def look_at(self, side: Side) -> None:
        if self.mutation == "off_by_one":
            side.spoil()
        idx = side.number - self.serial * 100
        self.wrong += [f"call {idx}, {side.call}: {text}" for text in side.wrong()]


def run_case(rank: int, case: Case, serial: int, marks: str, mutation: str = "") -> list[str]:
    """What was wrong on this rank.

    Args:
        serial: of no other case of the pool.
        marks: a file with a number for each rank.
        mutation: of the model: "swapped" takes ranks 0 and 1 for each other, "off_by_one" changes
            one element.
    """
    run = Run(rank, case, serial, marks, mutation)
    run.make_group()
    if case.deviation is not None:
        return run_deviation(run, *case.deviation)
    run.make_calls()
    if run.fresh is not None:
        dist.destroy_process_group(run.fresh)
    return run.wrong


def run_deviation(run: Run, at: int, deviant: int, change: dict[str, Any]) -> list[str]:
    """Results must be right until an error comes, which must be a MismatchError, on every rank."""
    if run.fresh is None:
        return []
    begin = time.monotonic()
    try:
        for idx, call in enumerate(run.case.calls):
            side = run.side(call, idx)
            assert side is not None
            if idx == at and side.rank == deviant:
                KINDS[replace(call, **change).kind](replace(side, call=replace(call, **change)))
            else:
                run.begin(side, idx)
        dist.barrier(run.fresh)
        run.wrong.append("no error")
    except Exception as error:
        if not isinstance(error, ringcomm.MismatchError):
            run.wrong.append(f"{type(error).__name__} instead of MismatchError: {error}")
        if time.monotonic() - begin > SOON_S:
            run.wrong.append(f"the error took more than {SOON_S} s: {error}")
    dist.destroy_process_group(run.fresh)
    return run.wrong


def run_cases(rank: int, cases: Sequence[Case], serial: int, marks: str) -> list[str]:
    """What was wrong in any of them; their serials begin at this one."""
    return [
        text for i, case in enumerate(cases) for text in run_case(rank, case, serial + i, marks)
    ]


def run_calls(
    calls: Sequence[Call], device: torch.device = CPU, group: Any = None, **how: Any
) -> list[str]:
    """What was wrong in these, one after another on a group of all ranks; None: the default one."""
    rank, ranks, wrong = dist.get_rank(), range(dist.get_world_size()), []
    for number, call in enumerate(calls):
        side = Side(call, number, rank, ranks, group, None, device=device, **how)
        works = KINDS[call.kind](side)
        for work in works if isinstance(works, list) else [works]:
            assert work is None or work.wait() is not False
        if device != CPU:
            torch.accelerator.synchronize()
        wrong += [f"{call}: {text}" for text in side.wrong()]
    return wrong


# ---- draws of calls, from hypothesis or from a seeded generator

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
