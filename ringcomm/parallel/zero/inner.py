"""The classes that zero.shard() was given, and their steps on parts of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.offload.operands import Operands
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.offload.tiers import Tier
from ringcomm.parallel.optimizer_classes import BY_WEIGHT, like_weight, of_parts
from ringcomm.parallel.zero.states import States


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


class InnerSteps(States):
    """Steps of the given classes on this rank's parts of weights."""

    _parts: Parts

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
