"""What the memory of a training step is for: allocations in order, and the parts they add up to."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from typing import Literal

Mark = Literal["begin", "step", "forward", "kept", "recompute", "recomputed", "made", "done"]
"""The model is there. In a step: it begins; a forward pass begins, and ends; so does a checkpoint's
recomputation, inside the backward pass; the backward pass ends; the step ends."""

PARTS = ("parameters", "states", "gradients", "activations", "updates", "temporaries")

# Where in a step an allocation is made: by the mark before it.
_ORIGINS: dict[Mark, str] = {
    "begin": "other",
    "step": "other",
    "forward": "forward",
    "kept": "backward",
    "recompute": "recompute",
    "recomputed": "backward",
    "made": "other",
    "done": "other",
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes of a training step: of each part the most at a time, which is not the same time.

    Attributes:
        parameters: with buffers.
        states: the optimizer's, and what else stays from step to step.
        gradients: of parameters, that autograd has made as tensors, or that wait for step(), as
            tensors or as what a layer makes them of.
        activations: what a forward pass keeps for the backward pass, and a checkpoint recomputes.
        updates: what ringcomm's operators take inside; AdaLomo's one gradient in fp32 is there.
        temporaries: all else, such as gradients of activations, and the one that AdaLomo makes of
            an embedding's table.
        peak: the most of all parts together.
        at_peak: the parts then.
    """

    parameters: int
    states: int
    gradients: int
    activations: int
    updates: int
    temporaries: int
    peak: int
    at_peak: dict[str, int]


@dataclasses.dataclass
class _Allocation:
    num_bytes: int
    origin: str
    begin: int
    end: float = math.inf
    is_gradient: bool = False


class Ledger:
    """Allocations and marks in the order of their time."""

    def __init__(self) -> None:
        self._now = 0
        self._origin = "model"
        self._live: dict[Hashable, _Allocation] = {}
        self._all: list[_Allocation] = []
        self._marks: dict[Mark, list[int]] = {mark: [] for mark in _ORIGINS}

    def mark(self, mark: Mark) -> None:
        """A phase of the step begins or ends."""
        self._now += 1
        self._marks[mark].append(self._now)
        self._origin = _ORIGINS[mark]

    def allocate(self, key: Hashable, num_bytes: int, *, in_update: bool = False) -> None:
        """`key` is the allocation's until it is freed."""
        self._now += 1
        made = _Allocation(num_bytes, "update" if in_update else self._origin, self._now)
        self._live[key] = made
        self._all.append(made)

    def free(self, key: Hashable) -> None:
        """Nothing, where it was made before the ledger began."""
        self._now += 1
        found = self._live.pop(key, None)
        if found is not None:
            found.end = self._now

    def set_gradient(self, key: Hashable) -> None:
        """The allocation is a parameter's gradient."""
        if key in self._live:
            self._live[key].is_gradient = True

    def parts(self) -> Parts:
        """Of the last step."""
        start = self._marks["step"][-1]
        changes: list[tuple[int, str, int]] = []
        for made in self._all:
            if made.end > start:
                for begin, end, part in self._roles(made, start):
                    changes.append((begin, part, made.num_bytes))
                    if end < math.inf:
                        changes.append((int(end), part, -made.num_bytes))
        return _largest(changes, start)

    def _next(self, mark: Mark, after: float) -> float:
        times = self._marks[mark]
        found = bisect_right(times, after)
        return times[found] if found < len(times) else math.inf

    def _roles(self, made: _Allocation, start: int) -> Iterator[tuple[int, float, str]]:
        """(from, to, part) of an allocation."""
        begin, end = made.begin, made.end
        if made.origin == "model" or begin < start:
            yield start, end, "parameters" if made.origin == "model" else "states"
        elif made.origin == "update":
            yield begin, end, "updates"
        elif made.origin in ("forward", "recompute"):
            kept = self._next("kept" if made.origin == "forward" else "recomputed", begin)
            made_at = self._next("made", begin)
            if end <= kept:
                yield begin, end, "temporaries"
            elif end <= made_at:
                yield begin, end, "activations"
            else:
                # A layer's input that is held for its weight's gradient, from when the backward
                # pass has gone on to another segment.
                since = min(self._next("recompute", kept), made_at)
                yield begin, since, "activations"
                yield int(since), end, "gradients"
        elif made.is_gradient or (made.origin == "backward" and end > self._next("made", begin)):
            yield begin, end, "gradients"
        else:
            yield begin, end, "temporaries"


def _largest(changes: list[tuple[int, str, int]], start: int) -> Parts:
    """From (time, part, bytes more) of all allocations."""
    now = dict.fromkeys(PARTS, 0)
    most, at_peak, peak = dict(now), dict(now), 0
    changes.sort(key=lambda change: (change[0], change[2]))  # a change of role frees first
    begun = [change for change in changes if change[0] <= start]
    for _, part, num_bytes in begun:
        now[part] += num_bytes
    most.update(now)
    for _, part, num_bytes in changes[len(begun) :]:
        now[part] += num_bytes
        most[part] = max(most[part], now[part])
        total = sum(now.values())
        if total > peak:
            peak, at_peak = total, dict(now)
    return Parts(**most, peak=peak, at_peak=at_peak)
