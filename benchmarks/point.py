"""One point of a sweep: several backends on one buffer, and the state of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cells import Record
from operations import OPERATIONS, RINGCOMM, Buffers, Operation, Place
from race import Bench
from report import records_of
from weather import Weather

import ringcomm
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import Contender, Timings, measure

GB = 1e9
Call = Callable[[], object]
FLOOR_SECONDS = 0.05
NUM_FLOOR_CALLS = (5, 2000)  # at least, at most


def make_contender(bench: Bench, operation: Operation, buffers: Buffers, group: Any) -> Contender:
    """One operation over one group; a communicator of mpi4py has a barrier of its own."""
    call = operation.bound(buffers, group)
    if isinstance(group, dist.ProcessGroup):
        return bench.contender(call, group)
    return Contender(call, group.barrier)


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


def subject_of(bench: Bench) -> str:
    """The backend that the others' times are divided by: ringcomm, or the first one."""
    return RINGCOMM if RINGCOMM in bench.groups else next(iter(bench.groups))


def make_buffers(bench: Bench, operation: Operation, num_bytes: int, dtype: torch.dtype) -> Buffers:
    """This rank's tensors of about that many bytes."""
    num_elems = operation.num_elems(num_bytes, dtype, bench.team.world_size)
    kind = (num_elems, dtype, bench.device)
    place = Place(bench.team.rank, bench.team.world_size, *kind, bench.groups.get(RINGCOMM))
    return operation.setup(place)


def count_wrong(
    bench: Bench,
    operation: Operation,
    buffers: Buffers,
    prepare: Callable[[Call], Call] = lambda c: c,
) -> dict[str, int]:
    """Wrong elements of all ranks together, by label, after one call on known integers.

    ``prepare`` makes of a call what is timed, such as a CUDA graph.
    """
    wrong = {}
    for label, group in bench.groups.items():
        plain = operation.bound(buffers, group)
        call = plain if prepare is None else prepare(plain)
        wrong[label] = sum(bench.team.share(operation.verify(call, buffers, bench.team)))
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
        floors: of memory, before and, on CPUs, after.
        algorithms: names by label.
    """

    timings: dict[str, Timings] | None
    floors: list[Any]
    algorithms: dict[str, list[str]]


def time_once(bench: Bench, make: Callable[[Any], Contender], floor: Callable[[], Any]) -> Attempt:
    """Times the contenders of groups in turn. Collective."""
    groups = bench.groups
    counts = {label: num_calls(group) for label, group in groups.items()}
    contenders = {label: make(group) for label, group in groups.items()}
    floors = [floor()]
    timings = measure(bench.team, contenders, bench.seconds)
    floors += [floor()] if bench.device.type == "cpu" else []
    algorithms = {
        label: algorithms_used(counts[label], num_calls(group)) for label, group in groups.items()
    }
    return Attempt(timings, floors, algorithms)


def measure_verified(
    bench: Bench,
    count_wrong: Callable[[], dict[str, int]],
    make: Callable[[Any], Contender],
    floor: Callable[[], Any],
) -> tuple[Attempt, Weather, dict[str, int]]:
    """Verifies, times (again while the machine is disturbed) and verifies again. Collective.

    Returns the attempt with the least disturbance, its conditions, and wrong elements by label.
    """
    wrong = count_wrong()
    attempt, weather = bench.watch.calmest(partial(time_once, bench, make, floor), bench.repeats)
    for label, count in count_wrong().items():
        wrong[label] += count
    return attempt, weather, wrong


def measure_point(bench: Bench, name: str, num_bytes: int, dtype: torch.dtype) -> list[Record]:
    """Verifies and times an operation. Collective.

    Returns:
        On rank 0 one record per backend; else nothing.
    """
    operation = OPERATIONS[name]
    buffers = make_buffers(bench, operation, num_bytes, dtype)
    attempt, weather, wrong = measure_verified(
        bench,
        partial(count_wrong, bench, operation, buffers),
        partial(make_contender, bench, operation, buffers),
        partial(memory_floor_us, bench.team, buffers.output),
    )
    num_bytes = buffers.place.num_elems * dtype.itemsize
    floors = dict(zip(("before", "after"), attempt.floors, strict=True))
    facts = {"op": name, "bytes": num_bytes, "floor_us": floors, **weather.record()}
    return finished(bench, operation, attempt, wrong, facts)


def finished(
    bench: Bench, operation: Operation, attempt: Attempt, wrong: dict[str, int], facts: Record
) -> list[Record]:
    """A record per backend with these facts, its bandwidths and its algorithms; on rank 0."""
    records = []
    for record in records_of(attempt.timings or {}, subject_of(bench), wrong):
        algbw = facts["bytes"] / (record["p50_us"] / 1e6) / GB
        speeds = {
            "algbw_gb_per_s": algbw,
            "busbw_gb_per_s": algbw * operation.bus_factor(bench.team.world_size),
            "algorithms": attempt.algorithms[record["backend"]],
        }
        records.append({**facts, **record, **speeds})
    return records
