"""Agreement of the ranks on the weights that a backward pass reduces, before the first reduction.

A weight may get a gradient on some ranks only. Without an agreement the ranks would call different
collectives, or average gradients of different weights.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backward_pass import current_pass
from ringcomm.optim.slot import Slot
from ringcomm.parallel.flat_collectives import fuses_updates, largest_of
from ringcomm.parallel.gradient_placeholder import check_same_gradients, progress
from ringcomm.torch_names import devices_of


def _coming(slots: Iterable[Slot], arrived: Slot | None) -> set[Slot]:
    """The weights whose gradient this backward pass will still produce after `arrived`, if any."""
    if arrived is None:
        return set()
    current = current_pass()
    return {slot for slot in slots if slot is not arrived and slot.will_come(current)}


class Replicas:
    """A group, the weights whose gradients it averages, and those of this pass in a common order.

    The order is that of rank 0's gradients in its last pass; in the first pass, the reverse of the
    order in which rank 0's layers ran. A gradient that arrives before its turn waits. With
    `overlap` the backward pass continues while one gradient is reduced; by default on devices, as
    far as reduction and update are not one operator.

    Attributes:
        slots: the weights, with the same indices on all ranks.
        is_checked: whether a gradient since agree() was seen to be finite.
        was_told: whether agree() has raised here because of another rank, which then waits no more.
    """

    def __init__(self, group: dist.ProcessGroup, slots: list[Slot], overlap: bool | None) -> None:
        on_cpu = slots[0].param.device.type == "cpu"  # where no core is free for it
        self._group, self.slots = group, slots
        self._overlap = not on_cpu if overlap is None else overlap
        self._may_fuse = overlap is not True
        self._one_pass_names: dict[torch.device, str] = {}
        for slot in slots:
            slot.replicas = weakref.proxy(self)
        self.is_checked = self.was_told = False
        self._order: list[int] = []  # indices of slots; rank 0's counts
        self._arrived: list[int] = []
        self._to_reduce: deque[Slot] = deque()  # of this pass
        self._awaited: set[Slot] = set()
        # The reduction in progress: the gradient, and the callback for its mean.
        self._pending: tuple[dist.Work, Tensor, Callable[[Tensor], None]] | None = None

    def one_pass_name(self, device: torch.device) -> str:
        """The group's name for the operator that reduces, updates and gathers; "" for its parts."""
        if device not in self._one_pass_names:  # asked at every gradient
            kinds = [kind.type for kind in devices_of(self._group)]
            is_one = device.type in kinds and self._may_fuse and fuses_updates(self._group, device)
            self._one_pass_names[device] = self._group.group_name if is_one else ""
        return self._one_pass_names[device]

    # ---- turns

    @property
    def is_over(self) -> bool:
        """Whether all reductions of the pass are done."""
        return not self._to_reduce

    def agree(self, arrived: Slot | None, fails: bool = False) -> bool:
        """Selects the weights that have a gradient on any rank; whether any is in a backward pass.

        `arrived` is the weight whose gradient has just arrived; None outside a backward pass, where
        a rank takes part in the passes that only others make, or `fails`: then the others raise
        RuntimeError. Collective.
        """
        self.drain()  # a gradient of the pass before does not speak for this one
        slots = self.slots
        if len(self._order) != len(slots):
            uses = sorted(slots, key=lambda slot: (-slot.first_use, -slot.index))
            self._order = [slot.index for slot in uses]
        if self._order[: len(self._arrived)] != self._arrived:
            moved = set(self._arrived)
            self._order = self._arrived + [i for i in self._order if i not in moved]
        self._awaited = _coming(slots, arrived)
        has = [int(slot in self._awaited or slot.has_grad) for slot in slots]
        positions = [0] * len(slots)
        if self._group.rank() == 0:
            for position, index in enumerate(self._order):
                positions[index] = position
        for slot in slots:
            if not slot.param.requires_grad:  # frozen on this rank, which may need it until the end
                positions[slot.index] = len(slots)
        facts = [*has, *positions, 2 if fails else int(arrived is not None)]
        found = largest_of(facts, (self._group,))
        self.was_told = found[-1] > 1 and not fails
        if self.was_told:
            raise RuntimeError("step() has raised on another rank of the group: see its error")
        union = [slot for slot in slots if found[slot.index]]
        self._to_reduce = deque(sorted(union, key=lambda slot: found[len(slots) + slot.index]))
        self._arrived = [] if arrived is None else [arrived.index]
        self.is_checked = False
        return found[-1] > 0

    def note_arrival(self, slot: Slot) -> bool:
        """Notes this rank's gradient; returns whether the pass awaited it."""
        if slot not in self._awaited:
            return False
        self._awaited.remove(slot)
        self._arrived.append(slot.index)
        return True

    def take_ready(self, *, all_of_them: bool) -> Iterator[Slot]:
        """Removes and yields weights in order, up to the first whose gradient is missing."""
        while self._to_reduce and (all_of_them or self._to_reduce[0] not in self._awaited):
            slot = self._to_reduce.popleft()
            self._awaited.discard(slot)
            yield slot

    # ---- reductions

    def average(self, grad: Tensor, done: Callable[[Tensor], None]) -> None:
        """Calls `done` with the mean of all ranks' `grad`, with equal bits. Collective."""
        work = dist.all_reduce(grad, dist.ReduceOp.AVG, self._group, async_op=self._overlap)
        self.drain()
        if self._overlap:
            self._pending = work, grad, done
        else:
            done(grad)

    def drain(self) -> None:
        """Returns when no reduction is in progress."""
        if self._pending is not None:
            (work, grad, done), self._pending = self._pending, None
            work.wait()
            done(grad)

    def forget(self) -> None:
        """Before a step, or the second of two passes; after a pass that raised, drops its rest."""
        self.drain()
        self.was_told = False
        self._to_reduce.clear()
        self._awaited.clear()


class SameWeights:
    """Ensures that all ranks of shards reduce the same weights in the same order, or none.

    Weights are gathered between gradients, so ranks cannot reorder gradients by waiting.
    """

    def __init__(self, slots: list[Slot]) -> None:
        """Slots are those of a mesh, whose ranks shard the weights."""
        self._slots = slots
        self._expected: set[Slot] = set()
        self.has_agreed = False

    def expect(self, slot: Slot) -> None:
        """Called when a gradient arrives: the ranks agree on it if they have not; see agree()."""
        if slot in self._expected:
            self._expected.discard(slot)
        else:
            self.agree(slot)

    def agree(self, arrived: Slot | None) -> None:
        """Compares which weights have or will get a gradient, in how many backward passes.

        Raises RuntimeError on all ranks if they differ; nothing has been written in this pass.
        Collective.
        """
        self._expected = _coming(self._slots, arrived)
        current = current_pass()
        mine = {
            slot.name: progress(
                slot.num_arrived - (slot.num_arrived > 0 and slot.arrived_in == current),
                is_coming=slot is arrived or slot in self._expected,
                is_by_hand=slot.num_arrived == 0 and slot.has_grad,
            )
            for slot in self._slots
        }
        check_same_gradients(
            mine,
            self._slots[0].peers,
            system="fully_shard",
            alternative="train replicas with group=",
        )
        self.has_agreed = True

    def forget(self) -> None:
        """Before a step, or the second of two passes."""
        self._expected.clear()
        self.has_agreed = False
