"""One point of a sweep on devices: eager or in CUDA graphs, on alternating buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cells import Record
from groups import Communicator
from operations import OPERATIONS, Buffers, Operation
from placement import Placement, measure_speeds
from point import count_wrong, finished, make_buffers, measure_verified
from race import Bench, EventContender

from ringcomm.measure.timing import Contender

# Before a capture, of each call: a backend connects, and maps or registers its buffers.
NUM_ROUNDS_BEFORE_CAPTURE = 4


def captured(calls: list[Callable[[], object]], device: torch.device) -> Callable[[], object]:
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
    replay: Callable[[], object] = graph.replay
    return replay


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call that cycles through ``calls``."""
    turns = itertools.cycle(calls)

    def call() -> None:
        next(turns)()

    return call


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


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _contender(bench: Bench, point: Point, sets: list[Buffers], group: Any) -> Contender:
    wait = bench.align
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

    def prepare(call: Callable[[], object]) -> Callable[[], object]:
        return captured([call], bench.device) if point.method.graph_calls else call

    attempt, weather, wrong = measure_verified(
        bench,
        partial(count_wrong, bench, operation, sets[0], prepare),
        partial(_contender, bench, point, sets),
        partial(measure_speeds, bench.team, placement),
    )
    speeds = attempt.floors[0]
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
        **weather.record(),
        "floor_us": floor_us,
    }
    records = finished(bench, operation, attempt, wrong, facts)
    return [{**record, "share_of_floor": floor_us / record["p50_us"]} for record in records]
