"""The optimizer that zero.shard() returns: the step of every stage, and the options."""

from __future__ import annotations

import dataclasses
import math
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringcomm.loss_scale import LossScale, clip_factor
from ringcomm.parallel.clip import over_all_ranks
from ringcomm.parallel.flat_collectives import device_of, local_of
from ringcomm.parallel.model.axes import Axes, Held
from ringcomm.parallel.model.describe import Model, describe
from ringcomm.parallel.model.owners import find_trainer
from ringcomm.parallel.offload.operands import Operands
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.offload.tiers import Tier
from ringcomm.parallel.optimizer_classes import BY_WEIGHT, like_weight, of_parts, over_groups
from ringcomm.parallel.zero.states import States
from ringcomm.torch_names import active_ddp, mark_stepped, move_hooks, tree_leaves


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
    resume: bool = False

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
        if self.resume and not self.offload_weights:
            raise ValueError("resume is for offload_weights; load a state_dict() elsewhere")
        if self.offload_weights and self.param_dtype is not None:
            raise ValueError(
                "param_dtype is not supported with offload_weights: cast the model itself"
            )

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are accumulated and reduced."""
        return self.reduce_dtype or torch.float32

    @property
    def looks_first(self) -> bool:
        """Whether all gradients must be known before a weight is written."""
        return self.clip_grad_norm is not None or self.loss_scale is not None


class Inner(NamedTuple):
    """One of the optimizers that zero.shard() was given.

    Attributes:
        optimizer: the given object, or a copy of it without groups, which steps on parts.
        groups: its parameter groups, which are those of the returned optimizer.
        is_whole: whether each of its weights is updated as a whole, by one rank.
        takes_empty: whether it can step where it has no weights, which may count a group's steps.
        before: in a step of several calls, the options of the groups at its beginning.
    """

    optimizer: Any
    groups: list[dict[str, Any]]
    is_whole: bool
    takes_empty: bool
    before: list[dict[str, Any]] | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether its states are in a tier."""
        return isinstance(self.optimizer, Offloaded)

    @property
    def plain(self) -> Any:
        """The optimizer of the class that updates weights, which an Offloaded one contains."""
        return getattr(self.optimizer, "inner", self.optimizer)


class Parts(Operands):
    """Operands of offloaded optimizers: parts of weights and their gradients, during a step."""

    def __init__(self) -> None:
        self.shapes: dict[Any, torch.Size] = {}
        self.of: dict[Any, tuple[Tensor, Tensor | None]] = {}

    def shape(self, param: Any) -> torch.Size:
        """See Operands."""
        return self.shapes[param]

    def get(self, param: Any) -> tuple[Tensor, Tensor | None]:
        """See Operands."""
        return self.of[param]


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


def _refuse_ddp(model: nn.Module, *_: Any) -> None:
    """A forward pre-hook; raises if DistributedDataParallel runs the model, but not its copies."""
    if active_ddp() is not None and any(map(find_trainer, model.parameters())):
        raise RuntimeError(
            "the model was sharded by zero.shard() but runs in DistributedDataParallel,"
            " which would reduce gradients again: call the model itself. With Accelerate or"
            " Trainer, call register() of ringcomm.integrations"
        )


