"""Optimizers of any class with states in host memory or in files, one weight at a time."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.offload.optimizers import OffloadedOptimizer, Operands
from ringcomm.parallel.offload.tiers import Loan, Tier
from ringcomm.parallel.optimizer_classes import (
    attributes_of,
    needs_whole,
    new_state,
    options_of,
    over_groups,
    retire,
    takes_empty_groups,
)
from ringcomm.torch_names import mark_stepped, move_step_hooks, tree_leaves, tree_map_only


@dataclasses.dataclass(frozen=True)
class _Row:
    """A tensor of a state that is a row of the tier."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Offloaded(OffloadedOptimizer):
    """An optimizer of any class, with its states in host memory or in files.

        muon = offload.Offloaded(torch.optim.Muon(matrices), to="nvme", path="/mnt/nvme")
        adamw = offload.AdamW(others, to="nvme", path="/mnt/nvme")
        optimizer = zero.shard(model, [muon, adamw], stage=2)

    It works alone, under DistributedDataParallel, and with zero.shard() at any stage. A step
    updates one weight at a time, while the states of the next one are read and those of the last
    one are written. Tensors of one or more dimensions are offloaded. As with offload.AdamW, 16-bit
    weights have float32 masters, with which the class computes, and files are deleted with the
    process.

    The given optimizer's parameter groups are shared, so that schedulers made for it work. Its
    state and step hooks move here, and its methods raise afterwards.

    Args:
        optimizer: of any class that updates each weight by itself. This is tried, as zero.shard()
            does.
        to: "cpu" or "nvme".
        path: for "nvme", a folder on the disk to use.
        whole: classes of optimizers that need whole weights, and are not tried.

    Raises:
        TypeError: the optimizer does not update each weight by itself, or is offloaded or sharded.
        ValueError: it was given away before, or needs whole weights of which this rank has shards;
            or `to` and `path` do not match.
        OSError: no file can be created at the path.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        to: Literal["cpu", "nvme"] = "cpu",
        path: str | os.PathLike[str] | None = None,
        whole: Collection[type] = (),
    ) -> None:
        is_ours = isinstance(optimizer, OffloadedOptimizer) or hasattr(optimizer, "load_parts")
        if not isinstance(optimizer, torch.optim.Optimizer) or is_ours:
            raise TypeError(
                "offload.Offloaded() takes an optimizer that is neither offloaded nor sharded, got"
                f" {type(optimizer).__name__}"
            )
        if "state_dict" in vars(optimizer):  # see retire()
            raise ValueError(f"this {type(optimizer).__name__} was given to another optimizer")
        self.is_whole = needs_whole(optimizer, whole)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self.is_whole and any(isinstance(param, DTensor) for param in params):
            raise ValueError(
                f"{type(optimizer).__name__} needs whole weights, and this rank has shards: give"
                " offload.Offloaded() to zero.shard(), which shards the model itself"
            )
        super().__init__(optimizer.param_groups, {})
        self.defaults, self.to, self.path = optimizer.defaults, to, path
        self.given, self.inner = optimizer, over_groups(optimizer, [])
        self._takes_empty = takes_empty_groups(optimizer)
        self._begin()
        for param, state in optimizer.state.items():
            self.set_state_of(param, state)
        optimizer.state = defaultdict(dict)
        move_step_hooks(optimizer, self)
        retire(optimizer, "offload.Offloaded()")

    def _begin(
        self, tier: Tier | None = None, operands: Operands | None = None, first: int = 0
    ) -> None:
        super()._begin(tier, operands, first)
        self._values: dict[Tensor, dict[str, Any]] = {}  # states, with rows for tensors
        self._ahead: dict[Tensor, dict[str, Loan]] = {}

    def over(
        self, groups: list[dict[str, Any]], operands: Operands, tier: Tier | None, first: int
    ) -> Offloaded:
        """See OffloadedOptimizer."""
        self.tier.close()
        made = object.__new__(type(self))
        vars(made).update(attributes_of(self))
        made.__setstate__({"param_groups": groups})
        made._begin(tier, operands, first)
        return made

    def step(self, closure: Any = None) -> Any:
        """See OffloadedOptimizer."""
        loss = super().step(closure)
        mark_stepped(self.given)  # for schedulers that were made for it
        return loss

    def train(self) -> None:
        """For schedule-free optimizers."""
        self.run("train", [*self._places()])

    def eval(self) -> None:
        """For schedule-free optimizers."""
        self.run("eval", [*self._places()])

    @torch.no_grad()
    def run(
        self,
        method: str,
        params: Sequence[Tensor],
        grad_scale: float = 1.0,
        before: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """See OffloadedOptimizer."""
        if not hasattr(self.inner, method):
            return
        before = before or [options_of(group) for group in self.param_groups]
        # Each weight begins with the same options: what the class counts there counts once.
        after: dict[int, dict[str, Any]] = {}
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        try:
            for place, param in enumerate(params):
                for needed in params[place : place + 2]:
                    self.start(needed)
                number = group_of[param]
                options = options_of(before[number])
                after[number] = self._run_one(method, param, options, grad_scale)
                if method == "step":
                    self.steps[param] = self.steps.get(param, 0) + 1
            others = [i for i in range(len(before)) if i not in after]
            if others and self._takes_empty:
                groups = [{**options_of(before[i]), "params": []} for i in others]
                after |= zip(others, self._called(method, groups)[0], strict=True)
        finally:
            self._forget_ahead()
        for number, options in after.items():
            old = before[number]
            changed = {
                key: value
                for key, value in options.items()
                if key not in old or _encoded(value) != _encoded(old[key])
            }
            self.param_groups[number].update(changed)
            self.counts[number].update(changed)

    def _called(
        self, method: str, groups: list[dict[str, Any]], state: Any = None
    ) -> tuple[list[dict[str, Any]], Any]:
        """The options of groups and the state after a call of the class's method."""
        self.inner.param_groups, self.inner.state = groups, defaultdict(dict, state or {})
        try:
            getattr(self.inner, method)()
            return [options_of(group) for group in self.inner.param_groups], self.inner.state
        finally:
            self.inner.param_groups, self.inner.state = [], {}

    def start(self, param: Tensor) -> None:
        """Starts reading a parameter's state."""
        if param not in self._ahead:
            self._operands.start(param)
            leaves = tree_leaves(self._values.get(param, {}))
            keys = [leaf.key for leaf in leaves if isinstance(leaf, _Row)]
            self._ahead[param] = {key: self.tier.fetch(key) for key in keys}

    def _forget_ahead(self) -> None:
        for loans in self._ahead.values():
            for loan in loans.values():
                self.tier.give_back(loan, is_written=False)
        self._ahead = {}

    def _run_one(
        self, method: str, param: Tensor, options: dict[str, Any], grad_scale: float
    ) -> dict[str, Any]:
        loans = self._ahead.pop(param)
        # All rows are read before a weight is written.
        rows = {key: loan.wait() for key, loan in loans.items()}
        weight, grad = self._operands.get(param)

        def placed(row: _Row) -> Tensor:
            return rows[row.key].view(row.shape).to(weight.device)

        state = tree_map_only(_Row, placed, self._values.get(param, {}))
        part, master = weight, state.pop("master", None)
        if weight.dtype != _dtype_of(weight):
            part = weight.float() if master is None else master.view(weight.shape)
            # As load_state_dict() of the model, or the user, may have.
            is_written = part.to(weight.dtype) != weight
            part[is_written] = weight[is_written].float()
        if grad is not None:
            part.grad = grad.to(part.dtype).view(part.shape)
            if grad_scale != 1:
                part.grad *= grad_scale
        groups, states = self._called(
            method, [{**options, "params": [part]}], {part: state} if state else None
        )
        part.grad = None
        found = dict(states.get(part, {}))
        if part is not weight:
            weight.copy_(part)
            found["master"] = part
        self._keep(param, found, loans)
        self._operands.done(param)
        return groups[0]

    def _keep(self, param: Tensor, state: dict[str, Any], loans: dict[str, Loan]) -> None:
        """Writes a state to the tier; `loans` has the rows in memory, which it may be."""
        number, begun = self._first + self._places()[param][0], dict(loans)
        writes: list[tuple[_Row, Tensor]] = []

        def kept(name: Any, numbers: Iterator[int], value: Tensor) -> Any:
            if not value.dim():
                return value.detach().clone()
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
                raise TypeError(
                    f"the state {name!r} of {type(self.inner).__name__} is a"
                    f" {type(value).__name__} ({value.layout}), which cannot be offloaded"
                )
            shape = tuple(value.shape)
            row = _Row(f"state.{number}.{name}.{next(numbers)}.{shape}", value.dtype, shape)
            writes.append((row, value.detach()))
            return row

        self._values[param] = {
            name: tree_map_only(Tensor, partial(kept, name, count()), value)
            for name, value in state.items()
        }

        def is_there(row: _Row, value: Tensor) -> bool:
            memory = loans[row.key].wait().data_ptr() if row.key in loans else 0
            return value.data_ptr() == memory and value.is_contiguous()

        # What a class has replaced may be another row.
        own = [
            value if not loans or is_there(row, value) else value.clone() for row, value in writes
        ]
        for (row, _), value in zip(writes, own, strict=True):
            loan = begun.pop(row.key, None) or self.tier.new(row.key, value.numel(), row.dtype)
            if not is_there(row, value):
                loan.wait().view(row.shape).copy_(value)
            self.tier.give_back(loan, is_written=True)
        for loan in begun.values():
            self.tier.give_back(loan, is_written=False)

    # ---- state

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """See OffloadedOptimizer."""

        def read(value: Any) -> Tensor:
            if isinstance(value, Tensor):
                return value.clone()
            with self.tier.row(value.key) as row:
                return row.view(value.shape).clone()

        values = self._values.get(param, {}) if param in self.steps else {}
        found: dict[str, Any] = tree_map_only((_Row, Tensor), read, values)
        return found

    def new_state_of(self, param: Tensor, weight: Tensor) -> dict[str, Any]:
        """The value of state_of() before the first step, for a parameter with values `weight`."""
        value = weight.detach().to(_dtype_of(param), copy=True)
        state = new_state(self.inner, self._places()[param][1], value)
        return {**state, "master": value} if value.dtype != param.dtype else state

    @torch.no_grad()
    def set_state_of(self, param: Tensor, state: dict[str, Any]) -> None:
        """See OffloadedOptimizer."""

        def cast(value: Tensor) -> Tensor:
            is_value = value.dim() and value.is_floating_point()
            return local_of(value).to(_dtype_of(param)) if is_value else local_of(value)

        given = {key: value for key, value in state.items() if key != "master"}
        master = self._values.pop(param, {}).get("master")
        if _dtype_of(param) != param.dtype and state.get("master", master) is not None:
            given["master"] = state.get("master", master)
        if given:
            self._keep(param, tree_map_only(Tensor, cast, given), {})
        self.steps.pop(param, None)
        if state:
            self.steps[param] = 0 if state.keys() == {"master"} else 1

    def saved_of(self, param: Tensor) -> Any:
        """See OffloadedOptimizer."""
        return (
            [self.steps.get(param), _encoded(self._values[param])]
            if param in self._values
            else None
        )

    def saved_counts(self) -> Any:
        """See OffloadedOptimizer."""
        return [*map(_encoded, self.counts)]

    def restore_counts(self, saved: Any) -> None:
        """See OffloadedOptimizer."""
        self.counts = [*map(_decoded, saved)]
        for group, counts in zip(self.param_groups, self.counts, strict=True):
            group.update(counts)

    def restore(self, param: Tensor, saved: Any) -> None:
        """See OffloadedOptimizer."""
        num_steps, values = saved
        self._values[param] = _decoded(values)
        if num_steps is not None:
            self.steps[param] = num_steps


def _dtype_of(param: Tensor) -> torch.dtype:
    """In which a class computes: that of a master, or the parameter's."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


def _encoded(value: Any) -> Any:
    """Options and values of states for JSON."""
    if isinstance(value, _Row):
        return {"row": [value.key, str(value.dtype), value.shape]}
    if isinstance(value, Tensor):
        return {"tensor": [value.tolist(), str(value.dtype)]}
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_encoded(each) for each in value]}
    return value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, found),) = value.items()
    if kind == "row":
        return _Row(found[0], _dtype_named(found[1]), tuple(found[2]))
    if kind == "tensor":
        return torch.tensor(found[0], dtype=_dtype_named(found[1]), device="cpu")
    if kind == "dict":
        return {key: _decoded(each) for key, each in found}
    return (tuple if kind == "tuple" else list)(map(_decoded, found))


def _dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
