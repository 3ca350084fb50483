"""Gradients of replicas become one: averaged inside the backward pass, weight by weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group

Done = Callable[[Tensor], None]


def is_ringcomm(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group has ringcomm's own operators for tensors there."""
    try:
        return group._get_backend(device).name() == "ringcomm"
    except RuntimeError:
        return False


class Replicas:
    """A data-parallel group that averages gradients, one after the other or behind the backward.

    Overlapped, a gradient waits for its sum while the backward pass goes on; those that wait take
    at most `max_bytes`.
    """

    def __init__(self, group: dist.ProcessGroup, overlap: bool, max_bytes: int) -> None:
        self.group = resolve_group(group)
        self.overlap, self._max_bytes = overlap, max_bytes
        # For the operator that reduces, updates and gathers; None where there is none.
        is_one_pass = not overlap and is_ringcomm(self.group, torch.device("cpu"))
        self.one_pass_name = self.group.group_name if is_one_pass else None
        self._waiting: deque[tuple[dist.Work, Tensor, Done]] = deque()
        self._waiting_bytes = 0

    def average(self, grad: Tensor, done: Done) -> None:
        """Has `done` called with the mean of all ranks' `grad`, which is overwritten.

        Collective; equal bits on all ranks.
        """
        if not self.overlap:
            dist.all_reduce(grad, dist.ReduceOp.AVG, self.group)
            done(grad)
            return
        while self._waiting and self._waiting_bytes + grad.nbytes > self._max_bytes:
            self._finish_oldest()
        work = dist.all_reduce(grad, dist.ReduceOp.AVG, self.group, async_op=True)
        self._waiting.append((work, grad, done))
        self._waiting_bytes += grad.nbytes

    def drain(self) -> None:
        """Returns once nothing waits."""
        while self._waiting:
            self._finish_oldest()

    def forget(self) -> None:
        """Waits for what is under way and drops it."""
        for work, _, _ in self._waiting:
            work.wait()
        self._waiting.clear()
        self._waiting_bytes = 0

    def _finish_oldest(self) -> None:
        work, grad, done = self._waiting.popleft()
        self._waiting_bytes -= grad.nbytes
        work.wait()
        done(grad)
