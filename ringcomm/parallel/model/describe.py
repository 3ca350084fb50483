"""A model on this rank: each weight's names, modules, memory and part, found in one walk.

Layers of ringcomm.nn record their tensor-parallel group, LocalExperts its expert group, both their
parts of weights, the module of a Pipeline its stages, and DTensors their mesh. What may change
between steps, such as `requires_grad`, is read when it is asked.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.flat_collectives import local_of, take_from_rank0
from ringcomm.parallel.model.cut import Axes, Cut, Sharding, cut_of, find_shards, overlap
from ringcomm.parallel.model.stage_part import StagePart, stage_part_of
from ringcomm.parallel.tensor.splits import Split, SplitModule, tensor_groups_of
from ringcomm.torch_names import WRAPPERS, children_of


@dataclass(eq=False)
class Weight:
    """A parameter or buffer of a model.

    Attributes:
        names: in the model, without the prefixes of torch's wrappers; several if it is tied.
        places: the modules that have it, each with its name there.
        layer: the tensor-parallel layer that it belongs to.
        experts: the sharded experts that it belongs to.
        split: which part of such a layer's weight, or of the stacked weight of all experts, it is.
        is_mixed: whether it is also elsewhere in the model.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    layer: SplitModule | None = None
    experts: LocalExperts | None = None
    split: Split | None = None
    is_mixed: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def mesh_groups(self) -> dict[dist.ProcessGroup, bool]:
        """Of a DTensor's mesh: of each group with several ranks, whether these have the same."""
        if not isinstance(self.tensor, DTensor):
            return {}
        mesh, placements = self.tensor.device_mesh, enumerate(self.tensor.placements)
        dims = [(dim, placed.is_replicate()) for dim, placed in placements if mesh.size(dim) > 1]
        return {mesh.get_group(dim): is_replicated for dim, is_replicated in dims}

    def data_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """The ranks of a data-parallel group that average its gradient; None if this one is alone.

        Those of sharded experts are the ranks with the same experts.
        """
        return group if self.experts is None else self.experts.replica_group

    def is_apart(self, group: dist.ProcessGroup) -> bool:
        """Whether the ranks of a group have different elements of it."""
        if find_shards(self.tensor) is not None:  # the pieces are equal already
            return True
        experts = [] if self.experts is None else [self.experts.group]
        return any(overlap(own, group) for own in [*self.cut().groups, *experts])

    def cut(self, span: tuple[int, int] | None = None) -> Cut:
        """Its elements on this rank, or the flat elements [begin, end) of them."""
        groups = [group for group, is_replicated in self.mesh_groups.items() if not is_replicated]
        if (shards := find_shards(self.tensor)) is not None:
            groups, span = [shards.unit_of(self.tensor).group], span or shards.range_of(self.tensor)
        if self.layer is not None:
            groups.append(self.layer.group)
        elif self.split is not None and self.experts is not None:
            groups.append(self.experts.group)
        return cut_of(self.tensor, self.split, groups, span)


