"""Values of whole weights as DTensors of rows: what torch.distributed.checkpoint saves in parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ringcomm.parallel.flat_collectives import gather_parts


def rows_of_rank(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The rows [begin, end) of a rank, as torch cuts them: longest first, perhaps none at last."""
    longest = -(-num_rows // world_size)
    return min(rank * longest, num_rows), min((rank + 1) * longest, num_rows)


def cut_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a value that all ranks have, in memory of their own.

    A value without dimensions stays as it is, on all ranks.
    """
    if whole.dim() == 0:
        return whole
    begin, end = rows_of_rank(whole.shape[0], mesh.size(), mesh.get_local_rank())
    return DTensor.from_local(
        whole[begin:end].clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def join_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole of what cut_rows() has made; any other tensor as it is.

    The mesh of the DTensor is not used: a loaded one may have no process groups.

    Raises:
        ValueError: it has been cut in another way.

    Collective for a DTensor.
    """
    if not isinstance(value, DTensor):
        return value
    check_rows(value, group)
    local, shape = value.to_local(), value.shape
    per_row = value.numel() // max(1, shape[0])
    ranges = [rows_of_rank(shape[0], group.size(), rank) for rank in range(group.size())]
    sizes = [(end - begin) * per_row for begin, end in ranges]
    return gather_parts(local.reshape(-1), sizes, group).view(shape)


def check_rows(value: DTensor, group: dist.ProcessGroup) -> None:
    """Raises ValueError where a DTensor has not the rows of this rank."""
    begin, end = rows_of_rank(value.shape[0], group.size(), group.rank())
    if value.placements != (Shard(0),) or value.to_local().shape[0] != end - begin:
        raise ValueError(
            f"a state of shape {tuple(value.shape)} was saved by other ranks: here rank"
            f" {group.rank()} of {group.size()} has rows {begin} to {end}. Use"
            " ringcomm.parallel.get_state_dict() between world sizes"
        )


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """A group as a mesh of one dimension."""
    return DeviceMesh.from_group(group, device.type)
