"""Calls timed by a device's events, one by one or as CUDA graphs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.bench.interleave import Contender
from ringcomm.bench.ranks import Team

# Before a capture: what a backend does once, connecting say, must not be a part of the graph.
NUM_CALLS_BEFORE_CAPTURE = 3


@dataclass
class EventContender(Contender):
    """One backend's call on a device; the time from an event after a call to that after the next.

    The host does not wait between calls: where the device is the quicker one, this is the time
    that the host needs to make a call.

    Attributes:
        device: whose current stream has the events.
        num_calls: that one ``call`` makes: more than one in a graph.
    """

    device: torch.device | str = "cuda"
    num_calls: int = 1

    def first_call_s(self) -> float:
        """Seconds of a call until the device has done it."""
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
    """What ranks do before a block: they wait for their devices, then for each other."""

    def wait() -> None:
        torch.get_device_module(device).synchronize(device)
        team.share(None)

    return wait


def captured(calls: Sequence[Callable[[], None]], device: torch.device) -> Callable[[], None]:
    """A CUDA graph of calls on the current device, in order; replays it. Collective."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls[:NUM_CALLS_BEFORE_CAPTURE]:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Thread-local: threads of NCCL's that query events are none of this capture's business.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def rotating(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """A call that is each of ``calls`` in turn."""
    turns = itertools.cycle(calls)

    def call() -> None:
        next(turns)()

    return call
