"""Which ranks have which elements of a model, over all axes of parallelism.

Modules and parameters record it: layers of ringcomm.nn have their tensor-parallel group,
LocalExperts its expert group, the module of a Pipeline its stages, and DTensors their mesh.
Replicated data parallelism is not recorded and not needed: gradients are the same on its ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.expert.local_experts import split_experts
from ringcomm.parallel.parts_of_models import register_part
from ringcomm.parallel.tensor.splits import SplitModule, split_params

__all__ = [
    "Axes",
    "Held",
    "StagePart",
    "axes_of",
    "late_weights",
    "refuse_piece",
    "refuse_stage_copy",
    "tied_over_stages",
]

_part_of_block: weakref.WeakKeyDictionary[nn.Module, weakref.ref[StagePart]] = (
    weakref.WeakKeyDictionary()
)


def refuse_stage_copy(*_: Any) -> NoReturn:
    """Raises RuntimeError for a copy of a Pipeline or its module."""
    raise RuntimeError(
        "a Pipeline and its module cannot be copied or pickled: they have only this rank's blocks"
        " and refer to a process group. Take the weights by"
        " ringcomm.parallel.get_state_dict(..., full=True)"
    )


class StagePart(nn.Module):
    """This rank's blocks of a pipeline, under their names in the whole model.

    Calls, copies, and names that only the whole model has raise an error.

    It is made from the pipeline's ranks and all blocks of the model, including those of other
    ranks.

    Attributes:
        tied: this rank's parameters that other ranks of the pipeline have too, with all their
            ranks.
        late: the parameters whose gradients are complete only when Pipeline.step() returns: tied
            ones, and all of them if the schedule splits backward passes, because torch adds the
            gradients of weights itself then.
        after_backward: called after each backward pass of a stage, in the same order on all
            data-parallel ranks.
        first_names: for a parameter's name here, its name in the first block of the model that has
            it.
    """

    def __init__(self, group: dist.ProcessGroup, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.group = group
        register_part(self)
        self.tensor_groups = tensor_groups_of(blocks)
        self.tied: dict[nn.Parameter, list[int]] = {}
        self.late: set[nn.Parameter] = set()
        self.after_backward: list[Callable[[], None]] = []
        self.first_names: dict[str, str] = {}

    __deepcopy__ = __reduce_ex__ = refuse_stage_copy

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(
            "the module of a Pipeline cannot be called: it has only this rank's blocks. Call"
            " step(), evaluate() or forward() of the Pipeline, or step() or evaluate() of what"
            " parallelize() returned"
        )

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError with the reason for what only the whole model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the module of a Pipeline has no {name!r}: it has only this rank's blocks. For"
                " training and evaluation, call methods of the Pipeline. For anything else, such"
                " as generate(), load ringcomm.parallel.get_state_dict(..., full=True) into a whole"
                " model"
            ) from None

    def own(self, blocks: Iterable[nn.Module]) -> None:
        """Marks this rank's blocks, so that axes_of() for a subset raises."""
        for block in blocks:
            _part_of_block[block] = weakref.ref(self)

    def is_counted_elsewhere(self, param: nn.Parameter) -> bool:
        """Whether an earlier rank of the pipeline has the same parameter."""
        return param in self.tied and self.tied[param][0] != self.group.rank()


class Held(NamedTuple):
    """The ranks with the elements of a parameter.

    A sum over each of `groups` in turn includes all elements, each `num_copies` times.
    """

    groups: tuple[dist.ProcessGroup, ...]
    num_copies: int


class Axes(NamedTuple):
    """The distribution of a model over ranks."""

    held: dict[nn.Parameter, Held]  # each parameter of this rank that counts here
    groups: tuple[dist.ProcessGroup, ...]  # all of them, in the order in which every rank sums
    stages: dist.ProcessGroup | None  # the group of a pipeline, which is summed last

    def sharded_over(self, group: dist.ProcessGroup) -> Axes:
        """The axes for a data-parallel group whose ranks have disjoint pieces of each gradient."""
        if group.size() == 1:
            return self
        held = {param: of._replace(groups=(group, *of.groups)) for param, of in self.held.items()}
        return self._replace(held=held, groups=(group, *self.groups))


