"""An optimizer that applies each gradient as soon as the backward pass produces it."""

import hashlib
import math
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.ops.triton_kernels import check_operators
from ringcomm.optim.agreements import Alone, Replicas
from ringcomm.optim.gradient_path import GradientPath
from ringcomm.optim.gradient_use import GradientUse
from ringcomm.optim.gradients import Gradient
from ringcomm.optim.model_weights import ModelWeights, run_all
from ringcomm.optim.options import StepOptions
from ringcomm.optim.slot import Slot
from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.model.cut import note_trainer


class Numbers(NamedTuple):
    """What the update of a weight takes from its optimizer."""

    group: dict[str, Any]  # its parameter group
    lr: float  # the group's, checked
    factor: float  # of the gradient
    seed: int  # of this step's random bits for the weight; -1 for rounding to nearest
    state: dict[str, Any]  # the weight's


class InBackwardOptimizer(torch.optim.Optimizer):
    """The base of Lomo and AdaLomo: everything except the update of one weight."""

    flat_states: tuple[str, ...] = ()  # keys of states with one dimension for weights of any shape
    operators: tuple[str, ...] = ()  # of updates, but those of float64 weights

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
        self._weights = ModelWeights(found, type(self).__name__, is_whole=found is model_or_params)
        self._use = GradientUse(weakref.proxy(self), options)
        self._path = GradientPath(self._use)
        self._undo: list[Callable[[], Any]] = []
        self._is_verified = False
        super().__init__(params, {**defaults, "step": 0})
        weakref.finalize(self, run_all, self._undo)
        self._manage()
        self._weights.take_values_of_rank0(self._path.slots, options.group)

    # ---- what users call

    @property
    def loss_scale(self) -> float:
        """The current factor of scale()."""
        return self._use.scale

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step before clipping; None if not computed."""
        return self._use.grad_norm

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients in memory that wait for accumulation, their turn, or step()."""
        waiting = (kept for slot in self._path.slots for kept in (slot.total, slot.deferred))
        return sum(kept.nbytes for kept in waiting if kept is not None)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself without a loss scale."""
        self._use.is_scaled = True
        return loss if self._use.loss_scale is None else loss * self._use.scale

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

        After a backward pass that has raised on all ranks, it ends a step by the gradients that had
        arrived.

        Raises:
            RuntimeError: no loss scale, and a deferred gradient is not finite: nothing has been
                written, and the gradients are dropped. Or a backward pass has raised under
                fully_shard.
            ValueError: a weight was replaced since the optimizer was made.

        Collective if gradients are reduced or weights are sharded.
        """
        loss = None
        with self._path.failing_for_all():
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._path.check_continues()
        try:
            with self._path.failing_for_all():
                self.check_model()
                for slot in self._path.slots:
                    slot.see_dropped()
            self._path.end_pass()
            if self._path.finish():
                for group in self.param_groups:
                    group["step"] += 1
        finally:
            self._forget()
            for slot in self._path.slots:
                slot.has_plain_use = False
                slot.first_runs.clear()  # graphs of before a step are dead
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that wait for a step, and resets the count of micro-batches.

        After a backward pass that has raised, the weights that it updated stay updated.

        Raises:
            RuntimeError: weights were updated in the backward pass, and step() was not called; or a
                backward pass has raised under fully_shard.
        """
        self._path.check_continues()
        if updated := self._path.updated():
            raise RuntimeError(
                f"zero_grad() cannot undo the update of {updated[0]} and {len(updated) - 1} others"
                " in the backward pass: call step() first. To leave a model out of a backward pass"
                " (a GAN's discriminator), call requires_grad_(False) on it before the forward pass"
            )
        self._forget()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Restores the model: removes hooks and restores torch's own layers."""
        run_all(self._undo)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's."""
        super().add_param_group(param_group)
        if self._path.slots:  # not in torch's constructor
            try:
                self._manage()
            except BaseException:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> Any:
        """Raises TypeError: hooks connect the optimizer with its model."""
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be copied or pickled with its hooks: copy state_dict() instead, and"
            f" load it into a new {name} for a copy of the model"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's, with the loss scale in each group."""
        found = super().state_dict()
        if self._use.loss_scale is not None:
            for group in found["param_groups"]:
                group.update(self._use.loss_scale.state())
        return found

    @torch.inference_mode(False)  # updates must be able to write states
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's, but keeps the dtype of state, for equal bits on resume."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][key] = value.detach().to(param.device, copy=True)
        for group in self.param_groups:
            LossScale.take(group, self._use.loss_scale)

    # ---- the update, by Lomo and AdaLomo

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        """A weight's state before its first step."""
        return {}

    def apply_gradient(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """Updates a weight with its complete gradient times a factor."""
        group, lr, seed = self._group_of(slot), self._lr_of(slot), self._rounding_seed(slot)
        self.update(slot, gradient, Numbers(group, lr, factor, seed, self._state_of(slot)))

    @abstractmethod
    def update(self, slot: Slot, gradient: Gradient, numbers: Numbers) -> None:
        """Updates a weight with its complete gradient."""

    def update_replicas(self, group_name: str, slot: Slot, grad: Tensor, factor: float) -> bool:
        """Reduces and updates in one pass if supported; returns whether it did."""
        return False

    def check_model(self) -> None:
        """Checks the model once per step: at the first gradient or, without one, by step()."""
        if not self._is_verified:
            params = [slot.param for slot in self._path.slots]
            for device in {p.device.type for p in params if p.dtype != torch.float64}:
                check_operators(self.operators, device)
            index_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
            if len(index_of) != len(self._path.slots):
                raise ValueError(
                    f"param_groups has {len(index_of)} weights, but {type(self).__name__} trains"
                    f" {len(self._path.slots)}: use add_param_group(), or requires_grad_(False) to"
                    " leave weights out"
                )
            for slot in self._path.slots:
                slot.group_idx = index_of[slot.param]
            for slot in {slot.group_idx: slot for slot in self._path.slots}.values():
                self._lr_of(slot)  # raises before a weight is written
            self._weights.check_unchanged(self._path.slots)
            # A group may have been made after the optimizer.
            self._weights.check_ranks(self._path.slots, self.options.group)
            self._is_verified = True

    def _forget(self) -> None:
        self._path.forget()
        self._is_verified = False

    def make_states(self) -> None:
        """Makes the states that weights have before their first step, if they have none."""
        for slot in self._path.slots:
            self._state_of(slot)

    def _state_of(self, slot: Slot) -> dict[str, Any]:
        """A weight's state; that of its first step if there is none, as after state.clear()."""
        state: dict[str, Any] = self.state[slot.param]
        is_split = self.options.master is not None and slot.param.dtype == torch.bfloat16
        with torch.inference_mode(False):
            is_new = not state
            if is_split and "low" not in state:  # also in one that was saved without masters
                # The lower halves of a split weight: 0, because it is bfloat16 so far.
                state["low"] = torch.zeros_like(slot.local, dtype=torch.int16)
            if is_new:
                state.update(self._new_state(slot))
        return state

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
        proxy = weakref.proxy(path)
        known = {slot.param for slot in path.slots}
        new: list[Slot] = []
        for group_idx, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param in known:
                    continue
                index = len(path.slots) + len(new)
                weight = weights.weight_of(param)
                unnamed = [f"parameter {index} of shape {tuple(param.shape)}"]
                name, *_ = weight.names or unnamed
                weights.check_param(param, name)
                cut, kind = weight.cut(), type(self).__name__
                new.append(Slot(param, name, index, group_idx, cut, kind, options))
        slots = [*path.slots, *new]
        weights.check_ranks(slots, options.group)
        shared: dict[dist.ProcessGroup, list[Slot]] = {}
        if isinstance(options.group, dist.ProcessGroup):
            weights.check_replicas(slots, options.group)
            shared = weights.share(slots, options.group)
        if options.needs_all_gradients:
            self._use.axes = weights.place_parts(slots)
        _check_dtypes(slots, options)
        for slot in new:
            self._lr_of(slot)  # before there is a hook
        # A micro-batch has several backward passes, or ranks wait for each other's tokens.
        waits = weights.has_several_stages or weights.has_experts
        path.replicas = [
            Replicas(group, sharing, self._use, overlap=options.overlap, waits_for_step=waits)
            for group, sharing in shared.items()
        ]
        averaged = {slot for sharing in shared.values() for slot in sharing}
        path.alone = Alone([slot for slot in slots if slot not in averaged], self._use)
        path.slots = slots
        note_trainer((slot.param for slot in new), self)
        for slot in new:
            self._state_of(slot)
            # A gradient that is reduced over ranks must be materialized anyway.
            arrived = partial(GradientPath.arrived, proxy)
            self._undo += weights.attach(slot, arrived, may_fuse=slot not in averaged)
        self._undo += weights.watch_units(new, partial(GradientPath.whole_arrived, proxy))
        path.watch_shards()


def _split_model(
    model_or_params: nn.Module | Iterable[Any], model: nn.Module | None, name: str
) -> tuple[nn.Module | None, Iterable[Any]]:
    """The model, if there is one, and the parameters or groups for torch.optim; checked."""
    if isinstance(model_or_params, torch.optim.Optimizer):
        got = type(model_or_params).__name__
        raise TypeError(
            f"{name} takes the model, or its parameters, and not an optimizer: got {got}"
        )
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
