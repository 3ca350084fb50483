"""The way of every gradient: it arrives, is counted, reduced over the ranks, and kept or applied.

docs/design/optim.md has the picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ringcomm.loss_scale import LossScale, clip_factor
from ringcomm.optim.fused_layers import Uses
from ringcomm.optim.gradients import DenseGradient, EmbeddingGradient, Gradient, LinearGradient
from ringcomm.optim.slot import Slot
from ringcomm.optim.step_facts import Groups, StepFacts, backward_of_two
from ringcomm.optim.step_options import StepOptions
from ringcomm.optim.turns import Replicas, SameWeights, Turns

_engine: Any = torch.autograd.Variable._execution_engine


class Updater(Protocol):
    """Who writes weights: the optimizer."""

    def check_model(self) -> None:
        """Called before a step's first gradient is used. Raises ValueError: see Lomo."""

    def check_lr(self, slot: Slot) -> None:
        """Raises ValueError where a weight's learning rate is none."""

    def update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """Makes a weight's step by its complete gradient times a factor."""

    def update_replicas(self, replicas: Replicas, slot: Slot, grad: Tensor, factor: float) -> bool:
        """Reduces and updates in one pass where that can be; returns whether it could."""


class GradientPath:
    """Where all weights of an optimizer stand in a step.

    Attributes:
        slots: the weights, in the order of the parameter groups.
        replicas: whose gradients are averaged; None for one of a kind. See set_replicas.
        loss_scale: None where losses are not scaled.
        is_verified: whether the model has been looked at in this step.
        is_scaled: whether this step's loss was.
        is_due: whether a gradient has come, so that step() ends a step.
        has_overflow: whether one was not finite.
        grad_norm: of the last step that looked at it.
        held_bytes: what gradients that wait for the step's end take.
    """

    def __init__(self, options: StepOptions, updater: Updater) -> None:
        """The updater may be a weak reference's proxy: it owns the path."""
        self.options = options
        self._mode, self._skips_layers = options.mode, options.overflow == "skip_layer"
        self._num_parts = options.accumulation_steps
        self.slots: list[Slot] = []
        self.replicas: Replicas | None = None
        self._turns: Turns | None = None
        self._same: dict[Groups, SameWeights] = {}
        self.loss_scale = LossScale(options.loss_scale) if options.loss_scale else None
        self.grad_norm: float | None = None
        self._updater = updater
        self._pass = "plain"  # of a backward() with two passes: "facts", then "update"
        self._factor = 1.0
        self._facts = StepFacts()
        self.held_bytes = 0
        self._has_begun = self._is_checked = self.is_verified = False
        self.is_scaled = self.is_due = self.has_overflow = False

    def set_replicas(self, replicas: Replicas) -> None:
        """Has gradients averaged from now on."""
        self.replicas, self._turns = replicas, Turns(replicas.group)

    @property
    def scale(self) -> float:
        """What gradients are multiplied by on their way here."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    # ---- arriving

    def param_arrived(self, slot: Slot) -> None:
        """See managed.Consumer."""
        if slot.handle is not None and slot.handle.num_forwards > 0:
            slot.autograd_in = torch._C._current_graph_task_id()
            if slot.arrived_in == slot.autograd_in and slot.num_arrived == self._num_parts:
                self._complete_what_is_left([slot])
            else:  # the fused uses, beside which autograd saw another, are still to come
                slot.await_more_grads()
            return
        if slot.awaits_more():
            slot.await_more_grads()
            return
        self._count(slot)
        if self._turns is not None:
            self._arrived_on_replica(self._turns, slot)
        elif slot.shards is not None:
            if slot.num_arrived == self._num_parts:
                self._expect(slot)
                self._complete_what_is_left([slot])
        elif slot.num_arrived == self._num_parts:
            self._complete_what_is_left([slot])
        if slot.num_arrived < self._num_parts:
            slot.await_more_grads()

    def _arrived_on_replica(self, turns: Turns, slot: Slot) -> None:
        if not turns.came(slot):
            if slot.num_arrived < self._num_parts or not turns.is_over:
                return  # a later gradient of this pass ends its step, or step() does
            with _arithmetic(slot):
                turns.agree(self.slots, slot)
            if not slot.is_nested:
                _engine.queue_callback(partial(self._take_turns, turns, all_of_them=True))
        self._take_turns(turns)

    def _take_turns(self, turns: Turns, *, all_of_them: bool = False) -> None:
        """Reduces whatever is due; zeros for a weight that has a gradient on other ranks only."""
        for slot in turns.due(all_of_them=all_of_them):
            slot.num_arrived = self._num_parts
            grad = slot.take_grad() if slot.has_grad else torch.zeros_like(slot.param)
            grad = grad.to(slot.grad_dtype)
            with _arithmetic(slot):
                self.complete(slot, DenseGradient(grad))

    def whole_arrived(self, slot: Slot) -> None:
        """See managed.Consumer."""
        self._expect(slot)

    def _expect(self, slot: Slot) -> None:
        """A gradient of a shard is here: the ranks have agreed on it, or do so now."""
        same = self._same.setdefault(slot.peers, SameWeights(slot.peers))
        if not same.expects(slot):
            same.agree(self._slots_of(slot.peers), slot)

    def _slots_of(self, peers: Groups) -> list[Slot]:
        return [slot for slot in self.slots if slot.peers == peers]

    def uses_arrived(self, slot: Slot, uses: Uses) -> None:
        """See managed.Consumer."""
        awaits_more = slot.awaits_more()
        if not awaits_more:
            self._count(slot)
        gradient = _of_uses(slot, uses)
        with _arithmetic(slot):
            is_beside = slot.autograd_in != slot.arrived_in and slot.autograd_will_bring()
            is_last = not (awaits_more or is_beside or slot.num_arrived < self._num_parts)
            if slot.has_grad or not is_last:  # micro-batches, or uses that autograd sees
                slot.add_grad(gradient.dense())
            if is_last:
                is_sum = slot.has_grad
                self.complete(slot, DenseGradient(slot.take_grad()) if is_sum else gradient)

    def _count(self, slot: Slot) -> None:
        """One more gradient of this weight.

        Raises:
            RuntimeError: that cannot be; nothing has been written for it.
        """
        if self.loss_scale is not None and not self.is_scaled:
            raise RuntimeError("with a loss scale it is opt.scale(loss).backward()")
        self.check_pass()
        if not self._has_begun:
            self._updater.check_model()
            self._has_begun = True
        if slot.num_arrived == self._num_parts:
            raise RuntimeError(slot.spent.message_of_add)
        slot.num_arrived += 1
        slot.arrived_in = torch._C._current_graph_task_id()

    def check_pass(self) -> None:
        """Raises RuntimeError for a gradient that comes outside of the two passes it wants."""
        if self._mode == "two_pass" and self._pass == "plain":
            raise RuntimeError('with clip_mode="two_pass" it is opt.backward(loss)')

    # ---- reduced, kept or applied

    def complete(self, slot: Slot, gradient: Gradient) -> None:
        """This rank's gradient is complete. Collective where ranks share the work."""
        self._updater.check_lr(slot)
        if self._pass != "facts":  # which leaves a gradient for the next one
            slot.mark_spent()
        if slot.shards is not None:
            grad = gradient.dense().to(slot.grad_dtype)
            local = slot.shards.reduce_scatter(slot.param, grad)
            slot.shards.release(slot.param)
            self._reduced(slot, DenseGradient(local))
        elif self.replicas is None:
            self._reduced(slot, gradient)
        else:
            self._complete_replicas(self.replicas, slot, gradient.dense())

    def _complete_replicas(self, replicas: Replicas, slot: Slot, grad: Tensor) -> None:
        is_known = self._is_checked and self._mode == "immediate" and not self._skips_layers
        if is_known or self._pass == "update":
            self.is_due = True
            factor = self._factor if self._pass == "update" else 1 / self.scale
            if self._updater.update_replicas(replicas, slot, grad, factor):
                return
        replicas.average(grad, lambda mean: self._reduced(slot, DenseGradient(mean)))

    def _reduced(self, slot: Slot, gradient: Gradient) -> None:
        """The gradient of all ranks."""
        self.is_due = True
        mode = self._pass if self._pass != "plain" else self._mode
        if mode in ("facts", "deferred"):
            if mode == "deferred":
                gradient = self._hold(slot, gradient)
            with_norm = self.options.clip_grad_norm is not None
            self._facts.add(gradient, slot.layout.groups, with_norm=with_norm)
        elif mode == "update":
            self._updater.update(slot, gradient, self._factor)
        elif self._skips_layers:
            self._facts.add(gradient, slot.layout.groups, with_norm=False)
            if gradient.is_finite():
                self._updater.update(slot, gradient, 1 / self.scale)
        else:
            # A loss that is NaN shows in the first gradient, before anything is written.
            if not self._is_checked and not gradient.is_finite():
                raise RuntimeError(
                    f"the gradient of {slot.name}, the first of this backward pass, is not finite;"
                    " no weight has been written"
                )
            self._is_checked = True
            self._updater.update(slot, gradient, 1 / self.scale)

    def _hold(self, slot: Slot, gradient: Gradient) -> Gradient:
        """Keeps the gradient in the smaller of its forms, and returns that."""
        if gradient.nbytes > slot.local.nbytes:
            gradient = DenseGradient(gradient.dense())
        slot.held = gradient
        self.held_bytes += gradient.nbytes
        limit, held_bytes = self.options.max_held_bytes, self.held_bytes
        if limit is not None and held_bytes > limit:
            self._forget_gradients()
            raise RuntimeError(
                f"with {slot.name} deferred gradients take {held_bytes} bytes, and max_held_bytes"
                f' is {limit}; nothing has been written. clip_mode="two_pass" holds none'
            )
        return gradient

    # ---- the step as a whole

    def end_pass(self) -> None:
        """Completes what the backward pass has left: weights that had no gradient in all of it.

        Collective where ranks share the work: a rank without any gradient takes part.

        Raises:
            RuntimeError: gradients by hand with two passes, or as SameWeights.agree().
        """
        if any(slot.has_grad for slot in self.slots):
            self.check_pass()
        if self._turns is not None:
            self._take_turns(self._turns, all_of_them=True)
            is_left = any(slot.has_grad for slot in self.slots)
            if is_left or (self._expects_gradients and not self._turns.has_agreed):
                self._turns.agree(self.slots, None)
                self._take_turns(self._turns, all_of_them=True)
            return
        for peers in dict.fromkeys(slot.peers for slot in self.slots if slot.peers):
            same = self._same.setdefault(peers, SameWeights(peers))
            if self._expects_gradients and not same.has_agreed:
                same.agree(self._slots_of(peers), None)
        self._complete_what_is_left(self.slots)

    @property
    def _expects_gradients(self) -> bool:
        """Whether other ranks may have had gradients: two passes agree in backward() alone."""
        return self._mode != "two_pass" or self._pass != "plain"

    def _complete_what_is_left(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.has_grad:
                with _arithmetic(slot):
                    self.complete(slot, DenseGradient(slot.take_grad()))

    def two_passes(self, loss: Tensor) -> None:
        """Runs the backward pass for the facts, then to update.

        Raises:
            RuntimeError: as finish().
        """
        uses = [slot.num_unseen_uses for slot in self.slots]
        try:
            self._pass = "facts"
            backward_of_two(loss)
            self._end_of_two()
            factor = self._factor_of_facts()
            for slot, num_unseen_uses in zip(self.slots, uses, strict=True):
                slot.num_arrived, slot.num_unseen_uses = 0, num_unseen_uses
            if factor is not None:
                self._pass, self._factor = "update", factor
                loss.backward()
                self._end_of_two()
        finally:
            self._pass = "plain"

    def _end_of_two(self) -> None:
        with torch.no_grad():
            self.end_pass()
        self.drain()
        self._forget_agreements()

    def drain(self) -> None:
        """Returns once no gradient is on its way between ranks."""
        if self.replicas is not None:
            self.replicas.drain()

    def finish(self) -> None:
        """Applies what waits for the whole step.

        Raises:
            RuntimeError: a gradient is not finite, and there is no loss scale; nothing of what
                waited has been written.
        """
        if not self.is_due:
            return
        if self._mode == "deferred":
            factor = self._factor_of_facts()
            for slot in self.slots:
                held, slot.held = slot.held, None
                if factor is not None and held is not None:
                    self._updater.update(slot, held, factor)
        elif self._skips_layers:
            self.has_overflow = not self._finish_facts()[1]
        if self.loss_scale is not None:
            self.loss_scale.update(self.has_overflow)

    @property
    def has_written(self) -> bool:
        """Whether this step was made: asked after finish()."""
        return self.is_due and (self._skips_layers or not self.has_overflow)

    def _finish_facts(self) -> tuple[float, bool]:
        facts, self._facts = self._facts, StepFacts()
        all_groups = dict.fromkeys(slot.layout.groups for slot in self.slots)
        return facts.finish(all_groups, self.slots[0].local.device)

    def _factor_of_facts(self) -> float | None:
        """What this step's gradients are multiplied by; None where it must not be made."""
        norm, is_finite = self._finish_facts()
        norm /= self.scale
        max_norm = self.options.clip_grad_norm
        if max_norm is not None:
            self.grad_norm = norm
        if not (is_finite and math.isfinite(norm)):
            if self.loss_scale is None:
                raise RuntimeError("a gradient is not finite; no weight has been written")
            self.has_overflow = True
            return None
        factor = 1.0 if max_norm is None else clip_factor(norm, max_norm)
        return factor / self.scale

    def forget(self) -> None:
        """Nothing is left of this step. Not inside a backward pass."""
        if self.replicas is not None:
            self.replicas.forget()
        for shards in {slot.shards for slot in self.slots}:
            if shards is not None:
                shards.release_all()
        self._forget_gradients()

    def _forget_agreements(self) -> None:
        if self._turns is not None:
            self._turns.forget()
        for same in self._same.values():
            same.forget()

    def _forget_gradients(self) -> None:
        for slot in self.slots:
            slot.forget()
        self._forget_agreements()
        self._facts = StepFacts()
        self.held_bytes = 0
        self._has_begun = self._is_checked = self.is_verified = False
        self.is_scaled = self.is_due = self.has_overflow = False


_NOTHING_TO_CHANGE = nullcontext()


def _arithmetic(slot: Slot) -> AbstractContextManager[Any]:
    """A backward pass may run under autocast, which would round what is summed in fp32."""
    device = slot.param.device
    if not torch.is_autocast_enabled(device.type):
        # A backward pass has no gradients on unless it makes a graph. This costs less than no_grad.
        return torch.no_grad() if torch.is_grad_enabled() else _NOTHING_TO_CHANGE
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def _of_uses(slot: Slot, uses: Uses) -> Gradient:
    """What a fused layer leaves of its uses: inputs are tokens' features, or their ids."""
    if uses[0][0].is_floating_point():
        return LinearGradient.of_uses(uses, slot.param.dtype)
    assert slot.handle is not None
    padding_idx: int | None = getattr(slot.handle.module, "padding_idx", None)
    return EmbeddingGradient.of_uses(uses, slot.param, -1 if padding_idx is None else padding_idx)
