"""Everything that is sent: one process group whose collectives are timed and counted.

The systems call no ``torch.distributed`` collective themselves, so this file is also the one place
that knows how bytes on the wire are read (``ringcomm.stats``) or computed (every other backend).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The operators that layers in parts communicate with.
LAYER_COLLECTIVES = (
    "all_reduce",
    "all_reduce_",
    "all_gather",
    "reduce_scatter",
    "merge_softmax_stats",
)


def all_reduce_bytes(buffer_bytes: int, world_size: int) -> float:
    """Bytes that one rank sends in an all-reduce of ``buffer_bytes``: 2(N-1)/N of it."""
    return 2 * (world_size - 1) * buffer_bytes / world_size


def scatter_or_gather_bytes(whole_bytes: int, world_size: int) -> float:
    """Bytes that one rank sends in a reduce-scatter or all-gather of ``whole_bytes``: (N-1)/N."""
    return (world_size - 1) * whole_bytes / world_size


def comparison_sign(sent: float, formula: float) -> str:
    """``=`` where both are equal, ``≈`` where only the chunks' unequal sizes show, else ``≠``.

    With 2 ranks every algorithm sends exactly what the formula says. With more, a rank whose chunk
    is longer sends some bytes more than the mean, and one-shot sends (N-1) times the buffer.
    """
    if sent == formula:
        return "="
    return "≈" if abs(sent - formula) <= 1e-3 * formula else "≠"


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a backend says it has sent from this process so far, by collective."""

    by_collective: Mapping[str, int]

    @property
    def total(self) -> int:
        """Of all collectives."""
        return sum(self.by_collective.values())

    def since(self, before: SentBytes) -> SentBytes:
        """What was sent between ``before`` and this reading."""
        earlier = before.by_collective
        return SentBytes({k: v - earlier.get(k, 0) for k, v in self.by_collective.items()})


def read_sent_bytes(backend: str) -> SentBytes | None:
    """The backend's own counters, or None where it has none (Gloo, NCCL).

    ``ringcomm.stats()`` is a mapping from (collective, algorithm) to a mapping with
    ``"sent_bytes"``: of this process, over all its groups, since its start.
    """
    stats = getattr(sys.modules.get("ringcomm"), "stats", None)
    if backend != "ringcomm" or stats is None:
        return None
    by_collective: dict[str, int] = {}
    for (name, _algorithm), counts in stats().items():
        by_collective[name] = by_collective.get(name, 0) + int(counts["sent_bytes"])
    return SentBytes(by_collective)


class Wire:
    """The collectives of one group. Each blocks, is timed, and adds to the formula's bytes.

    Attributes:
        seconds: spent inside collectives since ``reset``.
        formula_bytes: what one rank has to send for them, by the ring's formulas.
    """

    def __init__(self, backend: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.backend = backend
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._aside = SentBytes({})
        self.reset()

    def reset(self) -> None:
        """Starts counting anew; collective only in the sense that nothing may be in flight."""
        self.seconds = 0.0
        self.formula_bytes = 0.0

    def _begin(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _end(self, start: float, sent: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        self.formula_bytes += sent

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces ``tensor`` in place over the group and returns it."""
        if self.world_size > 1:
            start = self._begin()
            dist.all_reduce(tensor, op=op, group=self.group)
            self._end(start, all_reduce_bytes(tensor.nbytes, self.world_size))
        return tensor

    def from_rank_zero(self, values: list[float]) -> list[float]:
        """Rank 0's ``values`` on every rank: 8 bytes each, the job's only control traffic."""
        if self.world_size == 1:
            return values
        message = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(message, src=0, group=self.group)
        return [float(v) for v in message.tolist()]

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        if self.world_size > 1:
            dist.barrier(group=self.group)

    def sent(self) -> SentBytes | None:
        """The backend's counters now, without what was sent aside; see ``read_sent_bytes``."""
        now = read_sent_bytes(self.backend)
        return None if now is None else now.since(self._aside)

    @contextmanager
    def timing_operators(self) -> Iterator[None]:
        """Times what ringcomm's layers send inside, too; it makes all operators slower."""
        with _TimedOperators(self):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is sent inside is no part of a step: a checkpoint's, and not in ``sent``."""
        before = self.sent()
        yield
        after = self.sent()
        if before is not None and after is not None:
            extra = after.since(before).by_collective
            total = Counter(self._aside.by_collective)
            total.update(extra)
            self._aside = SentBytes(dict(total))


class _TimedOperators(TorchDispatchMode):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition("::")[2].partition(".")[0] not in LAYER_COLLECTIVES:
            return func(*args, **(kwargs or {}))
        start = self._wire._begin()
        result = func(*args, **(kwargs or {}))
        self._wire._end(start, 0.0)
        return result
