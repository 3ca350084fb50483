"""An optimizer that applies each gradient as soon as the backward pass produces it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.optim.agreements import Replicas
from ringcomm.optim.gradient_path import GradientPath
from ringcomm.optim.gradients import Gradient
from ringcomm.optim.model_weights import ModelWeights, run_all
from ringcomm.optim.slot import Slot


@dataclasses.dataclass(kw_only=True)
class StepOptions:
    """Checked options; see Lomo for their meaning.

    Raises:
        ValueError: a value is out of range, or two options cannot be used together.
    """

    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    clip_mode: str | None = None
    loss_scale: float | str | None = None
    accumulation_steps: int = 1
    reduce_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | str | None = None
    mesh: dataclasses.InitVar[DeviceMesh | None] = None
    overlap: bool | None = None
    stochastic_rounding: bool = False
    master: str | None = None
    seed: int = 0

    def __post_init__(self, mesh: DeviceMesh | None) -> None:
        if mesh is not None:
            self.group = resolve_group(self.group, mesh)  # type: ignore[arg-type]
        for name in ("clip_grad_norm", "clip_grad_value"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}")
        _check_word("clip_mode", self.clip_mode, "deferred", "two_pass")
        _check_word("master", self.master, "split")
        if not isinstance(self.group, dist.ProcessGroup):
            _check_word("group", self.group, "none")
        if self.accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be 1 or more, got {self.accumulation_steps}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be a number of 32 bits, got {self.seed}")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise ValueError("clip_grad_norm and clip_grad_value cannot be used together")
        if self.clip_mode is not None and not self.looks_ahead:
            raise ValueError(
                "clip_mode has no effect without clip_grad_norm or loss_scale: set one of them"
            )
        if self.mode == "two_pass" and self.accumulation_steps > 1:
            raise ValueError(
                'clip_mode="two_pass" runs one backward pass twice and cannot accumulate over'
                ' several: use clip_mode="deferred"'
            )
        if self.master is not None and self.stochastic_rounding:
            raise ValueError(
                'master="split" keeps all bits, so that stochastic_rounding has no effect: leave '
                "one of them out"
            )

    @property
    def looks_ahead(self) -> bool:
        """Whether the whole step's gradients must be known before it is made."""
        return self.clip_grad_norm is not None or self.loss_scale is not None

    @property
    def mode(self) -> str:
        """When weights are written: "immediate" (in the backward), "deferred" or "two_pass"."""
        return (self.clip_mode or "deferred") if self.looks_ahead else "immediate"


def _check_word(name: str, value: str | None, *allowed: str) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"{name} must be None or one of {', '.join(allowed)}, got {value!r}")