class Model:
    """The description of a module: `weights` by parameter, as named_parameters(), and `buffers`.

    `experts` are its sharded experts, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weights: dict[nn.Parameter, Weight] = {}
        self.buffers: dict[Tensor, Weight] = {}
        self.experts: dict[str, LocalExperts] = {}
        for prefix, owner, experts in _walk(module, "", None):
            if experts is owner and owner not in self.experts.values():
                self.experts[prefix.removesuffix(".")] = experts
            splits = owner.splits if isinstance(owner, SplitModule | LocalExperts) else {}
            params = owner.named_parameters(recurse=False, remove_duplicate=False)
            buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
            for found, own in ((self.weights, params), (self.buffers, buffers)):
                for key, tensor in own:
                    weight = found.setdefault(tensor, Weight(tensor, experts=experts))  # type: ignore[arg-type]
                    weight.is_mixed |= weight.experts is not experts
                    weight.names.append(prefix + key)
                    weight.places.append((owner, key))
                    weight.split = splits.get(key, weight.split)
                    if isinstance(owner, SplitModule) and key in splits:
                        weight.layer = owner

    @property
    def has_meta(self) -> bool:
        """Whether any is on the meta device."""
        return any(tensor.is_meta for tensor in (*self.weights, *self.buffers))

    @property
    def names(self) -> dict[str, Tensor]:
        """The parameters, then the buffers, each under all of its names."""
        return {name: weight.tensor for weight in self.described() for name in weight.names}

    def described(self, tensors: Iterable[Tensor] | None = None) -> list[Weight]:
        """All of the parameters, then of the buffers; or of some of them, each once."""
        chosen = [*self.weights, *self.buffers] if tensors is None else dict.fromkeys(tensors)
        return [self.weights.get(x) or self.buffers[x] for x in chosen]  # type: ignore[call-overload]

    @cached_property
    def stage(self) -> StagePart | None:
        """The module's blocks of a pipeline. Raises ValueError as stage_part_of()."""
        return stage_part_of(self.module)

    @cached_property
    def tensor_groups(self) -> list[dist.ProcessGroup]:
        """The groups of tensor-parallel layers, also of a pipeline's other stages."""
        of_stages = [] if self.stage is None else self.stage.tensor_groups
        return list(dict.fromkeys([*tensor_groups_of([self.module]), *of_stages]))

    def in_same_memory(self, *, with_buffers: bool) -> tuple[Weight, Weight] | None:
        """Two parameters whose memory overlaps, or a parameter and a buffer; None without them."""
        spans = []
        buffers = self.buffers.values() if with_buffers else ()
        for weight in (*self.weights.values(), *buffers):
            tensor, is_weight = weight.tensor, weight.tensor in self.weights
            is_there = not (tensor.is_meta or isinstance(tensor, nn.UninitializedParameter))
            is_known = find_shards(tensor) is None if is_weight else type(tensor) is Tensor
            if is_there and is_known and tensor.layout == torch.strided:
                own = local_of(tensor.detach())
                reach = sum((n - 1) * s for n, s in zip(own.shape, own.stride(), strict=True)) + 1
                if own.numel():
                    spans.append((own.data_ptr(), reach * own.element_size(), is_weight, weight))
        last: dict[bool, tuple[int, Weight]] = {}  # of buffers and of parameters
        for begin, num_bytes, is_weight, weight in sorted(spans, key=lambda span: span[:2]):
            for kind in (True, False) if is_weight else (True,):
                end, before = last.get(kind, (0, weight))
                if begin < end:
                    return before, weight
            if begin + num_bytes > last.get(is_weight, (0, weight))[0]:
                last[is_weight] = begin + num_bytes, weight
        return None

    def axes(self) -> Axes:
        """The distribution of the weights over ranks, for sums in which each element counts once.

        Raises ValueError as stage_part_of().
        """
        # Each rank of a tensor-parallel group counts a fraction of a replicated gradient, because
        # gradients may differ between ranks in the last bit.
        replicas = max(self.tensor_groups, key=lambda group: group.size(), default=None)
        shardings, mesh_groups = {}, []
        for param, weight in self.weights.items():
            if self.stage is not None and self.stage.is_counted_elsewhere(param):
                continue
            groups = [*weight.mesh_groups]
            num_copies = prod(of.size() for of, is_same in weight.mesh_groups.items() if is_same)
            mesh_groups += groups
            experts = None if weight.experts is None else weight.experts.group
            if weight.layer is not None and weight.split is not None:
                groups = [*groups, weight.layer.group]
                num_copies *= weight.split.num_replicas
            elif replicas is not None and not (experts and overlap(replicas, experts)):
                groups, num_copies = [*groups, replicas], num_copies * replicas.size()
            if experts is not None:
                groups = [*groups, experts]
            shardings[param] = Sharding(
                tuple(group for group in groups if group.size() > 1), num_copies
            )
        # A rank may have no weight of theirs.
        of_experts = [part.group for part in self.experts.values()]
        others = [g for g in (*mesh_groups, *self.tensor_groups) if g not in of_experts]
        axes = Axes(shardings, (), self.stage.group if self.stage else None)
        return axes.in_order([*others, *of_experts])


def describe(module: nn.Module) -> Model:
    """The description of a module on this rank."""
    return Model(module)


def unwrapped(module: Any) -> Any:
    """What is in wrappers of torch, and of PEFT."""
    while (attribute := wrapped_attribute(module)) or hasattr(module, "get_base_model"):
        module = getattr(module, attribute) if attribute else module.get_base_model()
    return module


def wrapped_attribute(module: Any) -> str | None:
    """Where one of torch's wrappers has the module that it is around; None for other modules."""
    kind: Any = type(module)
    return _wrapped_attribute_of(kind)


@cache
def _wrapped_attribute_of(kind: Any) -> str | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)


def plain_name(module: nn.Module, name: str) -> str:
    """A name of a parameter or buffer, or a key of state_dict(), without the names of wrappers.

    Some wrappers remove their own name from keys, so that it may be missing.
    """
    kept: list[str] = []
    found: Any = module
    for part in name.split("."):
        is_wrapper = False
        while not is_wrapper and (attribute := wrapped_attribute(found)) is not None:
            found, is_wrapper = getattr(found, attribute), part == attribute
        if not is_wrapper:
            kept.append(part)
            found = getattr(found, part, None)
    return ".".join(kept)


def _walk(
    module: nn.Module, prefix: str, experts: LocalExperts | None
) -> Iterator[tuple[str, nn.Module, LocalExperts | None]]:
    """Of each use of a module: the prefix of its names, and the sharded experts around it."""
    if isinstance(module, LocalExperts) and module.group.size() > 1:
        experts = module
    yield prefix, module, experts
    wrapped = wrapped_attribute(module)
    for name, child in children_of(module).items():
        if child is not None:
            yield from _walk(child, prefix if name == wrapped else f"{prefix}{name}.", experts)


def start_equal(
    model: Model,
    groups: Iterable[dist.ProcessGroup],
    tensors: Iterable[Tensor] | None = None,
    *,
    over_data: bool = False,
) -> None:
    """Replaces weights, frozen ones too, and buffers by those of rank 0 of each group in turn.

    Parts that differ between the ranks of a group stay: those of tensor-parallel layers, experts,
    DTensors and offloaded ones. Tensors on the meta device stay as well. `tensors`: only these.
    `over_data`: the groups are data-parallel ranks; then also sharded experts, over the ranks with
    the same ones. Collective over each group.
    """
    chosen = model.described(tensors)
    shared = {group: [*chosen] for group in groups}
    for weight in chosen if over_data else ():
        if weight.experts is not None and weight.experts.replica_group is not None:
            shared.setdefault(weight.experts.replica_group, []).append(weight)
    for group, weights in shared.items():
        own = (weight.tensor for weight in weights if not weight.is_apart(group))
        take_from_rank0(map(local_of, own), group)
