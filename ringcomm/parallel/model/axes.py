"""Which ranks have which elements of a model, over all axes, and which object trains a weight.

Replicated data parallelism is not recorded and not needed: gradients are the same on its ranks.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary


class Sharding(NamedTuple):
    """The ranks with the elements of a parameter.

    A sum over each of `groups` in turn includes all elements, each `num_copies` times.
    """

    groups: tuple[dist.ProcessGroup, ...]
    num_copies: int


class Axes(NamedTuple):
    """The distribution of a model over ranks."""

    shardings: dict[nn.Parameter, Sharding]  # each parameter of this rank that counts here
    groups: tuple[dist.ProcessGroup, ...]  # all of them, in the order in which every rank sums
    stages: dist.ProcessGroup | None  # the group of a pipeline, which is summed last

    def sharded_over(self, groups: Mapping[nn.Parameter, dist.ProcessGroup | None]) -> "Axes":
        """The axes where the ranks of a group have disjoint pieces of a parameter's gradient."""
        shardings, found = dict(self.shardings), dict[dist.ProcessGroup, None]()
        for param, of in self.shardings.items():
            group = groups[param]
            if group is not None and group.size() > 1:
                shardings[param] = of._replace(groups=(group, *of.groups))
                found[group] = None
        others = [group for group in found if group not in self.groups]
        return self._replace(shardings=shardings).in_order([*others, *self.groups])

    def in_order(self, groups: Iterable[dist.ProcessGroup]) -> "Axes":
        """The axes with these groups, in whose order the elements of each parameter are summed."""
        order = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        shardings = {
            param: of._replace(groups=tuple(sorted(of.groups, key=order.__getitem__)))
            for param, of in self.shardings.items()
        }
        return self._replace(shardings=shardings, groups=(*order,))


def mesh_of(param: nn.Parameter) -> tuple[list[dist.ProcessGroup], int]:
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
    """Whether two groups have more than one rank in common."""
    ranks = set(dist.get_process_group_ranks(one))
    return len(ranks.intersection(dist.get_process_group_ranks(other))) > 1


# ---- which object shards or trains a weight: it records this, and the other systems ask


class _Owners:
    """Keyed weakly by parameter, with weak references: the owners hold the parameters."""

    def __init__(self) -> None:
        self._owner_of: Any = WeakIdKeyDictionary()

    def note(self, params: Iterable[nn.Parameter], owner: Any) -> None:
        """Records the owner of parameters; None when it gives them up."""
        for param in params:
            self._owner_of.pop(param, None)
            if owner is not None:
                self._owner_of[param] = weakref.ref(owner)

    def find(self, param: Tensor) -> Any:
        """The owner of a parameter, or None."""
        reference = self._owner_of.get(param)
        return None if reference is None else reference()


_shards, _trainers = _Owners(), _Owners()
# WeightShards of ZeRO-Infinity.
note_shards, find_shards = _shards.note, _shards.find
# Optimizers that take gradients: ZeroOptimizer, Lomo, AdaLomo; ParameterServer.
note_trainer, find_trainer = _trainers.note, _trainers.find
