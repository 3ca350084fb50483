"""What becomes of complete gradients: they are measured, kept until step(), or applied."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringcomm.backward_pass import in_backward
from ringcomm.optim.gradients import Gradient, StepFacts
from ringcomm.optim.options import StepOptions
from ringcomm.optim.slot import Slot
from ringcomm.parallel.clip import LossScale, clip_factor
from ringcomm.parallel.model.cut import Axes
from ringcomm.torch_names import storage_id


class GradientUse:
    """What an optimizer does with complete gradients, and the state of that within a step.

    Attributes:
        phase: "immediate" (gradients are applied), "deferred" (kept until step()), or with two
            passes: "facts" (only measured), then "update" (applied), and "two_pass" outside of
            opt.backward().
        factor: of gradients that are applied in the backward pass.
        axes: the axes over which norms are summed.
        loss_scale: None where losses are not scaled.
        is_scaled: whether this step's loss was.
        has_gradient: whether this step has a reduced gradient, so that step() ends it.
        grad_norm: of the last step that computed it.
    """

    def __init__(self, optimizer: Any, options: StepOptions) -> None:
        """`optimizer` writes the weights: a weak proxy of the InBackwardOptimizer."""
        self._optimizer, self._max_norm = optimizer, options.clip_grad_norm
        self.phase, self.factor = options.mode, 1.0
        self.axes = Axes({}, (), None)
        self.loss_scale = LossScale(options.loss_scale) if options.loss_scale else None
        self.grad_norm: float | None = None
        self.forget()

    def forget(self) -> None:
        """Discards the state of this step."""
        self._facts = StepFacts(with_norm=self._max_norm is not None)
        self.has_gradient = self._has_overflow = self.is_scaled = False

    @property
    def scale(self) -> float:
        """The factor that gradients already have."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    # ---- checks, before a write

    def check_step(self) -> None:
        """Raises RuntimeError or ValueError if no gradient is expected."""
        if self.loss_scale is not None and not self.is_scaled:
            raise RuntimeError("with loss_scale=, call opt.scale(loss).backward()")
        self.check_phase()
        self._optimizer.check_model()

    def check_phase(self) -> None:
        """Raises RuntimeError for a gradient outside of the two passes."""
        if self.phase == "two_pass":
            raise RuntimeError('with clip_mode="two_pass", call opt.backward(loss)')

    # ---- one gradient

    @property
    def spends(self) -> bool:
        """Whether a gradient is the last of its step: the pass for the facts precedes another."""
        return self.phase != "facts"

    def consume(self, slot: Slot, gradient: Gradient) -> None:
        """Measures, keeps or applies a gradient, which is the mean of the replicas."""
        is_immediate = self.phase == "immediate"
        if is_immediate and slot.divisor > 1 and in_backward() and not gradient.is_finite():
            slot.add(gradient.dense())  # step() checks a gradient of all ranks before
            return
        self.has_gradient = True
        if self.phase in ("facts", "deferred"):
            is_kept = self.phase == "deferred"
            if is_kept:  # in the smaller of its forms
                if gradient.nbytes > slot.local.nbytes:
                    gradient = Gradient(gradient.dense())
                slot.deferred = gradient
            self._facts.measure(gradient, slot.sharding, is_kept=is_kept)
            return
        if is_immediate and not (slot.reducer.is_checked or slot.divisor > 1):
            # A NaN loss appears in the first gradient, before the pass has written anything.
            if not gradient.is_finite():
                raise RuntimeError(
                    f"the gradient of {slot.name}, the first of this backward pass, is not finite;"
                    " the pass has written no weight"
                )
            slot.reducer.is_checked = True
        slot.is_written = True
        self._optimizer.apply_gradient(slot, gradient, self.factor / slot.divisor)
        slot.hide()

    def consume_in_one_pass(self, group_name: str, slot: Slot, grad: Tensor) -> bool:
        """Applies the mean of the replicas by one operator if possible; returns whether it did."""
        if not (slot.reducer.is_checked or self.phase == "update"):
            return False
        self.has_gradient = slot.is_written = True
        factor = self.factor / slot.divisor
        if not self._optimizer.update_replicas(group_name, slot, grad, factor):
            return False
        slot.hide()
        return True

    # ---- all gradients of the step

    def finish(self, slots: Sequence[Slot]) -> bool:
        """Applies deferred gradients; returns whether the step was made or skipped."""
        if not self.has_gradient:
            return False
        if self.phase == "deferred":
            own = {storage_id(slot.local) for slot in slots}
            for slot in slots:
                if slot.deferred is not None:
                    slot.deferred.check_unmodified(slot.name)
                    if any(storage_id(part) in own for part in slot.deferred.parts):
                        slot.deferred = Gradient(slot.deferred.dense())  # of a weight as input
            factor = self.factor_of_facts(slots[0].local.device)
            for slot in slots:
                deferred, slot.deferred = slot.deferred, None
                if factor is not None and deferred is not None:
                    self._optimizer.apply_gradient(slot, deferred, factor / slot.divisor)
        if self.loss_scale is not None:
            self.loss_scale.update(self._has_overflow)
        return not self._has_overflow

    def factor_of_facts(self, device: torch.device) -> float | None:
        """The factor of this step's gradients; None if the step must be skipped. Collective."""
        norm, is_finite = self._facts.finish(self.axes, device)
        self._facts = StepFacts(with_norm=self._max_norm is not None)
        norm /= self.scale
        if self._max_norm is not None:
            self.grad_norm = norm
        if not (is_finite and math.isfinite(norm)):
            if self.loss_scale is None:
                raise RuntimeError("a gradient is not finite; no weight has been written")
            self._has_overflow = True
            return None
        factor = 1.0 if self._max_norm is None else clip_factor(norm, self._max_norm)
        return factor / self.scale
