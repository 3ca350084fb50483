"""One point of a sweep on devices: eager or in CUDA graphs, on alternating buffers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from groups import Communicator
from operations import OPERATIONS, Buffers, Operation
from placement import Placement, Speeds, measure_speeds, memory_bytes
from point import GB, Bench, algorithms_used, make_buffers, num_calls
from report import records_of

from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import Contender, Timings, measure

# Before a capture, of each call: a backend connects, and maps or registers its buffers.
NUM_ROUNDS_BEFORE_CAPTURE = 4


@dataclass
class EventContender(Contender):
    """One backend's calls on a device; the time from an event after some to that after the next.

    The host does not wait between calls. If the device is faster than the host, this is the host's
    time per call.

    Attributes:
        device: the device whose current stream has the events.
        num_calls: the calls in one ``call``.
    """

    device: torch.device | str = "cuda"
    num_calls: int = 1

    def first_call_s(self) -> float:
        """Seconds of a call until the device has completed it."""
        begin = time.perf_counter()
        self.call()
        torch.get_device_module(self.device).synchronize(self.device)
        return time.perf_counter() - begin

    def block(self) -> list[float]:
        """Seconds of each call of a block, on this rank's device. Collective."""
        module: Any = torch.get_device_module(self.device)
        events = [module.Event(enable_timing=True) for _ in range(self.calls_per_block + 1)]
        self.align()
        self.call()
        call = self.call
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        module.synchronize(self.device)
        return [
            begin.elapsed_time(end) / 1e3 / self.num_calls
            for begin, end in itertools.pairwise(events)
        ]


def align(team: Team, device: torch.device) -> Callable[[], None]:
    """Aligns ranks before a block: they wait for their devices, then for each other."""

    def wait() -> None:
        torch.get_device_module(device).synchronize(device)
        team.share(None)

    return wait


def captured(calls: list[Callable[[], None]], device: torch.device) -> Callable[[], None]:
    """A CUDA graph of calls on the current device, in order; replays it. Collective."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls * NUM_ROUNDS_BEFORE_CAPTURE:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Thread-local, because NCCL's threads query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def rotating(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """A call that cycles through ``calls``."""
    turns = itertools.cycle(calls)

    def call() -> None:
        next(turns)()

    return call


CLOCKS = ("events", "host")
# Four times the largest L2: a call's buffers are not cached from the previous call.
ROTATED_BYTES = 256 << 20
MAX_BUFFERS = 32
# Between two events: to record one took the host 16 µs under MPS on an H200, and a call 18.
CALLS_PER_EVENT = 8
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


@dataclass(frozen=True)
class _Attempt:
    timings: dict[str, Timings] | None
    speeds: Speeds
    algorithms: dict[str, list[str]]


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


def _once(bench: Bench, point: Point, calls: list[Callable[[], None]]) -> Callable[[], None]:
    """The calls in turn; in graph mode a graph of one round."""
    if not point.method.graph_calls:
        return rotating(calls)
    return captured(calls, bench.device)


def _count_wrong(bench: Bench, point: Point, buffers: Buffers) -> dict[str, int]:
    """Wrong elements of all ranks together, by label, after one call on known integers."""
    wrong = {}
    for label, group in _groups(bench, point.method).items():
        call = _once(bench, point, [point.operation.bound(buffers, group)])
        wrong[label] = sum(bench.team.share(point.operation.verify(call, buffers, bench.team)))
    buffers.clear()
    return wrong


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def _contender(bench: Bench, point: Point, sets: list[Buffers], group: Any) -> Contender:
    wait = align(bench.team, bench.device)
    calls = [point.operation.bound(buffers, group) for buffers in sets]
    if point.method.graph_calls:
        in_turn = [calls[position % len(calls)] for position in range(point.method.graph_calls)]
        replay = captured(in_turn, bench.device)
        return EventContender(replay, wait, device=bench.device, num_calls=len(in_turn))
    call = rotating(calls)
    if point.method.clock == "events":
        several = partial(_repeat, call, CALLS_PER_EVENT)
        return EventContender(several, wait, device=bench.device, num_calls=CALLS_PER_EVENT)

    def until_done() -> None:
        call()
        torch.get_device_module(bench.device).synchronize(bench.device)

    return Contender(until_done, wait)


def _time_once(
    bench: Bench, placement: Placement, point: Point, sets: list[Buffers], seconds: float
) -> _Attempt:
    groups = _groups(bench, point.method)
    counts = {label: num_calls(group) for label, group in groups.items()}
    contenders = {label: _contender(bench, point, sets, group) for label, group in groups.items()}
    speeds = measure_speeds(bench.team, placement)
    timings = measure(bench.team, contenders, seconds)
    algorithms = {
        label: algorithms_used(counts[label], num_calls(group)) for label, group in groups.items()
    }
    return _Attempt(timings, speeds, algorithms)


def measure_device_point(
    bench: Bench, placement: Placement, point: Point, seconds: float, max_repeats: int
) -> list[dict[str, Any]]:
    """Verifies, times (again while the machine is disturbed) and verifies again. Collective.

    Returns:
        On rank 0 one record per backend that can be called this way; else nothing.
    """
    if not _groups(bench, point.method):
        return []
    sets = _make_sets(bench, placement, point)
    num_bytes = sets[0].place.num_elems * point.dtype.itemsize
    point = replace(point, num_bytes=num_bytes)
    wrong = _count_wrong(bench, point, sets[0])
    attempt, weather = bench.watch.calmest(
        lambda: _time_once(bench, placement, point, sets, seconds), max_repeats
    )
    for label, count in _count_wrong(bench, point, sets[0]).items():
        wrong[label] += count
    if attempt.timings is None:
        return []
    subject = bench.subject if bench.subject in wrong else next(iter(wrong))
    facts = {
        "op": point.name,
        "bytes": num_bytes,
        "count": sets[0].place.num_elems,
        "dtype": str(point.dtype).removeprefix("torch."),
        "reduction": "sum",
        **point.method.record(),
        "num_buffers": len(sets),
        **attempt.speeds.record(),
        **weather.record(),
    }
    found = records_of(attempt.timings, subject, wrong)
    return [
        {**facts, **record, **_bandwidths(bench, placement, point, attempt, record)}
        for record in found
    ]


def _bandwidths(
    bench: Bench, placement: Placement, point: Point, attempt: _Attempt, record: dict[str, Any]
) -> dict[str, Any]:
    """The bandwidths from a backend's median call."""
    world_size, num_bytes = bench.team.world_size, point.num_bytes
    algbw = num_bytes / (record["p50_us"] / 1e6) / GB
    bus_factor = point.operation.bus_factor(world_size)
    in_memory = memory_bytes(point.name, num_bytes, placement, world_size)
    floor_us = attempt.speeds.floor_us(in_memory, bus_factor * num_bytes)
    return {
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * bus_factor,
        "floor_us": floor_us,
        "share_of_floor": floor_us / record["p50_us"],
        "algorithms": attempt.algorithms[record["backend"]],
    }