def tensor_groups_of(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The groups of tensor-parallel layers in modules, each once, without groups of one rank."""
    found = (
        layer.group
        for module in modules
        for layer in module.modules()
        if isinstance(layer, SplitModule) and layer.group.size() > 1
    )
    return list(dict.fromkeys(found))


def axes_of(model: nn.Module) -> Axes:
    """The distribution of a model, as its modules and parameters record it.

    Raises ValueError for a piece of a pipeline whose other stages are on other ranks.
    """
    part = _stage_part_of(model)
    tensor_groups = tensor_groups_of([model])
    if part is not None:
        tensor_groups = list(dict.fromkeys([*tensor_groups, *part.tensor_groups]))
    splits = {param: (layer.group, split) for _, param, layer, split in split_params(model)}
    layers = split_experts(model).values()
    expert_group = {param: layer.group for layer in layers for param in layer.parameters()}
    # Each rank of a tensor-parallel group counts a fraction of a replicated gradient, because
    # gradients may differ between ranks in the last bit.
    replicas = max(tensor_groups, key=lambda group: group.size(), default=None)
    held, mesh_groups = {}, []
    for param in model.parameters():
        if part is not None and part.is_counted_elsewhere(param):
            continue
        groups, num_copies = _mesh_of(param)
        mesh_groups += groups
        experts = expert_group.get(param)
        if param in splits:
            group, split = splits[param]
            groups, num_copies = [*groups, group], num_copies * split.num_replicas
        elif replicas is not None and not (experts and overlap(replicas, experts)):
            groups, num_copies = [*groups, replicas], num_copies * replicas.size()
        if experts is not None:
            groups = [*groups, experts]
        held[param] = Held(tuple(group for group in groups if group.size() > 1), num_copies)
    order = [*mesh_groups, *tensor_groups, *(layer.group for layer in layers)]
    return Axes(held, tuple(dict.fromkeys(order)), part.group if part else None)


def tied_over_stages(model: nn.Module) -> frozenset[nn.Parameter]:
    """Tied weights of a pipeline stage, whose gradients are summed when Pipeline.step() returns."""
    return frozenset(model.tied) if isinstance(model, StagePart) else frozenset()


def late_weights(model: nn.Module) -> frozenset[nn.Parameter]:
    """StagePart.late of a pipeline's module; empty for other models."""
    return frozenset(model.late) if isinstance(model, StagePart) else frozenset()


def refuse_piece(model: nn.Module) -> None:
    """Raises ValueError for a piece of a pipeline, whose norm cannot be computed here."""
    _stage_part_of(model)


def _stage_part_of(model: nn.Module) -> StagePart | None:
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, StagePart):
            return module
    owners = (_part_of_block[module]() for module in modules if module in _part_of_block)
    if any(part is not None and part.group.size() > 1 for part in owners):
        raise ValueError(
            f"this {type(model).__name__} has blocks of a Pipeline with stages on other ranks:"
            " pass the Pipeline"
        )
    return None


def _mesh_of(param: nn.Parameter) -> tuple[list[dist.ProcessGroup], int]:
    """The groups of a DTensor's mesh, and how many ranks of the mesh have the same elements."""
    if not isinstance(param, DTensor):
        return [], 1
    mesh, groups, num_copies = param.device_mesh, [], 1
    for dim, placement in enumerate(param.placements):
        if mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
            num_copies *= mesh.size(dim) if placement.is_replicate() else 1
    return groups, num_copies


def overlap(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether the two have another rank than this one in common."""
    ranks: Sequence[int] = dist.get_process_group_ranks(one)
    return len(set(ranks) & set(dist.get_process_group_ranks(other))) > 1