class ZeroOptimizer(States):
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
        return axes.sharded_over({p: self.group_of(p) for p in axes.held}) if is_flat else axes

    def _look(self) -> float:
        """The norm of all gradients, reduced, without the loss scale. Collective."""
        self._reduce()
        zero = torch.zeros(1, dtype=torch.float64, device=self._device())
        own: dict[Held, Tensor] = {}
        for param, grad in self._shards():
            held = self._axes.held.get(param)
            if held is not None and grad.numel():  # else tied, and counted by an earlier stage
                norm = torch.linalg.vector_norm(grad, dtype=torch.float32).double()
                own[held] = own.get(held, zero) + norm.square()
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

    def _place_offloaded(self, tier: Tier | None = None) -> None:
        """Makes the offloaded optimizers over the tensors `_own`."""
        num_before, inners = 0, []
        for inner in self._inners:
            groups = [{**g, "params": [*map(self._own.get, g["params"])]} for g in inner.groups]
            own, first = inner, num_before
            num_before += sum(len(group["params"]) for group in groups)
            if inner.is_offloaded:
                operands = self._operands_of(inner)
                made = inner.optimizer.over(groups, operands, tier, first)
                own = inner._replace(optimizer=made)
            inners.append(own)
        self._inners = inners
        vars(self).pop("_inner_by_param", None)

    def _operands_of(self, inner: Inner) -> Operands:
        """Where an offloaded optimizer finds weights and gradients."""
        for group in inner.groups:
            self._parts.shapes |= {p: self._part_of(p).shape for p in group["params"]}
        return self._parts

    def _step_inner(self, grads: Mapping[Any, Tensor | None], factor: float) -> None:
        """Steps of the given classes on parts of weights, by their gradients times a factor."""
        self._run_inners("step", grads, factor)
        whole = {param for param in grads if self._inner_by_param[param].is_whole}
        self.share_keys(whole - self._told)
        self._told |= whole

    def _run_inners(
        self, method: str, grads: Mapping[Any, Tensor | None], factor: float = 1.0
    ) -> None:
        """Calls a method of the given classes that have it, on parts of weights."""
        for inner in self._inners:
            own = {p: grads[p] for group in inner.groups for p in group["params"] if p in grads}
            if not hasattr(inner.plain, method):
                continue
            if inner.is_whole:
                self._run_whole(inner, method, own, factor)
            elif own or inner.takes_empty:
                self._run_parts(inner, method, own, factor)

    def _run_parts(
        self, inner: Inner, method: str, grads: Mapping[Any, Tensor | None], factor: float
    ) -> None:
        """As _run_one(), on this rank's parts."""
        self._run_one(inner, method, {p: self._part_of(p) for p in grads}, grads, factor)

    def _run_whole(
        self, inner: Inner, method: str, grads: Mapping[Any, Tensor | None], factor: float
    ) -> None:
        """As _run_owned(); `grads` has all weights. Collective."""
        parts = {p: part for p in grads if (part := self._part_of(p)).numel()}
        self._run_owned(inner, method, parts, grads, factor)

    def _run_owned(
        self,
        inner: Inner,
        method: str,
        parts: dict[Any, Tensor],
        grads: Mapping[Any, Tensor | None],
        factor: float,
    ) -> None:
        """As _run_one() on the weights that this rank owns. Collective.

        Raises on all ranks what one raises: the others would wait for its weights.
        """
        failure: Exception | None = None
        try:
            if parts or inner.takes_empty:
                self._run_one(inner, method, parts, grads, factor)
        except Exception as error:
            failure = error
        mine = [failure is not None]
        has_failed = torch.tensor(mine, dtype=torch.uint8, device=device_of(self.group))
        dist.all_reduce(has_failed, dist.ReduceOp.MAX, group=self.group)
        if failure is not None:
            raise failure
        if has_failed.any():
            raise RuntimeError(
                f"{method}() of {type(inner.optimizer).__name__} has raised an error on another"
                " rank, for a weight that it owns: go on from a checkpoint, because the others may"
                " have been updated"
            )

    def _run_one(
        self,
        given: Inner,
        method: str,
        parts: dict[Any, Tensor],
        grads: Mapping[Any, Tensor | None],
        factor: float,
    ) -> None:
        inner = given.optimizer
        if given.is_offloaded:
            self._parts.of = {self._own[p]: (part, grads[p]) for p, part in parts.items()}
            self._run_offloaded(given, method, parts, factor)
            self._parts.of = {}
            return
        homes, parts = parts, {param: like_weight(part, param) for param, part in parts.items()}
        for param, part in parts.items():
            if (grad := grads[param]) is not None:
                part.grad = grad.to(part.dtype).view(part.shape)
                if factor != 1:
                    part.grad *= factor
        groups = [(group, of_parts(group, parts)) for group in given.groups]
        groups = [pair for pair in groups if pair[1]["params"] or given.takes_empty]
        inner.param_groups = [own for _, own in groups]
        states, inner.state = self._states, defaultdict(dict)
        for param, part in parts.items():
            state = {key: x for key, x in states.get(param, {}).items() if key != "master"}
            if state:
                inner.state[part] = state
        getattr(inner, method)()
        for group, own in groups:
            group.update({key: value for key, value in own.items() if key not in BY_WEIGHT})
        for param, part in parts.items():
            if part.data_ptr() != homes[param].data_ptr():  # the class has set `.data`
                homes[param].copy_(part)
            if part in inner.state:
                states[param] = inner.state[part]
        inner.param_groups, inner.state = [], {}

    def _run_offloaded(
        self, given: Inner, method: str, params: Iterable[Any], factor: float
    ) -> None:
        inner = given.optimizer
        for own, group in zip(inner.param_groups, given.groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        inner.run(method, [self._own[param] for param in params], factor, given.before)
        for own, group in zip(inner.param_groups, given.groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})

    def _set_mode(self, mode: str) -> None:
        """Calls train() or eval() of the given classes that have it, once. Collective."""
        if mode == self._mode or not any(hasattr(x.plain, mode) for x in self._inners):
            return
        self._mode = mode  # Trainer calls train() for each micro-batch
        with torch.no_grad():
            self._change_mode(mode)

    def _change_mode(self, mode: str) -> None:
        self._run_inners(mode, dict.fromkeys(self.all_params()))

    def inner_of(self, param: Any) -> Any:
        """The optimizer, of the given class, that updates a weight."""
        return self._inner_by_param[param].plain

    @cached_property
    def _inner_by_param(self) -> dict[Any, Inner]:
        found = ((p, inner) for inner in self._inners for g in inner.groups for p in g["params"])
        return dict(found)

    @property
    def _grad_scale(self) -> float:
        """The remaining factor of reduced gradients."""
        return self.loss_scale

    def _step(self) -> None:
        factor = 1 / self._grad_scale
        if self.options.looks_first:
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
            torch._foreach_mul_(grads, factor)

    @abstractmethod
    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weights, and this rank's elements of their reduced gradients."""

    @abstractmethod
    def _update(self, factor: float) -> None:
        """Updates all weights by their gradients times a factor, reduced or not. Collective."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drops all gradients."""
