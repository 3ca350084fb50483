"""The optimizer that zero.shard() returns: the step of every stage, and the options."""

import dataclasses
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringcomm.parallel.clip import LossScale, clip_factor, over_all_ranks
from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.model.axes import Axes, Sharding, find_trainer
from ringcomm.parallel.model.describe import Model, describe
from ringcomm.parallel.optimizer_classes import over_groups
from ringcomm.parallel.zero.inner import Inner, InnerSteps, Parts
from ringcomm.torch_names import active_ddp, foreach_mul_, mark_stepped, move_hooks, tree_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The options of zero.shard(), checked.

    Raises:
        ValueError: a value is out of range.
    """

    bucket_bytes: int = 25 << 20
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    loss_scale: float | str | None = None
    clip_grad_norm: float | None = None
    offload_weights: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")
        if self.param_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"param_dtype must be None, torch.float16 or torch.bfloat16, got {self.param_dtype}"
            )
        norm = self.clip_grad_norm
        if norm is not None and not (norm > 0 and math.isfinite(norm)):
            raise ValueError(f"clip_grad_norm must be a positive number or None, got {norm!r}")
        if self.offload_weights and self.param_dtype is not None:
            raise ValueError(
                "param_dtype is not supported with offload_weights: cast the model itself"
            )

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are accumulated and reduced."""
        return self.reduce_dtype or torch.float32

    @property
    def needs_all_gradients(self) -> bool:
        """Whether all gradients must be known before a weight is written."""
        return self.clip_grad_norm is not None or self.loss_scale is not None


