"""Which elements of a full tensor are on which rank, over all axes, and which object trains them.

Replicated data parallelism is not recorded and not needed: gradients are the same on its ranks.
"""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.parallel.tensor.splits import Split
from ringcomm.torch_names import shape_and_offset


class Box(NamedTuple):
    """A rectangle of a tensor: its begin and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """A view of these elements of a tensor."""
        for dim, (begin, length) in enumerate(zip(*self, strict=True)):
            whole = whole.narrow(dim, begin, length)
        return whole


class Cut(NamedTuple):
    """This rank's elements of a full tensor.

    Attributes:
        shape: of the full tensor.
        boxes: the elements, box after box in local memory, in row-major order of the full tensor.
        groups: the ranks with the others: a sum over local elements, summed over each of these
            groups in turn, counts each element `num_copies` times.
    """

    shape: torch.Size
    boxes: tuple[Box, ...]
    groups: tuple[dist.ProcessGroup, ...] = ()
    num_copies: int = 1

    @property
    def first_elem(self) -> int:
        """The index of the first local element in the full tensor."""
        return self.index_of(self.boxes[0]) if self.boxes else 0

    def index_of(self, box: Box) -> int:
        """The index of a box's first element in the full tensor, in row-major order."""
        index = 0
        for size, offset in zip(self.shape, box.offsets, strict=True):
            index = index * size + offset
        return index


def cut_of(
    tensor: Tensor,
    split: Split | None = None,
    groups: Iterable[dist.ProcessGroup] = (),
    span: tuple[int, int] | None = None,
) -> Cut:
    """The cut of a tensor.

    Args:
        tensor: a DTensor, a part of a tensor-parallel layer, or a full tensor.
        split: for a part of a tensor-parallel layer, which may be a DTensor.
        groups: see Cut.
        span: the flat elements [begin, end) of the tensor that this rank has; all by default.
    """
    shape, sizes, offsets = [*tensor.shape], [*tensor.shape], [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        placed = tensor.device_mesh, tensor.placements
        sizes, offsets = map(list, shape_and_offset(tensor.shape, *placed))
    boxes = [Box((0,) * len(sizes), tuple(sizes))] if span is None else range_boxes(sizes, *span)
    if split is not None:
        shape[split.dim] = split.total
        offsets[split.dim] += split.begin
    return Cut(
        torch.Size(shape),
        tuple(
            Box(tuple(map(sum, zip(offsets, box.offsets, strict=True))), box.sizes)
            for box in boxes
            if 0 not in box.sizes
        ),
        tuple(group for group in groups if group.size() > 1),
        1 if split is None else split.num_replicas,
    )


def pieces_of(local: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The elements of each box, in its shape: views of a local tensor in row-major order."""
    if len(boxes) == 1:
        return [local.reshape(boxes[0].sizes)]
    parts = local.reshape(-1).split([math.prod(box.sizes) for box in boxes])
    return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]


def range_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes that make up elements [begin, end) of a flat tensor; at most 2 * dim - 1."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row_elems = math.prod(shape[1:])
    boxes: list[Box] = []
    while begin < end:
        row, column = divmod(begin, row_elems)
        num_rows = (end - begin) // row_elems
        if column == 0 and num_rows:
            boxes.append(Box((row, *(0 for _ in shape[1:])), (num_rows, *shape[1:])))
            begin += num_rows * row_elems
            continue
        stop = min(end, (row + 1) * row_elems)
        for offsets, sizes in range_boxes(shape[1:], column, stop - row * row_elems):
            boxes.append(Box((row, *offsets), (1, *sizes)))
        begin = stop
    return boxes


# ---- over all axes


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
        reference = self._owner_of.get(param)
        return None if reference is None else reference()


_shards, _trainers = _Owners(), _Owners()
# WeightShards of ZeRO-Infinity.
note_shards, find_shards = _shards.note, _shards.find
# Optimizers that take gradients: ZeroOptimizer, Lomo, AdaLomo; ParameterServer.
note_trainer, find_trainer = _trainers.note, _trainers.find
