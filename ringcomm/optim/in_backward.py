"""An optimizer that consumes gradients while the backward pass makes them.

Every gradient takes one path: it arrives (from a parameter's hook or a fused layer), is counted,
reduced over the ranks, and is applied at once, or waits until the whole step is known.
docs/design/optim.md has the picture.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.optim.fused_layers import Uses
from ringcomm.optim.gradients import DenseGradient, EmbeddingGradient, Gradient, LinearGradient
from ringcomm.optim.layouts import local_tensor
from ringcomm.optim.loss_scale import LossScale
from ringcomm.optim.managed import (
    ModelWeights,
    Slot,
    attach,
    checked_dtypes,
    run_all,
    split_model,
)
from ringcomm.optim.replicas import Replicas
from ringcomm.optim.rounding import rounding_seed
from ringcomm.optim.step_facts import StepFacts, clip_factor
from ringcomm.optim.step_options import StepOptions


class InBackwardOptimizer(torch.optim.Optimizer):
    """What Lomo and AdaLomo share: everything but the update of one weight."""

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        model: nn.Module | None,
        defaults: dict[str, Any],
        options: StepOptions,
    ) -> None:
        found, params = split_model(model_or_params, model, type(self).__name__)
        self.options = options
        self.grad_norm: float | None = None
        """The norm of all gradients of the last step before clipping, if it was wanted."""
        self._weights = ModelWeights(found)
        self._slots: list[Slot] = []
        self._replicas: Replicas | None = None
        self._loss_scale = LossScale(options.loss_scale) if options.loss_scale else None
        self._pass = "plain"  # in backward() with two passes: "facts", then "update"
        self._factor = 1.0
        self._facts = StepFacts()
        self._held_bytes = 0
        self._is_scaled = self._is_checked = self._is_due = self._has_overflow = False
        self._undo: list[Callable[[], Any]] = []
        self._is_made = False
        super().__init__(params, {**defaults, "step": 0})
        self._is_made = True
        self._manage()
        weakref.finalize(self, run_all, self._undo)

    # ---- what users call

    @property
    def loss_scale(self) -> float:
        """What scale() multiplies a loss by now."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself where there is none."""
        self._is_scaled = True
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    def backward(self, loss: Tensor) -> None:
        """scale(loss).backward(); with clip_mode="two_pass" once for the norm, once to update.

        Raises:
            RuntimeError: two passes, no loss scale, and a gradient is not finite: nothing has been
                written. Otherwise as the hooks of Lomo.
        """
        scaled = self.scale(loss)
        if self.options.mode != "two_pass":
            scaled.backward()
            return
        uses = [slot.num_unseen_uses for slot in self._slots]
        try:
            self._pass = "facts"
            scaled.backward(retain_graph=True)
            self._drain()
            factor = self._factor_of_facts()
            for slot, num_unseen_uses in zip(self._slots, uses, strict=True):
                slot.num_arrived, slot.num_unseen_uses = 0, num_unseen_uses
            if factor is not None:
                self._pass, self._factor = "update", factor
                scaled.backward()
        finally:
            self._pass = "plain"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: applies what was deferred. All else has been applied in the backward pass.

        Raises:
            RuntimeError: no loss scale, and the norm of what was deferred is not finite: nothing
                has been written, and the gradients are dropped.

        Collective where gradients are reduced, or ranks hold parts of weights.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with torch.no_grad():
                for slot in self._slots:
                    if slot.param.grad is not None:  # not all micro-batches had one, or by hand
                        self._check_pass()
                        self._complete(slot, DenseGradient(slot.take_grad()))
                self._drain()
                self._finish_step()
        finally:
            self._forget()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that wait for a step; micro-batches count from the start."""
        super().zero_grad(set_to_none)
        self._forget()

    def close(self) -> None:
        """Gives the model back: no hooks, and its layers are torch's own again."""
        run_all(self._undo)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's."""
        super().add_param_group(param_group)
        if self._is_made:
            self._manage()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's, with the loss scale."""
        found = super().state_dict()
        if self._loss_scale is not None:
            found["loss_scale"] = self._loss_scale.state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's, but state keeps its dtype: resumed, the bits are the same."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            device = local_tensor(param).device
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][key] = value.detach().to(device, copy=True)
        if self._loss_scale is not None and "loss_scale" in state_dict:
            self._loss_scale.load(state_dict["loss_scale"])

    # ---- the update, by Lomo and AdaLomo

    @abstractmethod
    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        """A weight's state before its first step."""

    @abstractmethod
    def _update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """Writes a weight: the step that its complete gradient times a factor makes."""

    def _update_replicas(self, slot: Slot, grad: Tensor, factor: float) -> bool:
        """Reduces and updates in one pass, where that can be; returns whether it could."""
        return False

    def _group_of(self, slot: Slot) -> dict[str, Any]:
        return self.param_groups[slot.group_idx]

    def _rounding_seed(self, slot: Slot) -> int:
        """The seed of this step's random bits for a weight, -1 where it is rounded to nearest."""
        if not self.options.stochastic_rounding or slot.param.dtype != torch.bfloat16:
            return -1
        return rounding_seed(self.options.seed, slot.index, self._group_of(slot)["step"])

    def _new_low(self, slot: Slot) -> dict[str, Tensor]:
        """The lower halves of a weight that is split: 0, since it is bfloat16 so far."""
        if self.options.master is None or slot.param.dtype != torch.bfloat16:
            return {}
        return {"low": torch.zeros_like(slot.local, dtype=torch.int16)}

    def _lr_of(self, slot: Slot) -> float:
        lr = float(self._group_of(slot)["lr"])
        if not (lr >= 0 and math.isfinite(lr)):
            raise ValueError(f"the lr of {slot.name} is 0 or more, got {lr!r}")
        return lr

    # ---- set up

    def _manage(self) -> None:
        """Hooks for the parameters that have none yet."""
        known = {slot.param for slot in self._slots}
        splits = self.options.splits or {}
        new: list[Slot] = []
        for group_idx, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param not in known:
                    index = len(self._slots) + len(new)
                    name = self._weights.name_of(param, index)
                    self._weights.check(param, name)
                    new.append(Slot(param, name, index, group_idx, splits.get(param)))
        if self.options.group is not None:
            self._check_replicas(new)
        self._slots += new
        checked_dtypes(self._slots, self.options.stochastic_rounding, self.options.master)
        for slot in new:
            self._lr_of(slot)
            self.state[slot.param].update(self._new_state(slot))
            # What is reduced over ranks has to be made as a tensor anyway.
            is_alone = self._replicas is None and slot.shards is None
            owner = self._weights.fusable_owner(slot.param) if is_alone else None
            self._undo += attach(slot, self, self._weights.owners(slot.param), owner)
        self._all_groups = list(dict.fromkeys(slot.layout.groups for slot in self._slots))

    def _check_replicas(self, new: list[Slot]) -> None:
        assert self.options.group is not None
        for slot in new:
            if slot.shards is not None:
                raise ValueError(f"{slot.name} is sharded, and its shards know their group")
        largest = max(slot.param.nbytes for slot in [*self._slots, *new])
        overlap = self.options.overlap
        if overlap is None:  # ranks on CPUs have no core to spare for it
            overlap = new[0].param.device.type != "cpu"
        self._replicas = Replicas(self.options.group, overlap, largest)

    # ---- the path of a gradient

    def param_arrived(self, slot: Slot) -> None:
        """See managed.Consumer."""
        if slot.handle is not None and slot.handle.num_forwards > 0:
            return  # autograd saw another use than the fused ones, which are still to come
        if slot.awaits_more():
            return
        self._count(slot)
        if slot.num_arrived < self.options.accumulation_steps and self._pass == "plain":
            return  # autograd adds the next one
        with torch.no_grad():
            self._complete(slot, DenseGradient(slot.take_grad()))

    def uses_arrived(self, slot: Slot, uses: Uses) -> None:
        """See managed.Consumer."""
        awaits_more = slot.awaits_more()
        if not awaits_more:
            self._count(slot)
        weight = slot.param
        gradient: Gradient
        if uses[0][0].is_floating_point():
            gradient = LinearGradient.of_uses(uses, weight.dtype)
        else:
            padding_idx = getattr(slot.handle.module, "padding_idx", None) if slot.handle else None
            gradient = EmbeddingGradient.of_uses(
                uses, weight, -1 if padding_idx is None else padding_idx
            )
        with torch.no_grad():
            if weight.grad is not None:  # earlier micro-batches, or uses that autograd saw
                gradient = DenseGradient(slot.take_grad().add_(gradient.dense()))
            if awaits_more or slot.num_arrived < self.options.accumulation_steps:
                weight.grad = gradient.dense()
            else:
                self._complete(slot, gradient)

    def _count(self, slot: Slot) -> None:
        """One more gradient of this weight.

        Raises:
            RuntimeError: that cannot be; nothing has been written for it.
        """
        if self._loss_scale is not None and not self._is_scaled:
            raise RuntimeError("with a loss scale it is opt.scale(loss).backward()")
        self._check_pass()
        if slot.num_arrived == self.options.accumulation_steps:
            raise RuntimeError(
                f"{slot.name} got a gradient after its update: backward() ran"
                f" {slot.num_arrived + 1} times before step() (say accumulation_steps), or a weight"
                " is used in several segments of a reentrant checkpoint (use_reentrant=False)"
            )
        slot.num_arrived += 1

    def _check_pass(self) -> None:
        if self.options.mode == "two_pass" and self._pass == "plain":
            raise RuntimeError('with clip_mode="two_pass" it is opt.backward(loss)')

    def _complete(self, slot: Slot, gradient: Gradient) -> None:
        """This rank's gradient is complete."""
        self._lr_of(slot)
        if slot.shards is not None:
            local = slot.shards.reduce_scatter(slot.param, gradient.dense())
            slot.shards.release(slot.param)
            self._reduced(slot, DenseGradient(local))
        elif self._replicas is None:
            self._reduced(slot, gradient)
        else:
            grad = gradient.dense()
            is_free = self._is_checked and self._writes_now and not self._skips_layers
            if is_free and self._update_replicas(slot, grad, 1 / self.loss_scale):
                self._is_due = True
                return
            self._replicas.average(grad, lambda mean: self._reduced(slot, DenseGradient(mean)))

    @property
    def _writes_now(self) -> bool:
        return self.options.mode == "immediate" or self._pass == "update"

    @property
    def _skips_layers(self) -> bool:
        return self.options.overflow == "skip_layer"

    def _reduced(self, slot: Slot, gradient: Gradient) -> None:
        """The gradient of all ranks: looked at, kept or applied."""
        self._is_due = True
        with_norm = self.options.clip_grad_norm is not None
        if self._pass == "facts":
            self._facts.add(gradient, slot.layout.groups, with_norm=with_norm)
        elif self._pass == "update":
            self._update(slot, gradient, self._factor)
        elif self.options.mode == "deferred":
            self._facts.add(gradient, slot.layout.groups, with_norm=with_norm)
            self._hold(slot, gradient)
        elif self._skips_layers:
            self._facts.add(gradient, slot.layout.groups, with_norm=False)
            if gradient.is_finite():
                self._update(slot, gradient, 1 / self.loss_scale)
        else:
            # A loss that is NaN shows in the first gradient, before anything is written.
            if not self._is_checked and not gradient.is_finite():
                raise RuntimeError(
                    f"the gradient of {slot.name}, the first of this backward pass, is not finite;"
                    " no weight has been written"
                )
            self._is_checked = True
            self._update(slot, gradient, 1 / self.loss_scale)

    def _hold(self, slot: Slot, gradient: Gradient) -> None:
        if gradient.nbytes > slot.local.nbytes:
            gradient = DenseGradient(gradient.dense())
        slot.held = gradient
        self._held_bytes += gradient.nbytes
        limit = self.options.max_held_bytes
        if limit is not None and self._held_bytes > limit:
            held = self._held_bytes
            self._forget()
            raise RuntimeError(
                f"with {slot.name} deferred gradients take {held} bytes, and max_held_bytes is"
                f' {limit}; nothing has been written. clip_mode="two_pass" holds none'
            )

    # ---- the end of a step

    def _drain(self) -> None:
        if self._replicas is not None:
            self._replicas.drain()

    def _factor_of_facts(self) -> float | None:
        """What the gradients of this step are multiplied by; None where it is not to be.

        Raises:
            RuntimeError: they are not finite, and there is no loss scale to halve.
        """
        facts, self._facts = self._facts, StepFacts()
        norm, is_finite = facts.finish(self._all_groups, self._slots[0].local.device)
        max_norm = self.options.clip_grad_norm
        norm /= self.loss_scale
        if max_norm is not None:
            self.grad_norm = norm
        if not (is_finite and math.isfinite(norm)):
            if self._loss_scale is None:
                raise RuntimeError("a gradient is not finite; no weight has been written")
            self._has_overflow = True
            return None
        factor = 1.0 if max_norm is None else clip_factor(norm, max_norm)
        return factor / self.loss_scale

    def _finish_step(self) -> None:
        if not self._is_due:
            return
        if self.options.mode == "deferred":
            factor = self._factor_of_facts()
            for slot in self._slots:
                held, slot.held = slot.held, None
                if factor is not None and held is not None:
                    self._update(slot, held, factor)
        elif self._skips_layers:
            _, is_finite = self._facts.finish(self._all_groups, self._slots[0].local.device)
            self._has_overflow = not is_finite
        if not (self._has_overflow and not self._skips_layers):
            for group in self.param_groups:
                group["step"] += 1
        if self._loss_scale is not None:
            self._loss_scale.update(self._has_overflow)

    def _forget(self) -> None:
        """Nothing is left of this step."""
        if self._replicas is not None:
            self._replicas.forget()
        for slot in self._slots:
            slot.forget()
        for shards in {slot.shards for slot in self._slots}:
            if shards is not None:
                shards.release_all()
        self._facts = StepFacts()
        self._held_bytes = 0
        self._is_scaled = self._is_checked = self._is_due = self._has_overflow = False