class Given(NamedTuple):
    """What zero.shard() was given, checked."""

    model: Model
    optimizers: list[Inner]
    stage: int
    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    units: Iterable[nn.Module] | None
    options: ShardOptions

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups."""
        return [group for inner in self.optimizers for group in inner.groups]


def _refuse_copy(*_: Any) -> NoReturn:
    raise RuntimeError(
        "an optimizer of zero.shard() cannot be copied or pickled: save"
        " ringcomm.parallel.get_state_dict(model, optimizer) instead"
    )


def data_was_set(name: str) -> str:
    """The error message for a weight in other memory than that of its shards."""
    return (
        f"`.data` of {name} was set after zero.shard(), as vector_to_parameters() and"
        " to(memory_format=...) do, so that its shards have other values: write by param.copy_() in"
        " torch.no_grad(), or ringcomm.parallel.set_state_dict(). A Trainer moves its model,"
        " so make it before"
    )


def _refuse_ddp(model: nn.Module, *_: Any) -> None:
    """A forward pre-hook; raises if DistributedDataParallel runs the model, but not its copies."""
    if active_ddp() is not None and any(map(find_trainer, model.parameters())):
        raise RuntimeError(
            "the model was sharded by zero.shard() but runs in DistributedDataParallel,"
            " which would reduce gradients again: call the model itself. With Accelerate or"
            " Trainer, call register() of ringcomm.integrations"
        )


class ZeroOptimizer(InnerSteps):
    """A torch optimizer in which each rank updates 1/N of the weights.

    Its parameter groups are the dicts of the given optimizer. `state` has this rank's parts of
    states and may be modified, except if it is offloaded. Copying and pickling raise. A weight
    without a gradient on any rank is not updated, as in torch's optimizers. At stages 1 and 2, a
    missing gradient on some ranks counts as zeros in the mean, as with
    DistributedDataParallel(find_unused_parameters=True).

    Attributes:
        grad_norm: the 2-norm of all gradients before clipping, without the loss scale, in the last
            step that computed it: with clip_grad_norm or a loss scale. None before.
    """

    def __init__(self, given: Given) -> None:
        self.options, self.group = given.options, given.group
        scale = given.options.loss_scale
        self._scale = LossScale(scale) if scale is not None else None
        self.grad_norm: float | None = None
        self._model = weakref.ref(given.model.module)
        self._is_made = False
        makers = [inner.optimizer for inner in given.optimizers]
        makers += [maker.given for maker in makers if hasattr(maker, "given")]
        self._given = [weakref.ref(maker) for maker in makers]
        self._inners = [
            inner if inner.is_offloaded else inner._replace(optimizer=over_groups(inner.plain, []))
            for inner in given.optimizers
        ]
        self._parts = Parts()
        self._mode, self._told = "", set()
        # The same dicts: a learning-rate scheduler of the given optimizer sets these options.
        super().__init__(given.groups, {})
        self._own = {param: param for param in self.all_params()}
        self.defaults = {}
        for inner in given.optimizers:
            self.defaults = {**inner.optimizer.defaults, **self.defaults}
            move_hooks(inner.optimizer, self)
        for key in ("betas", "momentum"):  # which OneCycleLR then expects in all groups
            if not all(key in group for group in self.param_groups):
                self.defaults.pop(key, None)
        self._is_made = True
        # Before fully_shard's hook, which replaces the weights.
        given.model.module.register_forward_pre_hook(_refuse_ddp, prepend=True)

    # It refers to the model, hooks and a process group.
    __deepcopy__ = __reduce_ex__ = _refuse_copy

    # ---- what users call

    @property
    def loss_scale(self) -> float:
        """The current factor of scale()."""
        return 1.0 if self._scale is None else self._scale.value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself without a loss scale."""
        return loss if self._scale is None else loss * self._scale.value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights with the accumulated gradients, averaged over the ranks.

        With a loss scale, an overflow on any rank skips the step on all ranks and halves the scale.
        The gradients are then dropped, also without zero_grad().

        Raises:
            ValueError: the model was changed: a weight was added or moved.
            RuntimeError: with clip_grad_norm and no loss scale, the norm is not finite; at stage 3,
                the last backward pass of a weight was in no_sync(). No rank has written a weight,
                and in the first case the gradients are dropped.

        Collective.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_unchanged()
        with torch.no_grad():
            if self._agree():
                self._step()
        for found in self._given:
            if (given := found()) is not None:
                mark_stepped(given)  # for schedulers that were made for it
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients locally and send none.

            for part in parts[:-1]:
                with optimizer.no_sync():
                    loss_of(model, part).backward()
            loss_of(model, parts[-1]).backward()
            optimizer.step()

        The next backward pass outside reduces the sum; so does step() at stages 1 and 2. Until then
        gradients need the memory of unsharded ones. Stage 1 always reduces in step().

        Raises:
            RuntimeError: with offload_weights, which offloads gradients in each pass.
        """
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Multiplies the gradients that wait for step() by min(1, max_norm / norm).

        It replaces torch.nn.utils.clip_grad_norm_. The norm is the 2-norm over all weights and
        ranks, without the loss scale. With max_norm=math.inf nothing is clipped.

        Returns:
            The norm before clipping: a float32 scalar tensor, bitwise equal on all ranks; 0 without
            gradients.

        Raises:
            ValueError: max_norm is not positive.
            RuntimeError: with error_if_nonfinite, the norm is not finite. The gradients are
                dropped. Without it they are unchanged: a loss scale, or torch.amp.GradScaler, skips
                the step.

        Collective: reduces gradients that are not reduced yet.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm!r}")
        with torch.no_grad():
            self._agree()
            norm = self._look()
            if math.isfinite(norm) and norm > 0:
                self._scale_gradients(clip_factor(norm, max_norm))
        if error_if_nonfinite and not math.isfinite(norm):
            self._refuse_not_finite(norm)
        return torch.tensor(norm, dtype=torch.float32, device=self._device())

    def train(self) -> None:
        """For schedule-free optimizers: the weights to train. Collective."""
        self._set_mode("train")

    def eval(self) -> None:
        """For schedule-free optimizers: the weights to evaluate or to save. Collective."""
        self._set_mode("eval")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError, because zero.shard() has already sharded the weights."""
        if self._is_made:
            raise ValueError(
                "add parameter groups to the optimizer before zero.shard(); weights that are to be"
                " trained later may be in them, frozen by requires_grad_(False)"
            )
        super().add_param_group(param_group)

    def gradient_tensors(self) -> list[Tensor]:
        """The gradient tensors of this rank now, buffers and shards, for measurements."""
        return [grad for _, grad in self._shards()]

    def state_tensors(self) -> list[Tensor]:
        """The state tensors of this rank, with the float32 masters of 16-bit weights."""
        params = (p for p in self.all_params() if not self._inner_by_param[p].is_offloaded)
        states = [*map(self._state_of, params)]
        values = (local_of(leaf) for leaf in tree_leaves(states) if isinstance(leaf, Tensor))
        return [value for value in values if value.dim()]

    # ---- the step

    def _device(self) -> torch.device:
        return self.all_params()[0].device

    @cached_property
    def _axes(self) -> Axes:
        """The ranks with the other elements of the tensors from _shards()."""
        model = self._model()
        assert model is not None
        axes = describe(model).axes()
        # DTensors, as at stage 3, have their own sharding.
        is_flat = not any(isinstance(param, DTensor) for param in self.all_params())
        return axes.sharded_over({p: self.group_of(p) for p in axes.shardings}) if is_flat else axes

    def _look(self) -> float:
        """The norm of all gradients, reduced, without the loss scale. Collective."""
        self._reduce()
        zero = torch.zeros(1, dtype=torch.float64, device=self._device())
        own: dict[Sharding, Tensor] = {}
        for param, grad in self._shards():
            sharding = self._axes.shardings.get(param)
            if sharding is not None and grad.numel():  # else tied, and counted by an earlier stage
                norm = torch.linalg.vector_norm(grad, dtype=torch.float32).double()
                own[sharding] = own.get(sharding, zero) + norm.square()
        return float(over_all_ranks(self._axes, own, zero, num_sums=1)) ** 0.5 / self._grad_scale

    def _refuse_not_finite(self, norm: float) -> None:
        self._forget_gradients()
        raise RuntimeError(f"the norm of the gradients is {norm}; no weight has been written")

    def _check_unchanged(self) -> None:
        """Raises ValueError if the model has new weights that are not sharded."""
        groups = iter(self.param_groups)  # which users may have replaced
        for inner in self._inners:
            inner.groups[:] = islice(groups, len(inner.groups))
        model, known = self._model(), set(self.all_params())
        for name, param in model.named_parameters() if model is not None else ():
            if param.requires_grad and param not in known:
                raise ValueError(
                    f"{name} was added or replaced, or made to require grad, after zero.shard() and"
                    " would not be updated: change the model before"
                )
            self._check_memory_of(name, param)

    def _check_memory_of(self, name: str, param: nn.Parameter) -> None:
        """Raises ValueError if a weight of the model has left its shards."""

    @property
    def _grad_scale(self) -> float:
        """The remaining factor of reduced gradients."""
        return self.loss_scale

    def _step(self) -> None:
        factor = 1 / self._grad_scale
        if self.options.needs_all_gradients:
            self.grad_norm = self._look()
            is_overflow = not math.isfinite(self.grad_norm)
            if self._scale is not None:
                self._scale.update(is_overflow)
                if is_overflow:
                    self._forget_gradients()
                    return
            elif is_overflow:
                self._refuse_not_finite(self.grad_norm)
            if self.options.clip_grad_norm is not None:
                factor *= clip_factor(self.grad_norm, self.options.clip_grad_norm)
        self._update(factor)
        self._forget_gradients()

    @abstractmethod
    def _set_sync(self, is_on: bool) -> None:
        """Whether backward passes reduce gradients."""

    @abstractmethod
    def _agree(self) -> bool:
        """Whether any rank has a gradient since the last step. Collective."""

    def _reduce(self) -> None:
        """Reduces gradients that are not reduced yet, after _agree(). Collective."""

    def _scale_gradients(self, factor: float) -> None:
        """Multiplies reduced gradients."""
        if factor != 1 and (grads := [grad for _, grad in self._shards()]):
            foreach_mul_(grads, factor)

    @abstractmethod
    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weights, and this rank's elements of their reduced gradients."""

    @abstractmethod
    def _update(self, factor: float) -> None:
        """Updates all weights by their gradients times a factor, reduced or not. Collective."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drops all gradients."""
