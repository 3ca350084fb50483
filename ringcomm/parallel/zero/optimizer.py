"""The optimizer that zero.shard() returns: and the step of every stage."""

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm import torch_names
from ringcomm.parallel.clip import LossScale, clip_factor, norm_of_shards
from ringcomm.parallel.flat_collectives import local_of, raise_on_all
from ringcomm.parallel.model.cut import Axes
from ringcomm.parallel.offload.state_rows import StatesView
from ringcomm.parallel.optimizer_classes import over_groups, params_in
from ringcomm.parallel.zero.inner import Given, Grads, InnerSteps, refuse_ddp
from ringcomm.parallel.zero.states import ShardedStates


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer in which each rank updates 1/N of the weights.

    Its parameter groups are the dicts of the given optimizer. `state` has this rank's parts of
    states and may be modified, except if it is offloaded. Copying and pickling raise. A weight
    without a gradient on any rank is not updated. At stages 1 and 2, a missing gradient on some
    ranks counts as zeros in the mean.

    Attributes:
        grad_norm: the 2-norm of all gradients before clipping, without the loss scale, in the last
            step that computed it: with clip_grad_norm or a loss scale. None before.
    """

    _inner_class = InnerSteps
    _grad_device: torch.device | None = None  # of _shards(); default: that of the weights
    kept_states: dict[Any, dict[str, Any]]  # `state`, but for those that are offloaded

    def __init__(self, given: Given) -> None:
        self.options, self.group = given.options, given.group
        scale = given.options.loss_scale
        self.loss_scaling = LossScale(scale) if scale is not None else None
        self.grad_norm: float | None = None
        self._described, self._model = given.model, given.model.module
        self._is_made, self._num_no_sync = False, 0
        makers = [inner.optimizer for inner in given.optimizers]
        makers += [maker.given for maker in makers if hasattr(maker, "given")]
        self._given = [weakref.ref(maker) for maker in makers]
        inners = [
            inner if inner.is_offloaded else inner._replace(optimizer=over_groups(inner.plain, []))
            for inner in given.optimizers
        ]
        self.inner = self._inner_class(self, inners)
        # The same dicts: a learning-rate scheduler of the given optimizer sets these options.
        super().__init__(given.groups, {})
        self.defaults = {}
        for inner in given.optimizers:
            self.defaults = {**inner.optimizer.defaults, **self.defaults}
            torch_names.move_hooks(inner.optimizer, self)
        for key in ("betas", "momentum"):  # which OneCycleLR then expects in all groups
            if not all(key in group for group in self.param_groups):
                self.defaults.pop(key, None)
        self._is_made = True
        # Before fully_shard's hook, which replaces the weights.
        self._model.register_forward_pre_hook(refuse_ddp, prepend=True)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError(
            "an optimizer of zero.shard() cannot be copied or pickled: save"
            " ringcomm.parallel.get_state_dict(model, optimizer) instead"
        )

    # ---- what users call

    @property
    def state(self) -> Any:
        """This rank's part of each weight's state, by weight; copies if it is offloaded.

        Raises RuntimeError with offload_weights: torch.distributed.checkpoint would find no state.
        """
        if self.options.offload_weights:
            raise RuntimeError(
                "with offload_weights the states are outside the optimizer, where torch's own"
                " get_state_dict() cannot find them: use ringcomm.parallel.get_state_dict()"
            )
        if not self.inner.has_offloaded:
            return self.kept_states
        states, kept = self.saved_states, self.kept_states
        stepped = [p for p in self.all_params() if p in kept or states.has_stepped(p)]
        return StatesView(stepped, lambda param: kept.get(param) or states.of(param))

    @state.setter
    def state(self, states: Any) -> None:
        if self._is_made and self.inner.has_offloaded:
            raise AttributeError(
                "the states are offloaded, and `state` has copies: use load_state_dict() to"
                " replace them"
            )
        self.kept_states = states

    @property
    def saved_states(self) -> ShardedStates:
        """The states, for state dicts."""
        return ShardedStates(self)

    @torch.inference_mode(False)  # DTensors cannot be detached there
    def state_dict(self) -> dict[str, Any]:
        """In torch's format; states are DTensors, of which this rank has rows.

        Use it with torch.distributed.checkpoint and its get_state_dict(model, optimizer). Pickling
        rows of several ranks, as torch.save() does, raises RuntimeError. "master" has the float32
        values of a 16-bit weight.

        Collective at stages 1 and 2, with offload_weights, and at stage 3 with optimizers that need
        full matrices, such as Muon: states are gathered one at a time and split into rows.
        """
        torch_names.run_state_hooks(self, "state_dict_pre")
        with torch.no_grad():
            found = self.saved_states.rows()
        return torch_names.run_state_hooks(self, "state_dict_post", found)

    @torch.inference_mode(False)  # updates must be able to write states
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict() of this rank, or a full one of torch's optimizer.

        Raises:
            ValueError: on all ranks: it is no state, or from another rank, world size or optimizer.
                Nothing has been written.

        Collective.
        """
        given, states, problem = dict[str, Any](), dict[Any, dict[str, Any]](), None
        try:
            given = torch_names.run_state_hooks(self, "load_state_dict_pre", state_dict.copy())
            states = self.saved_states.checked(given)
        except Exception as error:
            problem = error if isinstance(error, ValueError) else repr(error)
        raise_on_all(problem, self.group)
        self.saved_states.load(given["param_groups"], states, is_full=True)
        torch_names.run_state_hooks(self, "load_state_dict_post")

    @property
    def loss_scale(self) -> float:
        """The current factor of scale()."""
        return 1.0 if self.loss_scaling is None else self.loss_scaling.value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself without a loss scale."""
        return loss if self.loss_scaling is None else loss * self.loss_scaling.value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights with the accumulated gradients, averaged over the ranks.

        With a loss scale, an overflow on any rank skips the step on all ranks and halves the scale.
        Afterwards gradients are dropped, also of a step that was made and without zero_grad().

        Raises:
            ValueError: the model was changed: a weight was added or moved. Or ranks have different
                lr, betas, momentum or weight_decay in parameter groups.
            RuntimeError: with clip_grad_norm and no loss scale, the norm is not finite; at stage 3,
                `.data` of a weight was set, or its last backward pass was in no_sync(). No rank has
                written a weight, and in the first case the gradients are dropped. At stage 2, also
                by a backward pass: zero_grad() has dropped gradients on some ranks only.

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
                torch_names.mark_stepped(given)  # for schedulers that were made for it
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients locally and send none.

        The next backward pass outside reduces the sum; so does step() at stages 1 and 2. Until then
        gradients need the memory of unsharded ones. Stage 1 always reduces in step().

        Raises:
            RuntimeError: with offload_weights, which offloads gradients in each pass.
        """
        self._num_no_sync += 1
        self._set_sync(False)
        try:
            yield
        finally:
            self._num_no_sync -= 1
            self._set_sync(self._num_no_sync == 0)

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
        return torch.full((), norm, dtype=torch.float32, device=self.all_params()[0].device)

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

    # ---- this rank's parts of weights and states

    def all_params(self) -> list[Any]:
        """The parameters of all groups, as torch's state_dict() numbers them."""
        return params_in(self.param_groups)

    def part_of(self, param: Any) -> Tensor:
        """This rank's part of a weight, which the optimizer updates."""
        return local_of(param.data)

    def range_of(self, param: Any, rank: int | None = None) -> Any:
        """The elements [begin, end) of a flat weight that a rank updates; by default this rank.

        None for DTensors.
        """

    def master_of(self, param: Any) -> dict[str, Any]:
        """A "master" that is outside of a weight's state."""
        return {}

    def set_state_of(self, param: Any, state: dict[str, Any]) -> None:
        """Replaces this rank's part of a weight's state."""
        inner = self.inner.by_param[param]
        self.kept_states.pop(param, None)
        if inner.is_offloaded:
            inner.optimizer.set_state_of(self.inner.own[param], state)
        elif state:
            self.kept_states[param] = state

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """A context for replacing states outside a step. Collective."""
        yield

    # ---- the step: step() calls _agree(), then _step(). _step() calls _look(), _update() and
    # _forget_gradients(); _update() calls _step_inner(). Each stage defines the abstract ones.

    def _step_inner(self, grads: Grads, factor: float) -> None:
        """Steps of the given classes on parts of weights, by their gradients times a factor."""
        self.inner.run("step", grads, factor)
        whole = {param for param in grads if self.inner.by_param[param].is_whole}
        self.saved_states.share_keys(whole - self.inner.told)
        self.inner.told |= whole

    def _set_mode(self, mode: str) -> None:
        # Trainer calls train() for each micro-batch.
        if mode != self.inner.mode and any(hasattr(inner.plain, mode) for inner in self.inner):
            self.inner.mode = mode
            with torch.no_grad():
                self._change_mode(mode)

    def _change_mode(self, mode: str) -> None:
        self.inner.run(mode, dict.fromkeys(self.all_params()))

    @cached_property
    def _axes(self) -> Axes:
        """The ranks with the other elements of the tensors from _shards()."""
        axes = self._described.axes()
        # DTensors, as at stage 3, have their own sharding.
        is_flat = not any(isinstance(param, DTensor) for param in self.all_params())
        return axes.sharded_over(self.inner.group_of) if is_flat else axes

    def _look(self) -> float:
        """The norm of all gradients, reduced, without the loss scale. Collective."""
        self._reduce()
        device = self._grad_device or self.all_params()[0].device
        norm = norm_of_shards(self._axes, self._shards(), device)
        return norm / self._grad_scale

    def _refuse_not_finite(self, norm: float) -> None:
        self._forget_gradients()
        raise RuntimeError(f"the norm of the gradients is {norm}; no weight has been written")

    def _check_unchanged(self) -> None:
        """Takes groups that users have replaced; raises ValueError if the model has new weights."""
        groups = iter(self.param_groups)  # which users may have replaced
        for inner in self.inner:
            inner.groups[:] = islice(groups, len(inner.groups))
        known = set(self.all_params())
        for name, param in self._model.named_parameters():
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
            if self.loss_scaling is not None:
                self.loss_scaling.update(is_overflow)
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
            torch_names.foreach_mul_(grads, factor)

    @abstractmethod
    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weights, and this rank's elements of their reduced gradients."""

    @abstractmethod
    def _update(self, factor: float) -> None:
        """Updates all weights by their gradients times a factor, reduced or not. Collective."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drops all gradients."""
