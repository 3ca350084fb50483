"""Times several contenders in one set of processes, alternating block by block.

A machine's speed drifts within seconds by more than the contenders differ. Neighbouring blocks of a
few milliseconds see the same conditions, so their ratio is reliable even if their times are not.
"""

import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import fmean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from _ringcomm.status import WRONG, RankError
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.ranks import Team

# Long enough to amortise what aligns the ranks before it (some 100 µs), short against the seconds
# in which the machine changes.
BLOCK_SECONDS = 0.02
MAX_CALLS_PER_BLOCK = 2000
# From this size on, a block has one untimed call first, which brings its data into the caches.
MIN_CALLS_TO_WARM = 4
MIN_ROUNDS = 5
# Warm-up before timing: peers connected, pages touched, spin budgets settled.
WARMUP_SECONDS = 0.05
WARMUP_CALLS = (3, 500)  # at least, at most
GROUP_TIMEOUT = timedelta(seconds=120)
NUM_VALUES = 4093  # in verified sums: exact in float32 for any number of ranks
US = 1e6


def percentiles(values: Iterable[float], unit: str) -> dict[str, float]:
    """``{"p10_us": ..., "p50_us": ..., "p90_us": ..., "p99_us": ...}`` for the unit "us".

    In plain Python: torch's own needs tensors, and a process that forks ranks computes none.
    """
    found = list(values)
    cuts = quantiles(found if len(found) > 1 else 2 * found, n=100, method="inclusive")
    return {f"p{percent}_{unit}": cuts[percent - 1] for percent in (10, 50, 90, 99)}


@dataclass(frozen=True)
class Timings:
    """One backend's calls.

    Attributes:
        blocks: by block, the seconds of each call on its slowest rank.
        elapsed: by block, its seconds on the rank that needed longest, over its calls: less than
            the above where ranks that share a core make some calls ahead of each other.
    """

    blocks: list[list[float]]
    elapsed: list[float]

    def num_calls(self) -> int:
        """How many calls were timed."""
        return sum(map(len, self.blocks))

    def summary_us(self) -> dict[str, float]:
        """p10, p50, p90, p99 and mean over all calls, in µs."""
        calls_us = [s * US for block in self.blocks for s in block]
        return {**percentiles(calls_us, "us"), "mean_us": sum(calls_us) / len(calls_us)}

    def ratio_over(self, other: "Timings") -> dict[str, float]:
        """This one's median call over the other's, of each pair of neighbouring blocks.

        Their median with their 10 and 90 % points, and how many pairs there are.
        """
        pairs = zip(self.blocks, other.blocks, strict=True)
        found = percentiles((median(mine) / median(theirs) for mine, theirs in pairs), "ratio")
        points = {name: found[f"{name}_ratio"] for name in ("p50", "p10", "p90")}
        return {**points, "num_pairs": len(self.blocks)}


def open_default_group(team: Team, backend: str, timeout: timedelta = GROUP_TIMEOUT) -> None:
    """The default process group, with one thread per rank. Collective."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=team.open_store("default-group"),
        rank=team.rank,
        world_size=team.world_size,
        timeout=timeout,
    )


def check_sums(team: Team, groups: Mapping[str, Any], buffer: torch.Tensor) -> None:
    """Raises RankError where an all_reduce over a group is wrong on any rank. Collective.

    Leaves zeros in the buffer: repeated in-place sums do not grow.
    """
    values = torch.arange(buffer.numel()) % NUM_VALUES
    expected = team.world_size * values + sum(range(team.world_size))
    for name, group in groups.items():
        buffer.copy_(values + team.rank)
        dist.all_reduce(buffer, group=group)
        if wrong := sum(team.share(int((buffer != expected).sum()))):
            raise RankError(f"{wrong} {WRONG} in all_reduce of {buffer.nbytes} B by {name}")
    buffer.zero_()


@dataclass
class Contender:
    """One backend's call, ready to be timed, and how often a block makes it."""

    call: Callable[[], object]
    align: Callable[[], None]
    calls_per_block: int = 1

    def first_call_s(self) -> float:
        """Seconds of one call, from which the number of calls per block is estimated."""
        begin = time.perf_counter()
        self.call()
        return time.perf_counter() - begin

    def block(self) -> list[float]:
        """Seconds of each call of a block, on this rank. Collective."""
        self.align()
        if self.calls_per_block >= MIN_CALLS_TO_WARM:
            self.call()
        call, clock = self.call, time.perf_counter
        stamps = [0.0] * (self.calls_per_block + 1)
        stamps[0] = clock()
        for position in range(1, self.calls_per_block + 1):
            call()
            stamps[position] = clock()
        return [end - begin for begin, end in itertools.pairwise(stamps)]


def _warm_up(team: Team, contender: Contender) -> None:
    """Calls until the time is settled, and gives every rank the same number of calls per block."""
    contender.align()
    first_s = max(team.share(contender.first_call_s()))
    least, most = WARMUP_CALLS
    contender.calls_per_block = min(most, max(least, int(WARMUP_SECONDS / first_s)))
    usual_s = median(max(calls) for calls in zip(*team.share(contender.block()), strict=True))
    contender.calls_per_block = min(MAX_CALLS_PER_BLOCK, max(1, round(BLOCK_SECONDS / usual_s)))


def measure(
    team: Team, contenders: dict[str, Contender], seconds: float
) -> dict[str, Timings] | None:
    """Blocks of all contenders in turn, for about ``seconds`` in all. Collective.

    Each round has another random order: with a fixed successor, what follows a contender that
    sleeps would always have the scheduler's credit. All ranks make the same calls. The time of a
    call is that of the slowest rank, measured from the end of the previous call on that rank.
    Returns None on other ranks than 0.
    """
    for contender in contenders.values():
        _warm_up(team, contender)
    labels, shuffle = list(contenders), random.Random(1)  # the same on all ranks
    mine: dict[str, list[list[float]]] = {label: [] for label in labels}
    gc.collect()
    gc.disable()
    try:
        begin = time.monotonic()
        num_rounds = 0
        while team.agree(num_rounds < MIN_ROUNDS or time.monotonic() - begin < seconds):
            for label in labels:
                mine[label].append(contenders[label].block())
            shuffle.shuffle(labels)
            num_rounds += 1
    finally:
        gc.enable()
    by_rank = team.gather(mine)
    if by_rank is None:
        return None
    found = {}
    for label in contenders:
        rounds = [*zip(*(rank[label] for rank in by_rank), strict=True)]
        slowest = [[*map(max, zip(*blocks, strict=True))] for blocks in rounds]
        found[label] = Timings(slowest, [max(map(fmean, blocks)) for blocks in rounds])
    return found


def measure_beside_others(
    team: Team,
    groups: Mapping[str, Any],
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
) -> tuple[float, dict[str, Timings] | None]:
    """The share of the machine that other programs used, in percent, and measure(). Collective.

    ``groups`` have the group of each call.
    """
    contenders = {
        name: Contender(call, partial(dist.barrier, groups[name])) for name, call in calls.items()
    }
    others = OthersWatch([os.getppid(), *team.share(os.getpid())])
    timings = measure(team, contenders, seconds)
    return team.agree(others.percent()), timings
