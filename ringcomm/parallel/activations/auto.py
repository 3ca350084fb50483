"""Partitioned activations where they have no room otherwise, and only there (ZeRO-R, 6.1)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group
from ringcomm.parallel.activations.arena import Arena
from ringcomm.parallel.activations.partition import Part, Partitioned, PartitionSaver
from ringcomm.parallel.activations.saved_tensors import SavedTensors

_log = logging.getLogger("ringcomm")

Choice = Literal["whole", "partition", "partition+cpu"]


class _Entered(NamedTuple):
    """A context that was entered, and what measures in it."""

    hooks: AbstractContextManager[object]
    measures: _Measured | None


class Auto:
    """What auto() returns: a context, entered for each forward pass.

    Attributes:
        limit_bytes: the lowest of the ranks'.
        saved_bytes: the plan, the highest of the ranks'; None before it was measured.
        choice: "whole", "partition" or "partition+cpu"; None before there is a plan.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        limit_bytes: int | None,
        saved_bytes: int | None,
        device: torch.device,
        *,
        min_elems: int,
        arena: Arena | None,
    ) -> None:
        """Collective."""
        self._group, self._device = resolve_group(group), device
        self._shards = PartitionSaver(group, None, min_elems=min_elems, arena=arena)
        self._host = PartitionSaver(group, "cpu", min_elems=min_elems)
        self._entered: list[_Entered] = []
        limit, problem = _checked(limit_bytes, saved_bytes, device)
        # The others are not left waiting for a rank that has none.
        lowest, plan, is_wrong = self._highest(
            -limit, -1 if saved_bytes is None else saved_bytes, problem != ""
        )
        if is_wrong:
            raise ValueError(problem or "another rank has no valid limit_bytes or saved_bytes")
        self.limit_bytes = -lowest
        self.saved_bytes: int | None = None
        self.choice: Choice | None = None
        if plan >= 0:
            self._choose(plan)

    def __enter__(self) -> Partitioned:
        hooks: AbstractContextManager[object] = nullcontext()
        counters, measures = Partitioned(), None
        if self.choice is None:
            measures = _Measured(self._host, self.limit_bytes)
            hooks, counters = measures.hooks(), self._host.counters
        elif self.choice != "whole":
            saver = self._shards if self.choice == "partition" else self._host
            hooks, counters = saver.hooks(), saver.counters
        hooks.__enter__()
        self._entered.append(_Entered(hooks, measures))
        return counters

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        hooks, measures = self._entered.pop()
        hooks.__exit__(kind, error, trace)
        if measures is not None and error is None and self.choice is None:
            (plan,) = self._highest(measures.saved_bytes)
            self._choose(plan)

    def _highest(self, *numbers: int) -> list[int]:
        """The highest of the ranks', each. Collective."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def _choose(self, plan: int) -> None:
        self.saved_bytes = plan
        shard_bytes = -(-plan // self._group.size())
        if plan <= self.limit_bytes:
            self.choice = "whole"
            return
        self.choice = "partition" if shard_bytes <= self.limit_bytes else "partition+cpu"
        if self._group.rank() == 0:
            _log.warning(
                "checkpoints of %d bytes have no room in %d: activations.auto() keeps 1/%d of them"
                " on each rank, %d bytes%s",
                plan,
                self.limit_bytes,
                self._group.size(),
                shard_bytes,
                ", in host memory" if self.choice == "partition+cpu" else "",
            )


class _Whole:
    """A saved tensor as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Measured(SavedTensors[_Whole | Part]):
    """Keeps tensors whole while they have room, and shards of the others in host memory.

    What has room depends on sizes and their order alone, so that all ranks do the same.

    Attributes:
        saved_bytes: of whole tensors so far.
    """

    def __init__(self, host: PartitionSaver, limit_bytes: int) -> None:
        super().__init__()
        self.saved_bytes = 0
        self._host, self._limit_bytes = host, limit_bytes

    def takes(self, tensor: Tensor) -> bool:
        """See SavedTensors."""
        return self._host.takes(tensor)

    def keep(self, tensor: Tensor) -> _Whole | Part:
        """See SavedTensors."""
        self.saved_bytes += tensor.nbytes
        if self.saved_bytes <= self._limit_bytes:
            return _Whole(tensor)
        return self._host.keep(tensor)

    def restore(self, kept: _Whole | Part) -> Tensor:
        """Collective, where it was partitioned; see SavedTensors."""
        return kept.tensor if isinstance(kept, _Whole) else self._host.restore(kept)


def _checked(
    limit_bytes: int | None, saved_bytes: int | None, device: torch.device
) -> tuple[int, str]:
    """The limit, and what is wrong with the arguments."""
    if limit_bytes is None and device.type != "cuda":
        return 0, f"limit_bytes has no default for {device.type}: give it in bytes"
    if limit_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit_bytes = free_bytes + cached
    for name, number in (("limit_bytes", limit_bytes), ("saved_bytes", saved_bytes)):
        if number is not None and number < 0:
            return 0, f"{name} is 0 or more, got {number}"
    return limit_bytes, ""


def auto(
    group: dist.ProcessGroup | None = None,
    *,
    limit_bytes: int | None = None,
    saved_bytes: int | None = None,
    device: torch.device | str | None = None,
    min_elems: int = 1 << 14,
    arena: Arena | None = None,
) -> Auto:
    """partition(), where checkpoints have no room otherwise, and only there.

        room = activations.auto(tensor_parallel_group, limit_bytes=8 << 30)
        for batch in batches:
            with room:
                loss = loss_of(model, batch)
            loss.backward()

    If the plan exceeds the limit, shards are kept on the device; if these do as well, in host
    memory. Rank 0 says so once, as a warning of the logger "ringcomm". Without a plan the first
    forward pass is measured, and keeps within the limit: tensors that have no room are in shards in
    host memory already.

    Args:
        group: as partition()'s.
        limit_bytes: that checkpoints may take on a device, the least of all ranks' counts; None on
            CUDA for what is free now, once model and optimizer are there. What a backward pass
            takes besides is to be left out of it.
        saved_bytes: the plan, the highest of all ranks' counts, such as the bytes of the
            blocks' inputs; None to measure it, by what partition() would take in one forward pass.
        device: of the activations; None for torch.get_default_device().
        min_elems: as partition()'s.
        arena: as partition()'s.

    Returns:
        A context, which may be entered again and again, and gives partition()'s counters.

    Raises:
        ValueError: an argument is out of its range, also another rank's; a CPU has no limit.

    Collective: an all_reduce of 24 bytes, one of 8 after a measured forward pass; in it as
    partition() is. The ranks decide alike.
    """
    where = torch.device(device or torch.get_default_device())
    return Auto(group, limit_bytes, saved_bytes, where, min_elems=min_elems, arena=arena)
