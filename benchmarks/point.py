"""One point of a sweep: several backends on one buffer, and the state of the machine.

On devices eager or in CUDA graphs, on alternating buffers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cells import Record
from groups import Communicator
from operations import OPERATIONS, RINGCOMM, Buffers, Operation, Place
from placement import Placement, measure_speeds
from race import Bench, EventContender
from report import records_of

import ringcomm
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import Contender, measure

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
        call = prepare(operation.bound(buffers, group))
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


def measure_verified(
    bench: Bench,
    count_wrong: Callable[[], dict[str, int]],
    make: Callable[[Any], Contender],
    floor: Callable[[], Any],
    beside: Mapping[str, Contender] | None = None,
) -> tuple[list[Record], list[Any]]:
    """Verifies, times (again while the machine is disturbed) and verifies again. Collective.

    What is timed beside the groups, by label, is not verified.

    Returns, of the attempt with the least disturbance, on rank 0 a record per group with its
    algorithms, and the floors of memory before and, on CPUs, after it.
    """

    def attempt() -> tuple[Any, ...]:
        before = {label: num_calls(group) for label, group in bench.groups.items()}
        contenders = {label: make(group) for label, group in bench.groups.items()}
        contenders |= beside or {}
        floors = [floor()]
        timings = measure(bench.team, contenders, bench.seconds)
        floors += [floor()] if bench.device.type == "cpu" else []
        after = {label: num_calls(group) for label, group in bench.groups.items()}
        return timings, floors, {n: algorithms_used(before[n], after[n]) for n in bench.groups}

    wrong = count_wrong() | dict.fromkeys(beside or {}, 0)
    (timings, floors, algorithms), conditions = bench.watch.calmest(attempt, bench.repeats)
    for label, count in count_wrong().items():
        wrong[label] += count
    records = records_of(timings or {}, subject_of(bench), wrong)
    return [
        {**record, "algorithms": algorithms.get(record["backend"], []), **conditions}
        for record in records
    ], floors


def with_speeds(
    bench: Bench, operation: Operation, records: list[Record], facts: Record
) -> list[Record]:
    """Records with these facts and their bandwidths."""
    found = []
    for record in records:
        algbw = facts["bytes"] / (record["p50_us"] / 1e6) / GB
        busbw = algbw * operation.bus_factor(bench.team.world_size)
        found.append({**facts, **record, "algbw_gb_per_s": algbw, "busbw_gb_per_s": busbw})
    return found


def measure_point(bench: Bench, name: str, num_bytes: int, dtype: torch.dtype) -> list[Record]:
    """Verifies and times an operation. Collective.

    Returns:
        On rank 0 one record per backend; else nothing.
    """
    operation = OPERATIONS[name]
    buffers = make_buffers(bench, operation, num_bytes, dtype)
    records, floors = measure_verified(
        bench,
        partial(count_wrong, bench, operation, buffers),
        partial(make_contender, bench, operation, buffers),
        partial(memory_floor_us, bench.team, buffers.output),
    )
    num_bytes = buffers.place.num_elems * dtype.itemsize
    floor_us = dict(zip(("before", "after"), floors, strict=True))
    facts = {"op": name, "bytes": num_bytes, "floor_us": floor_us}
    return with_speeds(bench, operation, records, facts)


# ---- on devices

# Before a capture, of each call: a backend connects, and maps or registers its buffers.
NUM_ROUNDS_BEFORE_CAPTURE = 4


def captured(calls: list[Call], device: torch.device) -> Call:
    """A CUDA graph of calls on the current device, in order; replays it. Collective."""
    module: Any = torch.get_device_module(device)
    stream = module.Stream(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        for call in calls * NUM_ROUNDS_BEFORE_CAPTURE:
            call()
    module.synchronize(device)
    graph = module.CUDAGraph()
    # Thread-local, because NCCL's threads query events during the capture.
    with module.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    replay: Call = graph.replay
    return replay


# Four times the largest L2: a call's buffers are not cached from the previous call.
ROTATED_BYTES = 256 << 20
MAX_BUFFERS = 32
# Between two events: to record one took the host 16 µs under MPS on an H200, and a call 18.
CALLS_PER_EVENT = 8
# Timed beside eager calls of few bytes, which take the host's time.
ADD = "add_"
MAX_ADD_BYTES = 64 << 10
# Backends whose calls a CUDA graph can capture; Gloo's run on the host.
CAPTURABLE = ("ringcomm", "nccl")


@dataclass(frozen=True)
class Method:
    """How calls are made and timed.

    Attributes:
        clock: "events" of the device between every few calls, or "host" around a call and a
            synchronize.
        graph_calls: that each graph holds, timed by events around its replays; 0 for eager calls.
    """

    clock: str = "events"
    graph_calls: int = 0

    def record(self) -> dict[str, Any]:
        """The fields of a record."""
        mode = "graph" if self.graph_calls else "eager"
        clock = "events" if self.graph_calls else self.clock
        return {"mode": mode, "clock": clock, "calls_per_graph": self.graph_calls or None}


@dataclass(frozen=True)
class Point:
    """A point and its method."""

    name: str
    num_bytes: int
    dtype: torch.dtype
    method: Method

    @property
    def operation(self) -> Operation:
        """The operation of that name."""
        return OPERATIONS[self.name]


def _make_sets(bench: Bench, placement: Placement, point: Point) -> list[Buffers]:
    """Enough buffers that the ranks of a device exceed its caches."""
    together = point.num_bytes * placement.max_ranks(bench.team.world_size)
    count = min(MAX_BUFFERS, -(-ROTATED_BYTES // max(1, together)))
    make = partial(make_buffers, bench, point.operation, point.num_bytes, point.dtype)
    return [make() for _ in range(count if point.operation.has_data else 1)]


def _groups(bench: Bench, method: Method) -> dict[str, Any]:
    """The groups, by label, that support this method."""
    return {
        label: group
        for label, group in bench.groups.items()
        if not isinstance(group, Communicator)
        and (not method.graph_calls or dist.get_backend(group) in CAPTURABLE)
    }


def _by_events(bench: Bench, calls: list[Call]) -> Contender:
    """Eager calls in turn, several between two events."""
    turns = itertools.cycle(calls)

    def several() -> None:
        for _ in range(CALLS_PER_EVENT):
            next(turns)()

    return EventContender(several, bench.align, device=bench.device, num_calls=CALLS_PER_EVENT)


def _contender(bench: Bench, point: Point, sets: list[Buffers], group: Any) -> Contender:
    wait = bench.align
    calls = [point.operation.bound(buffers, group) for buffers in sets]
    if point.method.graph_calls:
        in_turn = [calls[position % len(calls)] for position in range(point.method.graph_calls)]
        replay = captured(in_turn, bench.device)
        return EventContender(replay, wait, device=bench.device, num_calls=len(in_turn))
    if point.method.clock == "events":
        return _by_events(bench, calls)
    turns = itertools.cycle(calls)

    def until_done() -> None:
        next(turns)()
        torch.get_device_module(bench.device).synchronize(bench.device)

    return Contender(until_done, wait)


def measure_device_point(bench: Bench, placement: Placement, point: Point) -> list[Record]:
    """Verifies and times a point. Collective.

    Returns:
        On rank 0 one record per backend that can be called this way; else nothing.
    """
    bench = replace(bench, groups=_groups(bench, point.method))
    if not bench.groups:
        return []
    sets = _make_sets(bench, placement, point)
    num_bytes = sets[0].place.num_elems * point.dtype.itemsize
    point = replace(point, num_bytes=num_bytes)
    operation, world_size = point.operation, bench.team.world_size

    def prepare(call: Call) -> Call:
        return captured([call], bench.device) if point.method.graph_calls else call

    # Of the host: what any operation of torch costs it.
    is_small = point.method == Method() and num_bytes <= MAX_ADD_BYTES and operation.has_data
    records, (speeds, *_) = measure_verified(
        bench,
        partial(count_wrong, bench, operation, sets[0], prepare),
        partial(_contender, bench, point, sets),
        partial(measure_speeds, bench.team, placement),
        {ADD: _by_events(bench, [partial(sets[0].output.add_, 0)])} if is_small else {},
    )
    in_memory = operation.memory_factor(world_size) * num_bytes * placement.share(world_size)
    floor_us = speeds.floor_us(in_memory, operation.bus_factor(world_size) * num_bytes)
    facts = {
        "op": point.name,
        "bytes": num_bytes,
        "count": sets[0].place.num_elems,
        "dtype": str(point.dtype).removeprefix("torch."),
        "reduction": "sum",
        **point.method.record(),
        "num_buffers": len(sets),
        **speeds.record(),
        "floor_us": floor_us,
    }
    found = with_speeds(bench, operation, records, facts)
    return [{**record, "share_of_floor": floor_us / record["p50_us"]} for record in found]
