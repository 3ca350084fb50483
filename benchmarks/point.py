"""One point of a sweep: several backends on one buffer, and the state of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from operations import OPERATIONS, RINGCOMM, Buffers, Operation, Place
from report import records_of
from weather import WeatherWatch

import ringcomm
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import Contender, Timings, measure

GB = 1e9
FLOOR_SECONDS = 0.05
NUM_FLOOR_CALLS = (5, 2000)  # at least, at most


def make_contender(operation: Operation, buffers: Buffers, group: Any) -> Contender:
    """One operation over one group; on a GPU a call includes waiting for the device."""
    on_cpu = operation.bound(buffers, group)
    device = buffers.place.device

    def on_device() -> None:
        on_cpu()
        torch.get_device_module(device).synchronize(device)

    call = on_cpu if device.type == "cpu" else on_device
    align = partial(dist.barrier, group) if isinstance(group, dist.ProcessGroup) else group.barrier
    return Contender(call, align)


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


@dataclass(frozen=True)
class Bench:
    """A rank's groups by label, and its instruments.

    A group is c10d's, or a communicator of mpi4py.
    """

    team: Team
    groups: dict[str, Any]
    watch: WeatherWatch
    device: torch.device

    @property
    def subject(self) -> str:
        """The backend that the others' times are divided by: ringcomm, or the first one."""
        return RINGCOMM if RINGCOMM in self.groups else next(iter(self.groups))


def make_bench(team: Team, groups: dict[str, Any], device: torch.device) -> Bench:
    """Makes a rank's Bench. Collective."""
    return Bench(team, groups, WeatherWatch(team), device)


def make_buffers(bench: Bench, operation: Operation, num_bytes: int, dtype: torch.dtype) -> Buffers:
    """This rank's tensors of about that many bytes."""
    num_elems = operation.num_elems(num_bytes, dtype, bench.team.world_size)
    kind = (num_elems, dtype, bench.device)
    place = Place(bench.team.rank, bench.team.world_size, *kind, bench.groups.get(RINGCOMM))
    return operation.setup(place)


def count_wrong(bench: Bench, operation: Operation, buffers: Buffers) -> dict[str, int]:
    """Wrong elements of all ranks together, by label, after one call on known integers."""
    wrong = {}
    for label, group in bench.groups.items():
        mine = operation.verify(operation.bound(buffers, group), buffers, bench.team)
        wrong[label] = sum(bench.team.share(mine))
    buffers.clear()
    return wrong


def memory_floor_us(team: Team, tensor: torch.Tensor) -> float:
    """Median µs of scaling ``tensor`` in place by one, on all ranks at once. Collective.

    Each byte is read once and written once, which no all_reduce can avoid. The time is that of the
    slowest rank. For small tensors it is torch's overhead per call.
    """

    def scale() -> float:
        begin = time.perf_counter()
        tensor.mul_(1)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - begin

    scale()
    estimate_s = max(team.share(scale()))
    least, most = NUM_FLOOR_CALLS
    num_calls = min(most, max(least, int(FLOOR_SECONDS / max(estimate_s, 1e-9))))
    by_rank = team.share([scale() for _ in range(num_calls)])
    return 1e6 * median(max(calls) for calls in zip(*by_rank, strict=True))


@dataclass(frozen=True)
class Attempt:
    """The result of one attempt at a point.

    Attributes:
        timings: by label, on rank 0; None elsewhere.
        floor_us: of memory, before and after.
        algorithms: names by label.
    """

    timings: dict[str, Timings] | None
    floor_us: tuple[float, float]
    algorithms: dict[str, list[str]]


def time_once(bench: Bench, operation: Operation, buffers: Buffers, seconds: float) -> Attempt:
    """Times all groups in turn. Collective."""
    contenders = {
        label: make_contender(operation, buffers, group) for label, group in bench.groups.items()
    }
    counts = {label: num_calls(group) for label, group in bench.groups.items()}
    before_us = memory_floor_us(bench.team, buffers.output)
    timings = measure(bench.team, contenders, seconds)
    after_us = memory_floor_us(bench.team, buffers.output)
    algorithms = {
        label: algorithms_used(counts[label], num_calls(group))
        for label, group in bench.groups.items()
    }
    return Attempt(timings, (before_us, after_us), algorithms)


def measure_point(
    bench: Bench, name: str, num_bytes: int, dtype: torch.dtype, seconds: float, max_repeats: int
) -> list[dict[str, Any]]:
    """Verifies, times (again while the machine is disturbed) and verifies again. Collective.

    Returns:
        On rank 0 one record per backend, of the attempt with the least disturbance; else nothing.
    """
    operation = OPERATIONS[name]
    buffers = make_buffers(bench, operation, num_bytes, dtype)
    wrong = count_wrong(bench, operation, buffers)
    attempt, weather = bench.watch.calmest(
        lambda: time_once(bench, operation, buffers, seconds), max_repeats
    )
    for label, count in count_wrong(bench, operation, buffers).items():
        wrong[label] += count
    if attempt.timings is None:
        return []
    records = []
    num_bytes = buffers.place.num_elems * dtype.itemsize
    for record in records_of(attempt.timings, bench.subject, wrong):
        algbw = num_bytes / (record["p50_us"] / 1e6) / GB
        records.append(
            {
                "op": name,
                "bytes": num_bytes,
                **record,
                "algbw_gb_per_s": algbw,
                "busbw_gb_per_s": algbw * operation.bus_factor(bench.team.world_size),
                "algorithms": attempt.algorithms[record["backend"]],
                "floor_us": dict(zip(("before", "after"), attempt.floor_us, strict=True)),
                **weather.record(),
            }
        )
    return records
