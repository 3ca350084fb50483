"""What zero.shard() returns for an optimizer at every stage: the step, whoever holds the shards."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.loss_scale import LossScale, clip_factor
from ringcomm.parallel.zero.checks import check_unchanged
from ringcomm.parallel.zero.options import ShardOptions
from ringcomm.parallel.zero.statistics import Statistics, reduce_statistics


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer over weights of which each rank updates 1/N.

    Its parameter groups are those of the optimizer that was given, so schedulers and users change
    them as ever. A step without a gradient on this rank does nothing, and must do so on all. Where
    there are gradients, weights without one have a gradient of zeros, as under DDP: freeze what is
    not trained.
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
            if self._has_gradients():
                self._step()
        return loss

    def statistics(self) -> Statistics:
        """Of the gradients that wait for step(), without the loss scale.

        Collective: reduces the gradients where that is still to come, and two all_reduces.
        """
        with torch.no_grad():
            self._reduce()
            found = reduce_statistics(self._shards(), self._device(), self.group)
        scale = self.loss_scale
        return found._replace(grad_norm=found.grad_norm / scale, grad_max=found.grad_max / scale)

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

    def _check_unchanged(self) -> None:
        known = {param for group in self.param_groups for param in group["params"]}
        check_unchanged(self._model(), known)

    def _step(self) -> None:
        factor = 1 / self.loss_scale
        if self.options.looks_first:
            self._last = self.statistics()
            num_not_finite = self._last.num_not_finite
            if self._scale is not None:
                self._scale.update(num_not_finite > 0)
            if num_not_finite > 0:
                self._forget_gradients()
                if self._scale is None:
                    raise RuntimeError(
                        f"{num_not_finite} elements of gradients are not finite; no weight has been"
                        " written"
                    )
                return
            if self.options.clip_grad_norm is not None:
                factor *= clip_factor(self._last.grad_norm, self.options.clip_grad_norm)
        self._update(factor)
        self._forget_gradients()

    @abstractmethod
    def _has_gradients(self) -> bool:
        """Whether any gradient has come since the last step."""

    @abstractmethod
    def _reduce(self) -> None:
        """Reduces what has not been. Collective."""

    @abstractmethod
    def _shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's shards of weights, with their reduced gradients."""

    @abstractmethod
    def _update(self, factor: float) -> None:
        """Updates all weights by their gradients times a factor, reduced or not. Collective."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drops all gradients."""

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; see zero.full_state_dict() for one that other world sizes can load."""
        found = {
            "param_groups": super().state_dict()["param_groups"],
            "shards": self._shard_state(),
            "rank": self.group.rank(),
            "world_size": self.group.size(),
        }
        if self._scale is not None:
            found["loss_scale"] = self._scale.state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the state_dict() of this rank was; the weights are the model's own.

        Raises:
            ValueError: it is of another rank or world size, or of another optimizer.
        """
        try:
            came_from = state_dict["rank"], state_dict["world_size"]
        except KeyError:
            raise ValueError(
                "this is no state_dict() of a sharded optimizer: zero.load_full_state_dict() takes"
                " torch's"
            ) from None
        if came_from != (self.group.rank(), self.group.size()):
            raise ValueError(
                f"the state is of rank {came_from[0]} of {came_from[1]}, and this is rank"
                f" {self.group.rank()} of {self.group.size()}: zero.full_state_dict() and"
                " zero.load_full_state_dict() go between world sizes"
            )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._load_shard_state(state_dict["shards"])
        if self._scale is not None and "loss_scale" in state_dict:
            self._scale.load(state_dict["loss_scale"])

    @abstractmethod
    def _shard_state(self) -> Any:
        """What load needs of this rank's states."""

    @abstractmethod
    def _load_shard_state(self, state: Any) -> None:
        """The inverse."""

    @abstractmethod
    def _whole_states(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Parameters with their whole state, on the CPU, in an order of all ranks. Collective."""

    @abstractmethod
    def _take_states(self, states: dict[Any, dict[str, Any]]) -> None:
        """Takes this rank's shards of whole states by parameter."""


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An optimizer's state."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
