"""What zero.shard() was given: options, and optimizers with their steps on parts or by owners."""

import dataclasses
import math
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.flat_collectives import largest_of, place_in
from ringcomm.parallel.model.cut import find_trainer
from ringcomm.parallel.model.describe import Model
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import Tier
from ringcomm.parallel.optimizer_classes import (
    of_parts,
    options_of,
    params_in,
    run_on_parts,
    take_options,
)
from ringcomm.parallel.zero.owners import Owners, owners_by_group
from ringcomm.torch_names import active_ddp

Grads = Mapping[Any, Tensor | None]  # by weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The options of zero.shard(); raises ValueError for one that is out of range."""

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
        if self.loss_scale is not None:
            LossScale(self.loss_scale)  # raises for a wrong one
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
        return self.optimizer.inner if self.is_offloaded else self.optimizer


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


def data_was_set(name: str) -> str:
    """The error message for a weight in other memory than that of its shards."""
    return (
        f"`.data` of {name} was set after zero.shard(), as vector_to_parameters() and"
        " to(memory_format=...) do, so that its shards have other values: write by param.copy_() in"
        " torch.no_grad(), or ringcomm.parallel.set_state_dict(). A Trainer moves its model,"
        " so make it before"
    )


def refuse_ddp(model: nn.Module, *_: Any) -> None:
    """A forward pre-hook; raises if DistributedDataParallel runs the model, but not its copies."""
    if active_ddp() is not None and any(map(find_trainer, model.parameters())):
        raise RuntimeError(
            "the model was sharded by zero.shard() but runs in DistributedDataParallel,"
            " which would reduce gradients again: call the model itself. With Accelerate or"
            " Trainer, call register() of ringcomm.integrations"
        )


# The bytes of an agreement of all ranks on the options that schedulers set.
NUM_OPTION_BYTES = 8
_SCHEDULED = ("lr", "betas", "momentum", "weight_decay")


def _as_numbers(option: Any) -> Any:
    """Without tensors, which the host may wait for."""
    if isinstance(option, tuple | list):
        return [*map(_as_numbers, option)]
    return float(option) if isinstance(option, Real) else None


def check_options(most: Sequence[int]) -> None:
    """Raises ValueError if the ranks' option_bytes(), of which `most` is the maximum, differ."""
    half = NUM_OPTION_BYTES // 2
    if any(a + b != 255 for a, b in zip(most[:half], most[half:], strict=True)):
        raise ValueError(
            f"ranks have different options of parameter groups ({', '.join(_SCHEDULED)}), of which"
            " each would update its shards. No weight has been written. Set them alike on all"
            " ranks; a scheduler that takes a loss needs the same one on all"
        )


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


