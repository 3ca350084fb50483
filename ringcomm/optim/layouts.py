"""Which part of a weight this rank holds, and who has the rest.

Updates work on local tensors; norms and AdaLomo's means are of the whole weight. Where each rank
holds a part (DTensor, ringcomm.parallel.WeightShards, layers that are split by hand), a layout says
which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ringcomm.parallel import WeightShards, find_shards


class Split(NamedTuple):
    """A plain weight that is one part of a larger one, split over a group by a layer's own doing.

    Attributes:
        group: the ranks that hold the parts, equal ones, in rank order.
        dim: the dimension that is split.
    """

    group: dist.ProcessGroup
    dim: int


class Block(NamedTuple):
    """A rectangle of a matrix that this rank holds: local elements from `begin` on, row by row."""

    begin: int
    rows: slice
    columns: slice

    def of(self, local: Tensor) -> Tensor:
        """The rectangle in a local tensor in memory order, as a matrix."""
        shape = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return local.view(-1).narrow(0, self.begin, shape[0] * shape[1]).view(shape)


class Layout(NamedTuple):
    """What this rank holds of a weight.

    Attributes:
        shape: of the whole weight.
        matrix: rows and columns of the whole weight; (1, local elements) if it is no matrix, which
            has means of its own for each element.
        blocks: the local part of it.
        groups: sums over the local parts add up over the ranks of each of these.
        first_elem: where the local part begins in the whole, for the random bits of rounding.
    """

    shape: torch.Size
    matrix: tuple[int, int]
    blocks: list[Block]
    groups: tuple[dist.ProcessGroup, ...] = ()
    first_elem: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether second moments are kept by row and column."""
        return len(self.shape) == 2


def _rectangle(
    shape: torch.Size,
    local_shape: torch.Size,
    offset: tuple[int, ...],
    groups: tuple[dist.ProcessGroup, ...],
) -> Layout:
    """The layout of a part of `local_shape` that begins at `offset` in every dimension."""
    begin = 0
    for size, start in zip(shape, offset, strict=True):
        begin = begin * size + start
    num_elems = local_shape.numel()
    if len(shape) != 2:
        blocks = [Block(0, slice(0, 1), slice(0, num_elems))]
        return Layout(shape, (1, num_elems), blocks, groups, begin)
    rows, columns = (
        slice(start, start + size) for start, size in zip(offset, local_shape, strict=True)
    )
    return Layout(shape, (shape[0], shape[1]), [Block(0, rows, columns)], groups, begin)


def _piece(
    shape: torch.Size, begin: int, end: int, groups: tuple[dist.ProcessGroup, ...]
) -> Layout:
    """The layout of the elements [begin, end) of a weight in memory order."""
    if len(shape) != 2:
        blocks = [Block(0, slice(0, 1), slice(0, end - begin))]
        return Layout(shape, (1, end - begin), blocks, groups, begin)
    num_rows, width = shape
    blocks, at = [], begin
    while at < end:
        row, column = divmod(at, width)
        if column == 0 and end - at >= width:  # whole rows
            rows, columns = slice(row, end // width), slice(0, width)
        else:  # the rest of one
            rows, columns = slice(row, row + 1), slice(column, min(width, column + end - at))
        blocks.append(Block(at - begin, rows, columns))
        at = (rows.stop - 1) * width + columns.stop
    return Layout(shape, (num_rows, width), blocks, groups, begin)


def layout_of(param: nn.Parameter, split: Split | None = None) -> Layout:
    """What this rank holds of a parameter; `split` says it of plain ones."""
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        local_shape, offset = compute_local_shape_and_global_offset(
            param.shape, mesh, param.placements
        )
        groups = tuple(mesh.get_group(i) for i, p in enumerate(param.placements) if p.is_shard())
        return _rectangle(param.shape, torch.Size(local_shape), tuple(offset), groups)
    shards = find_shards(param)
    if shards is not None:
        return _piece(param.shape, *shards.range_of(param), (shards.group,))
    if split is None:
        return _rectangle(param.shape, param.shape, (0,) * param.dim(), ())
    shape, offsets = list(param.shape), [0] * param.dim()
    offsets[split.dim] = split.group.rank() * shape[split.dim]
    shape[split.dim] *= split.group.size()
    return _rectangle(torch.Size(shape), param.shape, tuple(offsets), (split.group,))


def local_tensor(param: nn.Parameter, shards: WeightShards | None) -> Tensor:
    """The part itself, which updates write; `shards` are those that have the parameter."""
    if shards is not None:
        return shards.shard_of(param)
    if isinstance(param, DTensor):
        local: Tensor = param.to_local()
        return local.detach()
    return param.detach()


def overlap(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether two groups have more than one rank in common."""
    ranks = set(dist.get_process_group_ranks(one))
    return len(ranks.intersection(dist.get_process_group_ranks(other))) > 1
