"""Which elements of a full tensor are on this rank."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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