class InnerSteps:
    """The given optimizers, and their steps on this rank's parts of weights.

    Attributes:
        own: by weight, the tensor under which an offloaded optimizer has its state.
        owner_of: by weight, the rank that updates it as a whole, if one does.
        group_of: by weight, the ranks that share it; None at stages 1 and 2 if this one is alone,
            with experts of its own.
        mode: the last of train() and eval(); "" before.
        told: weights whose owners' keys of states all ranks know.
    """

    owner_of: dict[Any, int]
    group_of: dict[Any, Any]

    def __init__(self, optimizer: Any, inners: list[Inner]) -> None:
        """`optimizer` is the ZeroOptimizer, which has this rank's parts of weights."""
        self._optimizer: Any = weakref.proxy(optimizer)
        self._inners, self._group = inners, optimizer.group
        self._parts = Parts()
        self.mode, self.told = "", set[Any]()
        self.own: dict[Any, Any] = {param: param for param in self.by_param}

    def __iter__(self) -> Iterator[Inner]:
        """The optimizers that zero.shard() was given."""
        return iter(self._inners)

    @cached_property
    def by_param(self) -> dict[Any, Inner]:
        """Which of them updates a weight."""
        return {param: inner for inner in self._inners for param in params_in(inner.groups)}

    @property
    def has_offloaded(self) -> bool:
        """Whether states of any weights are offloaded."""
        return any(inner.is_offloaded for inner in self._inners)

    def updates(self, param: Any) -> bool:
        """Whether this rank updates a weight, or its part of one."""
        return self.owner_of.get(param) in (None, place_in(self.group_of[param])[0])

    # ---- before the first step

    def place_offloaded(self, tier: Tier | None = None) -> None:
        """Makes the offloaded optimizers over the tensors `own`."""
        first = 0
        for i, inner in enumerate(self._inners):
            if inner.is_offloaded:
                groups = [{**g, "params": [*map(self.own.get, g["params"])]} for g in inner.groups]
                operands = self._operands_of(inner)
                made = inner.optimizer.over(groups, operands, tier, first)
                self._inners[i] = inner._replace(optimizer=made)
            first += len(params_in(inner.groups))
        vars(self).pop("by_param", None)

    def _operands_of(self, inner: Inner) -> Operands:
        """Where an offloaded optimizer finds weights and gradients."""
        self._parts.shapes |= {p: self._optimizer.part_of(p).shape for p in params_in(inner.groups)}
        return self._parts

    def share_out(self, group_of: dict[Any, Any]) -> None:
        """Takes the ranks that share each weight; chooses the owners of weights that need one."""
        self.group_of = group_of
        whole = [param for param, inner in self.by_param.items() if inner.is_whole]
        self.owner_of = owners_by_group(whole, group_of.__getitem__)

    @cached_property
    def rank_groups(self) -> list[Any]:
        """The groups that share weights, that of all ranks last; experts may have others."""
        found = dict.fromkeys(self.group_of[param] for param in self.by_param)
        return [*(group for group in found if group is not self._group), self._group]

    # ---- the step

    def option_bytes(self, groups: Iterable[dict[str, Any]]) -> list[int]:
        """The bytes of a digest of the options of groups with shared weights, and 255 minus each.

        Groups of sharded experts may have options of their own.
        """
        of_all = [
            g for g in groups if any(self.group_of.get(p) is self._group for p in g["params"])
        ]
        known = [_as_numbers([group.get(key) for key in _SCHEDULED]) for group in of_all]
        digest = zlib.crc32(repr(known).encode()).to_bytes(NUM_OPTION_BYTES // 2, "little")
        return [*digest, *(255 - byte for byte in digest)]

    def run(self, method: str, grads: Grads, factor: float = 1.0) -> None:
        """Calls a method of the classes that have it, on parts, with gradients times a factor."""
        for inner in self._inners:
            own = {param: grads[param] for param in params_in(inner.groups) if param in grads}
            if not hasattr(inner.plain, method):
                continue
            if inner.is_whole:
                self._run_whole(inner, method, own, factor)
            elif own or inner.takes_empty:
                self._run_parts(inner, method, own, factor)

    def _run_parts(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        """As _run_one(), on this rank's parts."""
        self._run_one(inner, method, {p: self._optimizer.part_of(p) for p in grads}, grads, factor)

    def _run_whole(self, inner: Inner, method: str, grads: Grads, factor: float) -> None:
        """As _run_one(), on weights that their owners gather, in rounds. Collective."""
        if inner.is_offloaded:
            inner = inner._replace(before=[options_of(group) for group in inner.groups])
        for of_groups in self._rounds(grads):
            mine: dict[Owners, dict[Any, Tensor]] = {}
            wholes, whole_grads = dict[Any, Tensor](), dict[Any, Tensor]()
            for owners, params in zip(self.owners.values(), of_groups, strict=False):
                if params:
                    mine[owners], own_grads = self._read(inner, params, grads)
                    wholes |= owners.gathered(mine[owners])
                    whole_grads |= owners.gathered(own_grads) if own_grads else {}
            self._run_owned(inner, method, wholes, dict.fromkeys(wholes) | whole_grads, factor)
            for owners, parts in mine.items():
                owners.spread(parts, {p: wholes[p] for p in parts if p in wholes})
                self._write(parts)
            inner = inner._replace(takes_empty=False)

    def _rounds(self, grads: Collection[Any]) -> list[Any]:
        """The weights that are gathered together, by group, in the order of `owners`."""
        return [[[p for p in grads if self.group_of[p] is group] for group in self.owners]]

    def _read(
        self, inner: Inner, params: Iterable[Any], grads: Grads
    ) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """This rank's parts of weights, and of the gradients that there are."""
        found = {p: grad for p in params if (grad := grads[p]) is not None}
        return {param: self._optimizer.part_of(param) for param in params}, found

    def _write(self, parts: Mapping[Any, Tensor]) -> None:
        """Takes the new values of what _read() has returned."""

    def _run_owned(
        self, inner: Inner, method: str, parts: dict[Any, Tensor], grads: Grads, factor: float
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
        has_failed = largest_of([failure is not None], [self._group], torch.uint8)
        if failure is not None:
            raise failure
        if has_failed[0]:
            raise RuntimeError(
                f"{method}() of {type(inner.optimizer).__name__} has raised an error on another"
                " rank, which owns the weight. Restart from a checkpoint: other weights may already"
                " be updated"
            )

    def _run_one(
        self, given: Inner, method: str, parts: dict[Any, Tensor], grads: Grads, factor: float
    ) -> None:
        if given.is_offloaded:
            self._parts.of = {self.own[p]: (part, grads[p]) for p, part in parts.items()}
            self._run_offloaded(given, method, parts, factor)
            self._parts.of = {}
            return
        groups = [g for g in given.groups if given.takes_empty or of_parts(g, parts)["params"]]
        kept = self._optimizer.kept_states
        states = {
            param: {key: x for key, x in kept.get(param, {}).items() if key != "master"}
            for param in parts
        }
        plain = given.optimizer
        states, called = run_on_parts(plain, method, groups, parts, grads, factor, states)
        kept.update(states)
        for group, after in zip(groups, called, strict=True):
            take_options(group, after)

    def _run_offloaded(
        self, given: Inner, method: str, params: Iterable[Any], factor: float
    ) -> None:
        inner = given.optimizer
        for own, group in zip(inner.param_groups, given.groups, strict=True):
            take_options(own, group)
        inner.run(method, [self.own[param] for param in params], factor, given.before)
        for own, group in zip(inner.param_groups, given.groups, strict=True):
            take_options(group, own)

    @cached_property
    def owners(self) -> dict[Any, Owners]:
        """By group, for those that have parts of all weights."""
        by_group: dict[Any, dict[Any, int]] = {group: {} for group in self.rank_groups}
        for param, rank in self.owner_of.items():
            by_group[self.group_of[param]][param] = rank

        def range_of(param: Any, rank: int) -> Any:
            return self._optimizer.range_of(param, rank)

        return {group: Owners(own, group, range_of) for group, own in by_group.items()}
