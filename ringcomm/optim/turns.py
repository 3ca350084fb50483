"""Which weights a backward pass reduces, agreed by the ranks before the first one.

A weight may get a gradient on some ranks only. Without an agreement the ranks would call different
collectives, or average gradients of different weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group
from ringcomm.optim.slot import Slot
from ringcomm.optim.step_facts import Groups
from ringcomm.parallel.same_gradients import check_same_gradients, largest_of, progress

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


def coming(slots: Iterable[Slot], arrived: Slot | None) -> list[Slot]:
    """The weights whose gradient the backward pass that runs now will still bring.

    Args:
        slots: the weights in question.
        arrived: the weight whose gradient has just come; None outside of a backward pass.
    """
    if arrived is None:
        return []
    task = torch._C._current_graph_task_id()
    return [slot for slot in slots if slot is not arrived and slot.will_come(task)]


class Turns:
    """The weights that the replicas reduce in this pass, in an order that all ranks share.

    The order is that in which rank 0 got its gradients in its last pass, and in the first one the
    reverse of the order in which its layers ran. A gradient that comes before its turn waits.

    Attributes:
        has_agreed: whether the ranks have agreed since forget().
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._order: list[int] = []  # indices of slots; rank 0's counts
        self._arrived: list[int] = []
        self._due: deque[Slot] = deque()
        self._awaited: set[Slot] = set()
        self.has_agreed = False

    @property
    def is_over(self) -> bool:
        """Whether nothing of the pass is left to reduce."""
        return not self._due

    def agree(self, slots: list[Slot], arrived: Slot | None) -> None:
        """Begins a pass: all weights that have or will have a gradient on any rank take turns.

        Args:
            slots: all weights.
            arrived: the weight whose gradient has just come; None outside of a backward pass.

        Collective.
        """
        self._keep_order(slots)
        self._awaited = set(coming(slots, arrived))
        has = [int(slot in self._awaited or slot.has_grad) for slot in slots]
        positions = [0] * len(slots)
        if self._group.rank() == 0:
            for position, index in enumerate(self._order):
                positions[index] = position
        for slot in slots:
            if not slot.param.requires_grad:  # frozen on this rank, which may need it to the end
                positions[slot.index] = len(slots)
        found = largest_of(has + positions, (self._group,), slots[0].local.device)
        union = [slot for slot in slots if found[slot.index]]
        self._due = deque(sorted(union, key=lambda slot: found[len(slots) + slot.index]))
        self._arrived = [] if arrived is None else [arrived.index]
        self.has_agreed = True

    def _keep_order(self, slots: list[Slot]) -> None:
        if len(self._order) != len(slots):
            uses = sorted(slots, key=lambda slot: (-slot.first_use, -slot.index))
            self._order = [slot.index for slot in uses]
        if self._order[: len(self._arrived)] != self._arrived:
            moved = set(self._arrived)
            self._order = self._arrived + [i for i in self._order if i not in moved]

    def came(self, slot: Slot) -> bool:
        """Notes this rank's gradient; returns whether the pass awaited it."""
        if slot not in self._awaited:
            return False
        self._awaited.remove(slot)
        self._arrived.append(slot.index)
        return True

    def due(self, *, all_of_them: bool = False) -> Iterator[Slot]:
        """The weights whose turn it is, up to the first whose gradient is still to come."""
        while self._due and (all_of_them or self._due[0] not in self._awaited):
            slot = self._due.popleft()
            self._awaited.discard(slot)
            yield slot

    def forget(self) -> None:
        """Before a step."""
        self._due.clear()
        self._awaited.clear()
        self.has_agreed = False


class SameWeights:
    """Has all ranks of shards reduce the same weights at the same times, or none any.

    Gathers of weights lie between the gradients, so that ranks cannot wait for each other's turn.
    """

    def __init__(self, groups: Groups) -> None:
        """`groups` are those of a mesh, whose ranks share the weights."""
        self._groups = groups
        self._expected: set[Slot] = set()
        self.has_agreed = False

    def expects(self, slot: Slot) -> bool:
        """Whether the ranks have agreed on this weight's gradient, which is here."""
        is_expected = slot in self._expected
        self._expected.discard(slot)
        return is_expected

    def agree(self, slots: Collection[Slot], arrived: Slot | None) -> None:
        """Compares which weights have or will get a gradient, in how many backward passes.

        Args:
            slots: the weights of the shards.
            arrived: the weight whose gradient has just come; None outside of a backward pass.

        Raises:
            RuntimeError: on all ranks, where they differ; nothing has been written in this pass.

        Collective.
        """
        expected = {*coming(slots, arrived), *([] if arrived is None else [arrived])}
        task = torch._C._current_graph_task_id()
        mine = [
            progress(
                slot.num_arrived - (slot.num_arrived > 0 and slot.arrived_in == task),
                is_coming=slot in expected,
                is_by_hand=slot.num_arrived == 0 and slot.has_grad,
            )
            for slot in slots
        ]
        check_same_gradients(
            [slot.name for slot in slots],
            mine,
            self._groups,
            next(iter(slots)).local.device,
            who="WeightShards or fully_shard",
            instead="train replicas with group=",
        )
        self._expected = expected.difference([arrived])
        self.has_agreed = True

    def forget(self) -> None:
        """Before a step."""
        self._expected.clear()
        self.has_agreed = False