class InBackwardOptimizer(torch.optim.Optimizer):
    """The base of Lomo and AdaLomo: everything except the update of one weight."""

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        model: nn.Module | None,
        defaults: dict[str, Any],
        options: StepOptions,
    ) -> None:
        if not defaults["lr"] > 0:
            raise ValueError(f"lr must be a positive number, got {defaults['lr']!r}")
        if not defaults["weight_decay"] >= 0:
            raise ValueError(f"weight_decay must be 0 or more, got {defaults['weight_decay']!r}")
        found, params = _split_model(model_or_params, model, type(self).__name__)
        self.options = options
        self._weights = ModelWeights(found, type(self).__name__)
        self._path = GradientPath(weakref.proxy(self), options)
        self._undo: list[Callable[[], Any]] = []
        self._is_verified = False
        super().__init__(params, {**defaults, "step": 0})
        weakref.finalize(self, run_all, self._undo)
        self._manage()
        self._undo += self._weights.before_forward(weakref.proxy(self))

    # ---- what users call

    @property
    def loss_scale(self) -> float:
        """The current factor of scale()."""
        return self._path.scale

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step before clipping; None if not computed."""
        return self._path.grad_norm

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients in memory that wait for accumulation, their turn, or step()."""
        waiting = (kept for slot in self._path.slots for kept in (slot.total, slot.held))
        return sum(kept.nbytes for kept in waiting if kept is not None)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself without a loss scale."""
        self._path.is_scaled = True
        return loss if self._path.loss_scale is None else loss * self._path.scale

    def backward(self, loss: Tensor) -> None:
        """scale(loss).backward(); with clip_mode="two_pass" once for the norm, once to update.

        Raises:
            RuntimeError: with two passes and no loss scale, a gradient is not finite: nothing has
                been written. Otherwise as Lomo in the backward pass.
        """
        scaled = self.scale(loss)
        if self.options.mode == "two_pass":
            self._path.two_passes(scaled)
        else:
            scaled.backward()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: applies deferred gradients. Others were applied in the backward pass.

        Raises:
            RuntimeError: no loss scale, and a deferred gradient is not finite: nothing has been
                written, and the gradients are dropped.
            ValueError: a weight was replaced since the optimizer was made.

        Collective if gradients are reduced or weights are sharded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self.check_model()
            self._path.end_pass()
            if self._path.finish():
                for group in self.param_groups:
                    group["step"] += 1
        finally:
            self._forget()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that wait for a step, and resets the count of micro-batches."""
        self._forget()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Restores the model: removes hooks and restores torch's own layers."""
        run_all(self._undo)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's."""
        super().add_param_group(param_group)
        if self._path.slots:  # not in torch's constructor
            self._manage()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's, with the loss scale."""
        found = super().state_dict()
        if self._path.loss_scale is not None:
            found["loss_scale"] = self._path.loss_scale.state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's, but keeps the dtype of state, for equal bits on resume."""
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
        """Updates a weight with its complete gradient times a factor."""

    def update_replicas(self, group_name: str, slot: Slot, grad: Tensor, factor: float) -> bool:
        """Reduces and updates in one pass if supported; returns whether it did."""
        return False

    def check_model(self) -> None:
        """Checks the model once per step: at the first forward pass or, without one, gradient.

        Raises:
            ValueError: see Lomo.
        """
        if not self._is_verified:
            self._weights.check_unchanged(self._path.slots)
            # A group may have been made after the optimizer.
            self._weights.check_ranks(self._path.slots, self.options.group)
            self._is_verified = True

    def _forget(self) -> None:
        self._path.forget()
        self._is_verified = False

    def _group_of(self, slot: Slot) -> dict[str, Any]:
        return self.param_groups[slot.group_idx]

    def _lr_of(self, slot: Slot) -> float:
        lr = float(self._group_of(slot)["lr"])
        if not (lr >= 0 and math.isfinite(lr)):
            raise ValueError(f"the lr of {slot.name} must be 0 or more, got {lr!r}")
        return lr

    def _rounding_seed(self, slot: Slot) -> int:
        """The seed of this step's random bits for a weight; -1 for rounding to nearest.

        The same on all ranks, and after a resume.
        """
        if not self.options.stochastic_rounding or slot.param.dtype != torch.bfloat16:
            return -1
        words = f"{self.options.seed} {slot.index} {self._group_of(slot)['step']}"
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    # ---- set up

    def _manage(self) -> None:
        """Adds hooks to the parameters that have none yet."""
        path, weights, options = self._path, self._weights, self.options
        known = {slot.param for slot in path.slots}
        new: list[Slot] = []
        for group_idx, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param in known:
                    continue
                index = len(path.slots) + len(new)
                name = weights.name_of(param, index)
                weights.check_param(param, name)
                part, kind = weights.parts.get(param), type(self).__name__
                new.append(Slot(param, name, index, group_idx, part, kind, options.reduce_dtype))
        slots = [*path.slots, *new]
        weights.check_ranks(slots, options.group)
        if options.clip_grad_norm is not None or options.loss_scale is not None:
            path.axes = weights.place_parts(slots)
        if isinstance(options.group, dist.ProcessGroup):
            weights.check_replicas(slots, options.group)
            on_cpu = slots[0].param.device.type == "cpu"  # where no core is free for it
            is_overlapped = not on_cpu if options.overlap is None else options.overlap
            path.replicas = Replicas(options.group, is_overlapped)
        _check_dtypes(slots, options)
        for slot in new:
            self._lr_of(slot)  # before there is a hook
        path.slots = slots
        for slot in new:
            self.state[slot.param].update(self._new_low(slot), **self._new_state(slot))
            # A gradient that is reduced over ranks must be materialized anyway.
            may_fuse = path.replicas is None and slot.shards is None
            self._undo += weights.attach(slot, weakref.proxy(path), may_fuse=may_fuse)
        self._undo += weights.watch_units(new, weakref.proxy(path))
        path.watch_shards()

    def _new_low(self, slot: Slot) -> dict[str, Tensor]:
        """The lower halves of a split weight: 0, because the weight is bfloat16 so far."""
        if self.options.master is None or slot.param.dtype != torch.bfloat16:
            return {}
        return {"low": torch.zeros_like(slot.local, dtype=torch.int16)}


def _split_model(
    model_or_params: nn.Module | Iterable[Any], model: nn.Module | None, name: str
) -> tuple[nn.Module | None, Iterable[Any]]:
    """The model, if there is one, and the parameters or groups for torch.optim.

    Raises:
        ValueError: two models, or one without weights to train.
    """
    if not isinstance(model_or_params, nn.Module):
        if model is None:
            warnings.warn(
                f"{name} got parameters without their model: a hook applies each gradient, but"
                " weight gradients of linear and embedding layers are materialized first. Give the"
                " model, or model= beside parameter groups",
                stacklevel=4,
            )
        return model, model_or_params
    if model is not None and model is not model_or_params:
        raise ValueError("two different models were given: give one")
    params = [param for param in model_or_params.parameters() if param.requires_grad]
    if not params:
        raise ValueError("the model has no parameter that requires grad")
    return model_or_params, params


def _check_dtypes(slots: list[Slot], options: StepOptions) -> None:
    """Raises ValueError if an option does not support the weights' dtypes."""
    for slot in slots:
        if options.reduce_dtype not in (None, torch.float32, slot.param.dtype):
            raise ValueError(
                f"reduce_dtype must be torch.float32 or {slot.param.dtype}, the dtype of"
                f" {slot.name}, got {options.reduce_dtype}"
            )
    option = "stochastic_rounding" if options.stochastic_rounding else 'master="split"'
    is_wanted = options.stochastic_rounding or options.master is not None
    if is_wanted and not any(slot.param.dtype == torch.bfloat16 for slot in slots):
        raise ValueError(f"{option} is for bfloat16 weights, but the model has none")
