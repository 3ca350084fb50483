"""The path of a gradient: it arrives, is counted, reduced over the ranks, and kept or applied.

"The path of a gradient" in docs/design/optim.md has it as a table.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringcomm.backward_pass import (
    BackwardPass,
    OpenPasses,
    current_pass,
    in_backward,
    keeps_graph,
)
from ringcomm.optim.agreements import Replicas, SameWeights
from ringcomm.optim.gradients import Gradient, StepFacts, exact
from ringcomm.optim.options import StepOptions
from ringcomm.optim.slot import Groups, Slot, roots_of_pass, running_functions
from ringcomm.parallel.clip import LossScale, clip_factor
from ringcomm.parallel.gradient_placeholder import weakly
from ringcomm.parallel.model.cut import Axes
from ringcomm.torch_names import clones_saved_tensors, storage_id


class GradientPath:
    """The state of all weights of an optimizer within a step.

    Attributes:
        slots: the weights, in the order of the parameter groups.
        replicas: the groups over which gradients are averaged, in the order of all ranks.
        axes: the axes over which norms are summed.
        loss_scale: None where losses are not scaled.
        is_scaled: whether this step's loss was.
        waits_for_step: whether replicas reduce in step() only, because a micro-batch has several
            backward passes, or because ranks wait in them for each other's tokens.
        grad_norm: of the last step that computed it.
    """

    _facts: StepFacts
    _has_gradient: bool  # whether this step has a reduced gradient, so that step() ends it
    _has_overflow: bool
    _updated: list[str]  # weights, when the last backward pass ended

    def __init__(self, optimizer: Any, options: StepOptions) -> None:
        """`optimizer` writes the weights: a weak proxy of the InBackwardOptimizer."""
        self._optimizer, self._options = optimizer, options
        self._mode, self._num_parts = options.mode, options.accumulation_steps
        self.slots: list[Slot] = []
        self.replicas: list[Replicas] = []
        self._same: dict[Groups, SameWeights] = {}
        self.axes = Axes({}, (), None)
        self.loss_scale = LossScale(options.loss_scale) if options.loss_scale else None
        self.grad_norm: float | None = None
        self.waits_for_step = False
        self._passes: OpenPasses[bool] = OpenPasses()  # with a gradient; whether they are nested
        self.is_checked = False  # whether a gradient of this pass was seen to be finite
        self._phase = "plain"  # of a backward() with two passes: "facts", then "update"
        self._factor = 1.0  # of gradients that are applied in the backward pass
        self._forget_gradients()

    def watch_shards(self) -> None:
        """Called when all slots exist: those of one mesh agree on their gradients."""
        for peers in {slot.peers: None for slot in self.slots if slot.peers}:
            self._same[peers] = SameWeights([s for s in self.slots if s.peers == peers])

    @property
    def scale(self) -> float:
        """The factor that gradients already have."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    # ---- arriving

    def arrived(self, slot: Slot) -> None:
        """Autograd has run all of a backward pass that leads to the parameter."""
        with exact(slot.param.device):
            is_nested = self._enter_pass()
            slot.see_dropped()
            gradient = None if slot.handle is None else slot.handle.take(slot.name)
            is_new = slot.collect()
            if gradient is None and not is_new:
                return  # a function has returned None, or the weight is frozen now
            awaits_more = slot.note_arrival(is_nested=is_nested)
            if not awaits_more:
                self._check_step()
                slot.count(self._num_parts)
            is_last = not awaits_more and slot.num_arrived == self._num_parts
            if gradient is not None:
                if is_last and not slot.has_grad:
                    self._complete(slot, gradient)
                    return
                slot.add(gradient.dense())  # micro-batches, or uses that autograd sees
            if not is_last and not awaits_more:
                slot.mark(is_spent=False)
            if slot.replicas is not None and not awaits_more:
                self._arrived_on_replica(slot.replicas, slot)
            elif is_last:
                self._complete_what_is_left([slot])

    def whole_arrived(self, slot: Slot) -> None:
        """Autograd has made a full gradient, which fully_shard will reduce."""
        if self._enter_pass() and slot.first_runs:
            raise RuntimeError(
                f"{slot.name} is used by several segments of a reentrant checkpoint, and"
                " fully_shard loses gradients of all but one: set use_reentrant=False"
            )
        self._same[slot.peers].expect(slot)

    def updated(self) -> list[str]:
        """The weights that were updated in backward passes, except in one that has raised."""
        if self._passes:
            return self._updated
        return [slot.name for slot in self.slots if slot.is_written]

    def check_continues(self) -> None:
        """Raises RuntimeError if a backward pass has raised under fully_shard."""
        if self._passes and any(slot.whole is not slot.param for slot in self.slots):
            raise RuntimeError(
                "a backward pass raised an error under fully_shard, which cannot continue: rebuild"
                " the model and its optimizer from a checkpoint"
            )

    def _enter_pass(self) -> bool:
        """Notes the current backward pass; returns whether it is nested."""
        return self._passes.enter(self._pass_ends, begin=self._pass_begins)

    def _pass_begins(self) -> bool:
        if clones_saved_tensors():
            raise RuntimeError(
                "allow_mutation_on_saved_tensors() is active in a backward pass that updates"
                " weights, and would clone them: leave it before backward()"
            )
        if keeps_graph():
            again = partial(weakly(self._runs_again), current_pass())
            for root in roots_of_pass():
                if root.grad_fn is not None:
                    root.grad_fn.register_prehook(again)
        is_nested = running_functions()[1] is not None or bool(self._passes)
        self.is_checked = self.is_checked and is_nested
        return is_nested

    def _runs_again(self, before: BackwardPass, _: Any) -> None:
        """Called when a graph runs again; torch would not say what has changed its weights."""
        for slot in self.slots:
            slot.refuse_second(slot.is_written and slot.arrived_in == before)

    def _pass_ends(self, is_nested: bool) -> None:
        """Expected gradients that are missing count as zeros."""
        for replicas in () if is_nested else self.replicas:
            with exact(self.slots[0].param.device):
                self._take_turns(replicas, all_of_them=True)
        self._updated = self.updated()
        for slot in () if is_nested else self.slots:
            slot.show()

    def _check_step(self) -> None:
        """Raises RuntimeError or ValueError, before a write, if no gradient is expected."""
        if self.loss_scale is not None and not self.is_scaled:
            raise RuntimeError("with loss_scale=, call opt.scale(loss).backward()")
        self._check_pass()
        self._optimizer.check_model()

    def _check_pass(self) -> None:
        if self._mode == "two_pass" and self._phase == "plain":
            raise RuntimeError('with clip_mode="two_pass", call opt.backward(loss)')

    # ---- reduced over the ranks

    def _arrived_on_replica(self, replicas: Replicas, slot: Slot) -> None:
        if not replicas.note_arrival(slot):
            is_last = slot.num_arrived == self._num_parts
            if self.waits_for_step or not is_last or not replicas.is_over:
                return  # a later gradient of this pass ends its step, or step() does
            replicas.agree(slot)
        self._take_turns(replicas)

    def _take_turns(self, replicas: Replicas, *, all_of_them: bool = False) -> None:
        """Reduces the weights that are ready; zeros for one with a gradient on other ranks only."""
        for slot in replicas.take_ready(all_of_them=all_of_them):
            slot.num_arrived = self._num_parts
            grad = slot.take() if slot.has_grad else torch.zeros_like(slot.param)
            self._complete(slot, Gradient(grad.to(slot.grad_dtype)))

    def _complete_what_is_left(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.has_grad:
                self._complete(slot, Gradient(slot.take()))

    def _complete(self, slot: Slot, gradient: Gradient) -> None:
        """This rank's gradient is complete. Collective if ranks share the work."""
        if self._phase != "facts":  # which leaves a gradient for the next one
            slot.mark(is_spent=True)
        if slot.replicas is None:
            is_waiting = slot.divisor > 1 and in_backward()
            if is_waiting and self._mode == "immediate" and not gradient.is_finite():
                slot.add(gradient.dense())  # step() checks a gradient of all ranks before
                return
            self._reduced(slot, gradient)
            return
        grad, name = gradient.dense(), slot.replicas.one_pass_name(slot.local.device)
        if name:
            slot.replicas.drain()  # of the first gradient, which is looked at alone
        if name and (slot.replicas.is_checked or self._phase == "update"):
            self._has_gradient = slot.is_written = True
            if self._optimizer.update_replicas(name, slot, grad, self._factor / slot.divisor):
                slot.hide()
                return
        slot.replicas.average(grad, lambda mean: self._reduced(slot, Gradient(mean)))

    # ---- kept or applied

    def _reduced(self, slot: Slot, gradient: Gradient) -> None:
        self._has_gradient = True
        mode = self._phase if self._phase != "plain" else self._mode
        if mode in ("facts", "deferred"):
            if mode == "deferred":  # in the smaller of its forms
                if gradient.nbytes > slot.local.nbytes:
                    gradient = Gradient(gradient.dense())
                slot.deferred = gradient
            self._facts.add(gradient, slot.sharding, is_kept=mode == "deferred")
            return
        checked = slot.replicas or self
        if mode == "immediate" and not (checked.is_checked or slot.divisor > 1):
            # A NaN loss appears in the first gradient, before the pass has written anything.
            if not gradient.is_finite():
                raise RuntimeError(
                    f"the gradient of {slot.name}, the first of this backward pass, is not finite;"
                    " the pass has written no weight"
                )
            checked.is_checked = True
        slot.is_written = True
        self._optimizer.update(slot, gradient, self._factor / slot.divisor)
        slot.hide()

    # ---- the step as a whole

    def two_passes(self, loss: Tensor) -> None:
        """Runs the backward pass for the facts, then to update.

        Raises RuntimeError, before a write, if a gradient is not finite.
        """
        uses = [(slot.first_runs.copy(), slot.has_plain_use) for slot in self.slots]
        try:
            self._phase = "facts"
            try:
                loss.backward(retain_graph=True)
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
                raise RuntimeError(
                    'clip_mode="two_pass" runs the backward pass twice, but code of torch.compile'
                    ' frees its buffers in the first: use clip_mode="deferred", or'
                    " set torch._functorch.config.donated_buffer = False before the model compiles"
                ) from error
            self.end_pass()
            factor = self._factor_of_facts()
            for slot, known in zip(self.slots, uses, strict=True):
                slot.num_arrived = 0
                slot.first_runs, slot.has_plain_use = known
            self._forget_agreements()
            if factor is not None:
                self._phase, self._factor = "update", factor
                loss.backward()
                self.end_pass()
                self._forget_agreements()
        except BaseException:  # what waits for a turn has no factor
            with exact(self.slots[0].param.device):
                self._forget_gradients()
            self._has_gradient = self._phase == "update"
            raise
        finally:
            self._phase, self._factor = "plain", 1.0

    def end_pass(self) -> None:
        """Completes weights that had no gradient in the whole backward pass.

        After a backward pass that raised, those of the gradients that have arrived. Collective if
        ranks share the work; a rank without any gradient participates.
        """
        with exact(self.slots[0].param.device):
            if self._passes:  # one has raised: gradients that it expected will not come
                self._forget_agreements()
            if any(slot.has_grad for slot in self.slots):
                self._check_pass()
            expects = self._agrees()
            for same in self._same.values():
                if expects and not same.has_agreed:
                    same.agree(None)
            for replicas in self.replicas if expects else ():
                self._take_turns(replicas, all_of_them=True)
                while replicas.agree(None):
                    self._take_turns(replicas, all_of_them=True)
                self._take_turns(replicas, all_of_them=True)
                replicas.drain()
            self._complete_what_is_left(slot for slot in self.slots if slot.replicas is None)

    def _agrees(self) -> bool:
        """Other ranks may have had gradients; two passes agree in backward() alone."""
        return self._mode != "two_pass" or self._phase != "plain"

    @contextmanager
    def failing_for_all(self) -> Iterator[None]:
        """A context in place of end_pass() where it raises: the others raise where they agree."""
        try:
            yield
        except Exception:
            untold = [replicas for replicas in self.replicas if not replicas.was_told]
            for replicas in untold if self._agrees() else ():
                with suppress(Exception):
                    replicas.agree(None, fails=True)
            raise

    def finish(self) -> bool:
        """Applies deferred gradients; returns whether the step was made or skipped."""
        if not self._has_gradient:
            return False
        with exact(self.slots[0].param.device):
            if self._mode == "deferred":
                own = {storage_id(slot.local) for slot in self.slots}
                for slot in self.slots:
                    if slot.deferred is not None:
                        slot.deferred.check_unmodified(slot.name)
                        if any(storage_id(part) in own for part in slot.deferred.parts):
                            slot.deferred = Gradient(slot.deferred.dense())  # of a weight as input
                factor = self._factor_of_facts()
                for slot in self.slots:
                    deferred, slot.deferred = slot.deferred, None
                    if factor is not None and deferred is not None:
                        self._optimizer.update(slot, deferred, factor / slot.divisor)
        if self.loss_scale is not None:
            self.loss_scale.update(self._has_overflow)
        return not self._has_overflow

    def _factor_of_facts(self) -> float | None:
        """The factor of this step's gradients; None if the step must be skipped."""
        facts, self._facts = self._facts, self._new_facts()
        norm, is_finite = facts.finish(self.axes, self.slots[0].local.device)
        norm /= self.scale
        max_norm = self._options.clip_grad_norm
        if max_norm is not None:
            self.grad_norm = norm
        if not (is_finite and math.isfinite(norm)):
            if self.loss_scale is None:
                raise RuntimeError("a gradient is not finite; no weight has been written")
            self._has_overflow = True
            return None
        factor = 1.0 if max_norm is None else clip_factor(norm, max_norm)
        return factor / self.scale

    def _new_facts(self) -> StepFacts:
        return StepFacts(with_norm=self._options.clip_grad_norm is not None)

    def forget(self) -> None:
        """Discards the state of this step. Not inside a backward pass."""
        self._passes.forget()
        with exact(self.slots[0].param.device):
            self._forget_gradients()

    def _forget_agreements(self) -> None:
        for replicas in self.replicas:
            replicas.forget()
        for same in self._same.values():
            same.forget()

    def _forget_gradients(self) -> None:
        self._forget_agreements()
        for slot in self.slots:
            slot.forget()
        self._facts, self._updated = self._new_facts(), []
        self.is_checked = self._has_gradient = self._has_overflow = self.is_scaled = False
