"""What zero.shard() returns for an optimizer at every stage: the step, whoever holds the shards."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.loss_scale import LossScale, clip_factor
from ringcomm.parallel.model_axes import Axes, axes_of
from ringcomm.parallel.zero.checks import check_unchanged
from ringcomm.parallel.zero.options import ShardOptions
from ringcomm.parallel.zero.state_rows import check_rows, cut_rows, mesh_of
from ringcomm.parallel.zero.states_view import StatesView
from ringcomm.parallel.zero.statistics import Statistics, reduce_statistics

# Of a parameter group in a state_dict(): the loss scale, which torch's format has no place for.
_SCALE_KEYS = {"value": "loss_scale", "num_good_steps": "loss_scale_good_steps"}


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer over weights of which each rank updates 1/N.

    Its parameter groups are those of the optimizer that was given, so schedulers and users change
    them as ever. A weight without a gradient on any rank is left alone, as by torch's optimizers.
    At stages 1 and 2 a weight that only some ranks have a gradient of gets the mean with zeros for
    the others, as under DistributedDataParallel(find_unused_parameters=True).

    With gradients in buckets or elsewhere (stages 1 and 2, offload_weights) `param.grad` is None or
    has no values, and raises RuntimeError when it is used.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        group: dist.ProcessGroup,
        options: ShardOptions,
    ) -> None:
        self.options = options
        self.group = group
        self._scale = LossScale(options.loss_scale) if options.loss_scale is not None else None
        self._last: Statistics | None = None
        self._model = weakref.ref(model)
        self._is_made = False
        _refuse_ddp(model, self)
        super().__init__([dict(param_group) for param_group in groups], {})
        self._is_made = True

    # ---- what users call

    @property
    def loss_scale(self) -> float:
        """What scale() multiplies a loss by now."""
        return 1.0 if self._scale is None else self._scale.value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward(); the loss itself where there is none."""
        return loss if self._scale is None else loss * self._scale.value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights by the gradients that have come, averaged over the ranks.

        With a loss scale a step whose gradients are not all finite, on any rank, changes nothing
        on any rank, and the scale is halved.

        Raises:
            ValueError: the model was changed: a weight was added or moved.
            RuntimeError: with clip_grad_norm and no loss scale, a gradient is not finite on some
                rank. No rank has written a weight, and the gradients are dropped.

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
        return loss

    def statistics(self) -> Statistics:
        """Of the gradients that wait for step(), without the loss scale.

        Collective: reduces the gradients where that is still to come, and an all_gather of
        32 bytes a rank over each dimension of a mesh.
        """
        with torch.no_grad():
            self._agree()
            return self._look()

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Multiplies the gradients that wait for step() by min(1, max_norm / norm).

        In place of torch.nn.utils.clip_grad_norm_. The norm is the 2-norm over all weights and
        ranks, without the loss scale.

        Returns:
            The norm before clipping: float32, no dimensions, the same bits on all ranks; 0 without
            gradients.

        Raises:
            ValueError: max_norm is not positive.
            RuntimeError: the norm is not finite, and error_if_nonfinite says that this is an error.
                No weight has been written, and the gradients are dropped. Otherwise gradients stay
                as they are: a loss scale, or torch.amp.GradScaler, skips the step.

        Collective, as statistics() is.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is positive, got {max_norm!r}")
        found = self.statistics()
        if math.isfinite(found.grad_norm):
            with torch.no_grad():
                self._scale_gradients(clip_factor(found.grad_norm, max_norm))
        elif error_if_nonfinite:
            self._refuse_not_finite(found)
        return torch.tensor(found.grad_norm, dtype=torch.float32, device=self._device())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after zero.shard(), which has cut the weights into shards.

        Raises:
            ValueError: always.
        """
        if self._is_made:
            raise ValueError("add parameter groups to the optimizer before zero.shard()")
        super().add_param_group(param_group)

    @property
    def last_statistics(self) -> Statistics | None:
        """Of the last step that had to look: with clip_grad_norm or a loss scale."""
        return self._last

    @abstractmethod
    def gradient_tensors(self) -> list[Tensor]:
        """What this rank keeps of gradients now, for measuring: buffers and shards."""

    @abstractmethod
    def state_tensors(self) -> list[Tensor]:
        """What it keeps of the optimizer's state, with float32 weights beside 16-bit ones."""

    # ---- the step

    def _device(self) -> torch.device:
        params = (param for group in self.param_groups for param in group["params"])
        device: torch.device = next(params).device
        return device

    @cached_property
    def _axes(self) -> Axes:
        """Who has the other elements of what _shards() yields."""
        model = self._model()
        assert model is not None
        axes = axes_of(model)
        # DTensors, as at stage 3, say themselves how they are sharded.
        is_flat = not any(isinstance(param, DTensor) for param in self.all_params())
        return axes.sharded_over(self.group) if is_flat else axes

    def _look(self) -> Statistics:
        self._reduce()
        found = reduce_statistics(self._shards(), self._axes, self._device())
        scale = self._grad_scale
        return found._replace(grad_norm=found.grad_norm / scale, grad_max=found.grad_max / scale)

    def _refuse_not_finite(self, found: Statistics) -> None:
        self._forget_gradients()
        raise RuntimeError(
            f"{found.num_not_finite} elements of gradients are not finite; no weight has been"
            " written"
        )

    def _check_unchanged(self) -> None:
        known = {param for group in self.param_groups for param in group["params"]}
        check_unchanged(self._model(), known)

    @property
    def _grad_scale(self) -> float:
        """What reduced gradients are still multiplied by."""
        return self.loss_scale

    def _step(self) -> None:
        factor = 1 / self._grad_scale
        if self.options.looks_first:
            self._last = self._look()
            is_overflow = self._last.num_not_finite > 0
            if self._scale is not None:
                self._scale.update(is_overflow)
                if is_overflow:
                    self._forget_gradients()
                    return
            elif is_overflow:
                self._refuse_not_finite(self._last)
            if self.options.clip_grad_norm is not None:
                factor *= clip_factor(self._last.grad_norm, self.options.clip_grad_norm)
        self._update(factor)
        self._forget_gradients()

    @abstractmethod
    def _agree(self) -> bool:
        """Whether any gradient has come since the last step. Collective at stages 1 and 2."""

    @abstractmethod
    def _reduce(self) -> None:
        """Reduces what has not been, after _agree(). Collective."""

    def _scale_gradients(self, factor: float) -> None:
        """Multiplies reduced gradients."""
        if grads := [grad for _, _, grad in self._shards()]:
            torch._foreach_mul_(grads, factor)

    @abstractmethod
    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Weights, this rank's elements of them, and of their reduced gradients."""

    @abstractmethod
    def _update(self, factor: float) -> None:
        """Updates all weights by their gradients times a factor, reduced or not. Collective."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drops all gradients."""

    # ---- state

    @property
    def state(self) -> Any:
        """This rank's part of each weight's state, by weight; to be read."""
        return StatesView(self.all_params, self.has_stepped, self._state_of)

    @state.setter
    def state(self, _: Any) -> None:
        """torch's constructor sets it."""

    def all_params(self) -> list[Any]:
        """The parameters of all groups, as torch's state_dict() numbers them."""
        return [param for group in self.param_groups for param in group["params"]]

    def numbered_groups(self) -> list[dict[str, Any]]:
        """The parameter groups as in torch's state_dict(), with the loss scale in each."""
        numbers = {param: number for number, param in enumerate(self.all_params())}
        scale = {} if self._scale is None else self._scale.state()
        found = []
        for group in self.param_groups:
            mine = {key: value for key, value in group.items() if key != "params"}
            mine |= {_SCALE_KEYS[key]: value for key, value in scale.items()}
            found.append({**mine, "params": [numbers[param] for param in group["params"]]})
        return found

    def state_dict(self) -> dict[str, Any]:
        """In torch's format; states are DTensors, of which this rank has rows.

        For torch.distributed.checkpoint and its get_state_dict(model, optimizer), which save it in
        parts and load it with other world sizes and stages, or into torch's own optimizer. It is a
        rank's own for torch.save(). "master" is a weight in float32, beside 16-bit ones.

        Collective at stages 1 and 2 and with offload_weights: whole states are gathered, one at a
        time, and cut into rows.
        """
        with torch.no_grad():
            states = [self._row_state(param) for param in self.all_params()]
        return {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": self.numbered_groups(),
            "rank": self.group.rank(),
            "world_size": self.group.size(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state_dict(); the weights are the model's own.

        Args:
            state_dict: of this rank, or of torch's optimizer; whole states are the same on all
                ranks.

        Raises:
            ValueError: it is of another rank or world size, or of another optimizer. Nothing has
                been written.

        Collective where states are DTensors, or weights have float32 masters.
        """
        self._load(state_dict["param_groups"], self._checked_states(state_dict), self._cut)

    def load_parts(self, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        """Goes on from this rank's parts of states, by weight, as part_state_of() yields them.

        Collective where weights have float32 masters.
        """
        self._load(groups, states, lambda _, value: value)

    def _load(
        self,
        groups: list[dict[str, Any]],
        states: dict[Any, dict[str, Any]],
        cut: Callable[[Any, Tensor], Tensor],
    ) -> None:
        for saved, group in zip(groups, self.param_groups, strict=True):
            given = {key: value for key, value in saved.items() if key != "params"}
            scale = {key: given.pop(name, None) for key, name in _SCALE_KEYS.items()}
            group.update(given)
            if self._scale is not None and scale["value"] is not None:
                self._scale.load(scale)
        with torch.no_grad():
            self._states_come()
            for group in self.param_groups:
                for param in group["params"]:
                    mine = {
                        key: cut(param, value)
                        if isinstance(value, Tensor) and key != "step"
                        else value
                        for key, value in states.get(param, {}).items()
                    }
                    self._set_state(param, _with_own_step(mine, group, param))
            self._states_taken()

    def _checked_states(self, state_dict: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        """The states by weight, which may be written here."""
        here = self.group.rank(), self.group.size()
        came_from = state_dict.get("rank", here[0]), state_dict.get("world_size", here[1])
        if came_from != here:
            raise ValueError(
                f"the state is of rank {came_from[0]} of {came_from[1]}, and this is rank"
                f" {here[0]} of {here[1]}: ringcomm.parallel.get_state_dict() goes between world"
                " sizes"
            )
        given, mine = state_dict["param_groups"], self.param_groups
        sizes = [len(group["params"]) for group in given], [len(g["params"]) for g in mine]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state has parameter groups of {sizes[0]} parameters, and the optimizer of"
                f" {sizes[1]}"
            )
        numbers = [number for group in given for number in group["params"]]
        states = {}
        for number, param in zip(numbers, self.all_params(), strict=True):
            state = state_dict["state"].get(number, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or key == "step":
                    continue
                if value.shape != param.shape:
                    raise ValueError(
                        f"{key} of parameter {number} is {tuple(value.shape)}, and the parameter"
                        f" {tuple(param.shape)}"
                    )
                if isinstance(value, DTensor):
                    self._check_part(param, value)
            states[param] = state
        return states

    def _check_part(self, param: Any, value: DTensor) -> None:
        """Raises ValueError where a state in parts is not this rank's."""
        check_rows(value, self.group)

    def _row_state(self, param: Any) -> dict[str, Any]:
        """A weight's state, of which this rank has rows. Collective."""
        return {
            key: value if key == "step" else cut_rows(value, mesh_of(self.group, value.device))
            for key, value in self.whole_state(param)
        }

    @abstractmethod
    def whole_state(self, param: Any) -> Iterator[tuple[str, Any]]:
        """A weight's state by key, each value whole. Collective; one value after the other."""

    @abstractmethod
    def _state_of(self, param: Any) -> dict[str, Any]:
        """This rank's part of a weight's state."""

    @abstractmethod
    def range_of(self, param: Any) -> tuple[int, int] | None:
        """The elements [begin, end) of a flat weight that this rank updates; None of DTensors."""

    def part_state_of(self, param: Any, *, is_new: bool) -> dict[str, Any]:
        """This rank's part of a weight's state; with `is_new` what it is before the first step."""
        state = self._state_of(param)
        return {**self.new_state_of(param), **state} if is_new else state

    @abstractmethod
    def new_state_of(self, param: Any) -> dict[str, Any]:
        """What is known of a weight's state before its first step."""

    def forget_steps(self) -> None:
        """Steps count from 0 again; states stay."""

    @abstractmethod
    def has_stepped(self, param: Any) -> bool:
        """Whether a weight has been updated."""

    def _states_come(self) -> None:
        """Before the first _set_state()."""

    @abstractmethod
    def _cut(self, param: Any, value: Tensor) -> Tensor:
        """This rank's part of a state that is whole, or of rows. Collective for rows."""

    @abstractmethod
    def _set_state(self, param: Any, state: dict[str, Any]) -> None:
        """Replaces a weight's state by this rank's part of one."""

    def _states_taken(self) -> None:
        """After the last one. Collective."""


def _with_own_step(state: dict[str, Any], group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """The number of steps in a tensor of its own, where torch's optimizers want it."""
    if "step" not in state:
        return state
    is_on_device = group.get("fused") or group.get("capturable")
    device = param.device if is_on_device else torch.device("cpu")
    return {**state, "step": torch.tensor(float(state["step"]), device=device)}


def _refuse_ddp(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Has the model raise when it is run by DistributedDataParallel."""
    told = weakref.ref(optimizer)

    def check(*_: Any) -> None:
        if DistributedDataParallel._get_active_ddp_module() is not None and told() is not None:
            raise RuntimeError(
                "the model is sharded by zero.shard() and runs in DistributedDataParallel, which"
                " would reduce gradients again: call the model itself. With Accelerate or Trainer,"
                " call prepare() of ringcomm.integrations"
            )

    model.register_forward_pre_hook(check)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An optimizer's state."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
