"""The ranks that share a weight agree on its gradient, before the first reduction of a pass.

A weight may get a gradient on some ranks only. Without an agreement the ranks would call different
collectives, or average gradients of different weights.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backward_pass import current_pass, will_run
from ringcomm.optim.gradient_use import GradientUse
from ringcomm.optim.gradients import Gradient
from ringcomm.optim.slot import Slot
from ringcomm.parallel.flat_collectives import fuses_updates, largest_of
from ringcomm.parallel.gradient_placeholder import check_same_gradients, progress
from ringcomm.torch_names import devices_of, without_torch_function


class _Forecast:
    """Predicts which gradients the current backward pass will still produce."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)
        self._nodes: dict[Slot, tuple[Any, Any]] = {}  # of the parameter at a place

    def after(self, arrived: Slot | None) -> set[Slot]:
        """The weights with a gradient after that of `arrived`; none outside of a backward pass."""
        if arrived is None:
            return set()
        current = current_pass()
        return {s for s in self._slots if s is not arrived and self._comes(s, current)}

    def _comes(self, slot: Slot, current: int | None) -> bool:
        if slot.first_runs or (slot.has_plain_use and slot.total is not None):
            return True
        whole = slot.whole
        if slot.arrived_in == current or not whole.requires_grad:
            return False
        place = id(whole), whole.dtype, whole.device  # a weight that moves gets a new node
        known, node = self._nodes.get(slot, (None, None))
        if known != place:
            with without_torch_function():
                node = torch.autograd.graph.get_gradient_edge(whole).node
            self._nodes[slot] = place, node
        return will_run(node)


class Alone:
    """Weights whose gradients this rank has alone, or which fully_shard has reduced.

    Attributes:
        is_checked: whether a gradient of this pass was seen to be finite.
    """

    def __init__(self, slots: list[Slot], use: GradientUse) -> None:
        self._slots, self._use = slots, use
        for slot in slots:
            slot.reducer = weakref.proxy(self)
        self.is_checked = False

    def take_turn(self, slot: Slot) -> None:
        """Uses a gradient at once if it is complete."""
        if slot.is_complete:
            self._use_gradient_of(slot)

    def end_pass(self) -> None:
        """Uses the gradients that wait: of micro-batches or segments that did not come."""
        for slot in self._slots:
            if slot.has_grad:
                self._use_gradient_of(slot)

    def _use_gradient_of(self, slot: Slot) -> None:
        gradient = slot.take(is_spent=self._use.spends)
        if gradient is not None:
            self._use.consume(slot, gradient)


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

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots: list[Slot],
        use: GradientUse,
        *,
        overlap: bool | None,
        waits_for_step: bool,
    ) -> None:
        on_cpu = slots[0].param.device.type == "cpu"  # where no core is free for it
        self._group, self.slots, self._use = group, slots, use
        self._overlap = not on_cpu if overlap is None else overlap
        self._may_fuse = overlap is not True
        self._waits_for_step = waits_for_step
        # The group's name for the operator that reduces, updates and gathers; "" for its parts.
        self._one_pass_names: dict[torch.device, str] = {}
        for slot in slots:
            slot.reducer = weakref.proxy(self)
        self.is_checked = self.was_told = False
        self._order: list[int] = []  # indices of slots; rank 0's counts
        self._arrived: list[int] = []
        self._to_reduce: deque[Slot] = deque()  # of this pass
        self._awaited: set[Slot] = set()
        self._forecast = _Forecast(slots)
        self._pending: tuple[dist.Work, Slot, Tensor] | None = None  # the reduction in progress

    # ---- turns

    def take_turn(self, slot: Slot) -> None:
        """Reduces a weight whose gradient has arrived when it is its turn, and all up to it."""
        if slot in self._awaited:
            self._awaited.remove(slot)
            self._arrived.append(slot.index)
        elif self._waits_for_step or not slot.is_complete or self._to_reduce:
            return  # a later gradient of this pass ends its step, or step() does
        else:
            self.agree(slot)
        self.take_turns()

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
        self._awaited = self._forecast.after(arrived)
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
        for slot in self._to_reduce:
            device = slot.param.device
            if device not in self._one_pass_names:
                kinds = [kind.type for kind in devices_of(self._group)]
                is_one = device.type in kinds and self._may_fuse
                is_one = is_one and fuses_updates(self._group, device)
                self._one_pass_names[device] = self._group.group_name if is_one else ""
        self.is_checked = False
        return found[-1] > 0

    def take_turns(self, *, all_of_them: bool = False) -> None:
        """Reduces weights in order, up to the first whose gradient is missing, or all of them."""
        while self._to_reduce and (all_of_them or self._to_reduce[0] not in self._awaited):
            slot = self._to_reduce.popleft()
            self._awaited.discard(slot)
            slot.num_arrived = slot.num_parts
            self._reduce(slot, slot.take(is_spent=self._use.spends))

    def end_pass(self) -> None:
        """Takes part in the reductions of passes that other ranks make. Collective."""
        self.take_turns(all_of_them=True)
        while self.agree(None):
            self.take_turns(all_of_them=True)
        self.take_turns(all_of_them=True)
        self.drain()

    # ---- reductions

    def _reduce(self, slot: Slot, gradient: Gradient | None) -> None:
        """Completes a weight by the mean of all ranks, with equal bits. Collective.

        `gradient` is None for a weight with a gradient on other ranks only.
        """
        found = torch.zeros_like(slot.param) if gradient is None else gradient.dense()
        grad = found.to(slot.grad_dtype)
        name = self._one_pass_names[slot.param.device]
        if name:
            self.drain()  # of the first gradient, which is looked at alone
            if self._use.consume_in_one_pass(name, slot, grad):
                return
        work = dist.all_reduce(grad, dist.ReduceOp.AVG, self._group, async_op=self._overlap)
        self.drain()
        if self._overlap:
            self._pending = work, slot, grad
        else:
            self._use.consume(slot, Gradient(grad))

    def drain(self) -> None:
        """Returns when no reduction is in progress."""
        if self._pending is not None:
            (work, slot, grad), self._pending = self._pending, None
            work.wait()
            self._use.consume(slot, Gradient(grad))

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
        self._slots, self._forecast = slots, _Forecast(slots)
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
        self._expected = self._forecast.after(arrived)
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
