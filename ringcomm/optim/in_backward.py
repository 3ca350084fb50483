"""An optimizer that consumes gradients while the backward pass makes them."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.optim.gradient_path import GradientPath
from ringcomm.optim.gradients import Gradient, rounding_seed
from ringcomm.optim.layouts import overlap
from ringcomm.optim.managed import (
    ModelWeights,
    attach,
    check_dtypes,
    run_all,
    split_model,
    watch_units,
)
from ringcomm.optim.slot import Slot, refuse_ddp
from ringcomm.optim.step_options import StepOptions
from ringcomm.optim.turns import Replicas


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
        self._weights = ModelWeights(found)
        self._path = GradientPath(options, weakref.proxy(self))
        self._undo: list[Callable[[], Any]] = []
        self._is_made = False
        super().__init__(params, {**defaults, "step": 0})
        self._is_made = True
        self._manage()
        self._undo += self._weights.before_forward(weakref.WeakMethod(self._before_forward))
        weakref.finalize(self, run_all, self._undo)

    # ---- what users call

    @property
    def loss_scale(self) -> float:
        """What scale() multiplies a loss by now."""
        return self._path.scale

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step before clipping; None where none is taken."""
        return self._path.grad_norm

    @property
    def held_bytes(self) -> int:
        """What deferred gradients take now."""
        return self._path.held_bytes

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself where there is none."""
        self._path.is_scaled = True
        return loss if self._path.loss_scale is None else loss * self._path.scale

    def backward(self, loss: Tensor) -> None:
        """scale(loss).backward(); with clip_mode="two_pass" once for the norm, once to update.

        Raises:
            RuntimeError: two passes, no loss scale, and a gradient is not finite: nothing has been
                written. Otherwise as the hooks of Lomo.
        """
        scaled = self.scale(loss)
        if self.options.mode == "two_pass":
            self._path.two_passes(scaled)
        else:
            scaled.backward()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: applies what was deferred. All else has been applied in the backward pass.

        Raises:
            RuntimeError: no loss scale, and a gradient that was deferred is not finite: nothing has
                been written, and the gradients are dropped.
            ValueError: a weight was replaced since the optimizer was made.

        Collective where gradients are reduced, or ranks hold parts of weights.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        path = self._path
        try:
            self._check_unchanged()
            with torch.no_grad():
                path.end_pass()
                path.drain()
                path.finish()
            if path.has_written:
                for group in self.param_groups:
                    group["step"] += 1
        finally:
            path.forget()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that wait for a step; micro-batches count from the start."""
        self._path.forget()
        super().zero_grad(set_to_none)

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
        if self._path.loss_scale is not None:
            found["loss_scale"] = self._path.loss_scale.state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's, but state keeps its dtype: resumed, the bits are the same."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][key] = value.detach().to(param.device, copy=True)
        if self._path.loss_scale is not None and "loss_scale" in state_dict:
            self._path.loss_scale.load(state_dict["loss_scale"])

    # ---- the update, by Lomo and AdaLomo

    @abstractmethod
    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        """A weight's state before its first step."""

    @abstractmethod
    def update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """Writes a weight: the step that its complete gradient times a factor makes."""

    def update_replicas(self, replicas: Replicas, slot: Slot, grad: Tensor, factor: float) -> bool:
        """Reduces and updates in one pass, where that can be; returns whether it could."""
        return False

    def check_model(self) -> None:
        """See gradient_path.Updater."""
        self._check_unchanged()
        self._check_ranks(self._path.slots)  # a group may have been made after the optimizer

    def _check_unchanged(self) -> None:
        """Once a step: at the first forward pass of the model, or what comes first without one."""
        if not self._path.is_verified:
            self._weights.check_unchanged(type(self).__name__, self._path.slots)
            self._path.is_verified = True

    def _check_ranks(self, slots: list[Slot]) -> None:
        splits = (self.options.splits or {}).values()
        self._weights.check_ranks(type(self).__name__, slots, self.options.group, splits)

    def _before_forward(self) -> None:
        refuse_ddp(self._path.slots)
        self._check_unchanged()

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
        return float(self._group_of(slot)["lr"])

    def check_lr(self, slot: Slot) -> None:
        """See gradient_path.Updater."""
        lr = self._lr_of(slot)
        if not (lr >= 0 and math.isfinite(lr)):
            raise ValueError(f"the lr of {slot.name} is 0 or more, got {lr!r}")

    # ---- set up

    def _manage(self) -> None:
        """Hooks for the parameters that have none yet."""
        known = {slot.param for slot in self._path.slots}
        splits = self.options.splits or {}
        new: list[Slot] = []
        for group_idx, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param not in known:
                    index = len(self._path.slots) + len(new)
                    name = self._weights.name_of(param, index)
                    self._weights.check(param, name)
                    split = splits.get(param)
                    kind, dtype = type(self).__name__, self.options.reduce_dtype
                    new.append(Slot(param, name, index, group_idx, split, kind, dtype))
        if self.options.clip_grad_norm is not None or self.options.loss_scale is not None:
            self._weights.check_decisions(type(self).__name__, splits)
        self._check_ranks(new)
        if isinstance(self.options.group, dist.ProcessGroup):
            self._check_replicas(self.options.group, new)
        self._path.slots += new
        options = self.options
        check_dtypes(
            self._path.slots, options.stochastic_rounding, options.master, options.reduce_dtype
        )
        for slot in new:
            self.check_lr(slot)
            self.state[slot.param].update(self._new_state(slot))
            # What is reduced over ranks has to be made as a tensor anyway.
            is_alone = self._path.replicas is None and slot.shards is None
            owner = self._weights.fusable_owner(slot.param) if is_alone else None
            self._undo += attach(slot, self._path, self._weights.owners(slot.param), owner)
        if units := self._weights.units():
            self._undo.append(watch_units(units, self._weights.places(new), self._path))

    def _check_replicas(self, group: dist.ProcessGroup, new: list[Slot]) -> None:
        self._weights.check_replicas(type(self).__name__)
        for slot in new:
            if slot.shards is not None or any(overlap(g, group) for g in slot.layout.groups):
                raise ValueError(f"{slot.name} is sharded, and its shards know their group")
        slots = [*self._path.slots, *new]
        largest = max(slot.param.numel() * slot.grad_dtype.itemsize for slot in slots)
        is_overlapped = self.options.overlap
        if is_overlapped is None:  # ranks on CPUs have no core to spare for it
            is_overlapped = new[0].param.device.type != "cpu"
        self._path.set_replicas(Replicas(group, is_overlapped, largest))
