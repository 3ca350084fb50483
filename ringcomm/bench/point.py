"""One point of a sweep: backends beside each other on one buffer, and the state of the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.bench.flags import FlagProbe, did_flags_change
from ringcomm.bench.interleave import Timings, make_contender, measure
from ringcomm.bench.machine import MAX_OTHERS_PERCENT, OthersWatch, memory_floor_us
from ringcomm.bench.operations import OPERATIONS, Buffers, Operation, Place
from ringcomm.bench.ranks import Team

GB = 1e9
RINGCOMM = "ringcomm"


@dataclass(frozen=True)
class Bench:
    """What a rank measures with: its groups by label, and its instruments.

    A group is c10d's, or a communicator of mpi4py.
    """

    team: Team
    groups: dict[str, Any]
    probe: FlagProbe
    own_pids: list[int]
    device: torch.device

    @property
    def subject(self) -> str:
        """The backend that the others' times are divided by: ringcomm, or the first one."""
        return RINGCOMM if RINGCOMM in self.groups else next(iter(self.groups))


@dataclass
class Weather:
    """The machine around a measurement."""

    flag_us: list[float | None]
    floor_us: list[float]
    others_percent: float = 100.0

    @property
    def is_quiet(self) -> bool:
        """Whether other programs left the machine alone."""
        return self.others_percent <= MAX_OTHERS_PERCENT

    @property
    def is_steady(self) -> bool:
        """Whether the cores shared a cache at the end if and only if they did at the start."""
        return not did_flags_change(*self.flag_us)

    def record(self) -> dict[str, Any]:
        """The fields of a record."""
        return {
            "flag_us": dict(zip(("before", "after"), self.flag_us, strict=True)),
            "floor_us": dict(zip(("before", "after"), self.floor_us, strict=True)),
            "others_busy_percent": self.others_percent,
            "quiet": self.is_quiet,
            "steady": self.is_steady,
        }


def make_bench(team: Team, groups: dict[str, Any], device: torch.device) -> Bench:
    """Collects the processes of this run: all ranks and their parent. Collective."""
    own_pids = [os.getppid(), *team.share(os.getpid())]
    return Bench(team, groups, FlagProbe(team), own_pids, device)


def count_wrong(bench: Bench, operation: Operation, buffers: Buffers) -> dict[str, int]:
    """Wrong elements of all ranks together, by label, after one call on known integers."""
    wrong = {}
    for label, group in bench.groups.items():
        mine = operation.verify(operation.bound(buffers, group), buffers, bench.team)
        wrong[label] = sum(bench.team.share(mine))
    buffers.clear()
    return wrong


def num_calls(group: Any) -> dict[tuple[str, str], int]:
    """Calls of a ringcomm group by collective and algorithm; nothing of another backend."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_backend(group) != RINGCOMM:
        return {}
    return {key: entry["num_calls"] for key, entry in ringcomm.stats(group).items()}


def algorithms_used(
    before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]
) -> list[str]:
    """Names of ringcomm's algorithms that ran between two counts; barriers align every block."""
    used = {key for key, count in after.items() if count > before.get(key, 0)}
    apart_from_barriers = {key for key in used if key[0] != "barrier"}
    return sorted({algorithm for _, algorithm in apart_from_barriers or used})


def time_once(
    bench: Bench, operation: Operation, buffers: Buffers, seconds: float
) -> tuple[dict[str, Timings] | None, Weather, dict[str, list[str]]]:
    """Timings (rank 0 only), weather (its busy share on rank 0 only), algorithms by label.

    Collective.
    """
    team = bench.team
    contenders = {
        label: make_contender(operation, buffers, group) for label, group in bench.groups.items()
    }
    counts = {label: num_calls(group) for label, group in bench.groups.items()}
    watch = OthersWatch(bench.own_pids) if team.rank == 0 else None
    flag_us = [bench.probe.latency_us()]
    floor_us = [memory_floor_us(team, buffers.output)]
    timings = measure(team, contenders, seconds)
    flag_us.append(bench.probe.latency_us())
    floor_us.append(memory_floor_us(team, buffers.output))
    weather = Weather(flag_us, floor_us)
    if watch is not None:
        weather.others_percent = watch.percent()
    algorithms = {
        label: algorithms_used(counts[label], num_calls(group))
        for label, group in bench.groups.items()
    }
    return timings, weather, algorithms


def measure_point(
    bench: Bench, name: str, num_bytes: int, dtype: torch.dtype, seconds: float, max_repeats: int
) -> list[dict[str, Any]]:
    """Verifies, times (again while the machine is disturbed) and verifies again. Collective.

    Returns:
        On rank 0 one record per backend, of the attempt with the least disturbance; else nothing.
    """
    team, operation = bench.team, OPERATIONS[name]
    num_elems = operation.num_elems(num_bytes, dtype, team.world_size)
    place = Place(team.rank, team.world_size, num_elems, dtype, bench.device)
    buffers = operation.setup(place)
    wrong = count_wrong(bench, operation, buffers)
    best: tuple[tuple[bool, bool, float], list[dict[str, Any]]] | None = None
    num_attempts = 0
    while num_attempts <= max_repeats:
        num_attempts += 1
        timings, weather, algorithms = time_once(bench, operation, buffers, seconds)
        if timings is not None:
            disturbance = (not weather.is_quiet, not weather.is_steady, weather.others_percent)
            if best is None or disturbance < best[0]:
                common = {"op": name, "bytes": num_elems * dtype.itemsize, **weather.record()}
                best = (disturbance, _records(bench, operation, common, timings, algorithms))
        if team.agree(weather.is_quiet and weather.is_steady):
            break
    for label, count in count_wrong(bench, operation, buffers).items():
        wrong[label] += count
    records = best[1] if best is not None else []
    for record in records:
        record.update(num_attempts=num_attempts, wrong_elems=wrong[record["backend"]])
        record["verified"] = record["wrong_elems"] == 0
        if wrong[record["backend"]] or wrong[bench.subject]:
            record["ratio"] = None  # a wrong result is not a fast one
    return records


def _records(
    bench: Bench,
    operation: Operation,
    common: dict[str, Any],
    timings: dict[str, Timings],
    algorithms: dict[str, list[str]],
) -> list[dict[str, Any]]:
    records = []
    subject = bench.subject
    for label, timing in timings.items():
        times_us = timing.summary_us()
        algbw = common["bytes"] / (times_us["p50_us"] / 1e6) / GB
        ratio = None
        if label != subject:
            ratio = {"over": subject, **timing.ratio_over(timings[subject])}
        records.append(
            {
                "backend": label,
                **common,
                **times_us,
                "num_calls": timing.num_calls(),
                "algbw_gb_per_s": algbw,
                "busbw_gb_per_s": algbw * operation.bus_factor(bench.team.world_size),
                "ratio": ratio,
                "algorithms": algorithms[label],
            }
        )
    return records
