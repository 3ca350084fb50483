"""A group of ringcomm on this machine: whether it can be made, what it holds, how fast it is."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ringcomm import _C
from ringcomm.measure.machine import OthersWatch, mapped_memory
from ringcomm.measure.operations import (
    ALL_REDUCE,
    Place,
    algorithms_used,
    make_contender,
    num_calls,
)
from ringcomm.measure.ranks import Team, run_ranks
from ringcomm.measure.timing import measure, median, open_default_group
from ringcomm.measure.weather import SHARED_CACHE_MAX_US, FlagProbe

INIT_TIMEOUT = timedelta(seconds=30)
# One of each algorithm and, with the last, of a size that no cache of a core holds.
ALL_REDUCE_BYTES = (1 << 10, 256 << 10, 16 << 20)
LATENCY_BYTES = 1 << 10
BANDWIDTH_BYTES = 4 << 20
NUM_TRIPS = {LATENCY_BYTES: 200, BANDWIDTH_BYTES: 10}
# With more ranks only neighbours are timed: pairs grow with the square.
MAX_WORLD_OF_ALL_PAIRS = 8
# What the project promises for a group with its default options.
MAX_BYTES_PER_PAIR = 8 << 20


def _hand_overs(probe: FlagProbe, cpu_pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """One-way latency of a flag between CPUs. Collective."""
    found = []
    for cpus in cpu_pairs:
        us = probe.latency_us(cpus)
        shares = None if us is None else us <= SHARED_CACHE_MAX_US
        found.append({"cpus": list(cpus), "us": us, "looks_shared": shares})
    return found


def _all_reduces(team: Team, seconds: float) -> list[dict[str, Any]]:
    """Times of all_reduce with the algorithms that are chosen; on rank 0. Collective."""
    operation, world_size = ALL_REDUCE, team.world_size
    group = dist.group.WORLD
    found = []
    for num_bytes in ALL_REDUCE_BYTES:
        kind = torch.float32, torch.device("cpu")
        place = Place(team.rank, world_size, num_bytes // 4, *kind)
        before = num_calls(group)
        contender = make_contender(operation, operation.setup(place), group)
        timings = measure(team, {"ringcomm": contender}, seconds)
        used = algorithms_used(before, num_calls(group))
        if timings is not None:
            us = timings["ringcomm"].summary_us()
            gb_per_s = num_bytes / us["p50_us"] / 1e3 * operation.bus_factor(world_size)
            times = {"p50_us": us["p50_us"], "p99_us": us["p99_us"], "busbw_gb_per_s": gb_per_s}
            found.append({"bytes": num_bytes, "algorithms": used, **times})
    return found


def _trip_us(peer: int, num_bytes: int, is_first: bool) -> float:
    """Median µs of a message there and one back, halved."""
    buffer = torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(NUM_TRIPS[num_bytes]):
        begin = time.perf_counter()
        for is_sending in (is_first, not is_first):
            if is_sending:
                dist.send(buffer, peer)
            else:
                dist.recv(buffer, peer)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * median(seconds[1:]) / 2


def _pairs(team: Team) -> list[dict[str, Any]]:
    """Transport and messages of every pair, or of neighbours where there are many. Collective."""
    world_size = team.world_size
    pairs = list(combinations(range(world_size), 2))
    timed = set(pairs)
    if world_size > MAX_WORLD_OF_ALL_PAIRS:
        timed = {(first, first + 1) for first in range(world_size - 1)}
    group = dist.group.WORLD
    assert group is not None
    # In the engine's words: "shm: one host, ..." or "p2p over gloo, as asked for; ...".
    said = _C.transport_of(group._get_backend(torch.device("cpu")))
    transport, why = said[:3], said[3:].strip(": ")
    found = []
    for pair in pairs:
        entry: dict[str, Any] = {"ranks": list(pair), "transport": transport, "why": why}
        if pair in timed:
            team.share(None)  # the others sleep meanwhile
            mine = {}
            if team.rank in pair:
                peer = pair[1 - pair.index(team.rank)]
                mine = {size: _trip_us(peer, size, team.rank == pair[0]) for size in NUM_TRIPS}
            us = team.share(mine)[pair[0]]
            entry["latency_us"] = us[LATENCY_BYTES]
            entry["gb_per_s"] = BANDWIDTH_BYTES / us[BANDWIDTH_BYTES] / 1e3
        found.append(entry)
    return found


def _memory(team: Team) -> dict[str, Any]:
    """The group's shared memory, which all its ranks map: one piece, charged once. Collective."""
    group = dist.group.WORLD
    assert group is not None
    mapped = _C.mapped_bytes(group._get_backend(torch.device("cpu")))
    num_pairs = team.world_size * (team.world_size - 1) // 2
    # Of a page that n processes have each counts 1/n.
    resident = sum(team.share(mapped_memory()["share_bytes"]))
    return {
        "mapped_bytes": mapped,
        "resident_bytes": resident,
        "mapped_bytes_per_pair": mapped / num_pairs if num_pairs else None,
        "resident_bytes_per_pair": resident / num_pairs if num_pairs else None,
        "max_bytes_per_pair": MAX_BYTES_PER_PAIR,
    }


def _run_rank(team: Team, cpu_pairs: list[tuple[int, int]], seconds: float) -> None:
    """Rank 0 reports what was found, piece by piece: what comes before a failure is kept."""

    def tell(**parts: Any) -> None:
        if team.rank == 0:
            team.report(parts)

    tell(hand_overs=_hand_overs(FlagProbe(team), cpu_pairs if team.world_size > 1 else []))
    begin = time.perf_counter()
    error = None
    try:
        open_default_group(team, "ringcomm", INIT_TIMEOUT)
    except Exception as problem:  # whatever it is, the user is to read it
        error = f"{type(problem).__name__}: {problem}"
    init_s = max(team.share(time.perf_counter() - begin))
    errors = [f"rank {rank}: {text}" for rank, text in enumerate(team.share(error)) if text]
    if errors:
        tell(errors=errors)
        return
    own_pids = [os.getppid(), *team.share(os.getpid())]
    watch = OthersWatch(own_pids) if team.rank == 0 else None
    tell(init_s=init_s, all_reduce=_all_reduces(team, seconds))
    tell(pairs=_pairs(team), memory=_memory(team))
    if watch is not None:
        tell(others_busy_percent=watch.percent())
    dist.destroy_process_group()


def examine_group(
    world_size: int, cpu_pairs: list[tuple[int, int]], seconds: float
) -> dict[str, Any]:
    """Starts the ranks and gathers what they find: parts by name, `errors` where it failed.

    Args:
        world_size: ranks to start.
        cpu_pairs: CPUs between which hand-over is measured.
        seconds: per size of all_reduce.

    Raises:
        RankError: a rank ended or failed elsewhere than in making the group.
    """
    found: dict[str, Any] = {}
    run_ranks(world_size, lambda team: _run_rank(team, cpu_pairs, seconds), found.update)
    return found
