"""A rank's part of a sharded parameter: its type outside the layer, and its values."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import Self

from ringcomm.ops import shard_range
from ringcomm.parallel.flat_collectives import take_from_rank0
from ringcomm.parallel.model.saving import refuse_copy, refuse_saving
from ringcomm.parallel.tensor.regions import give_memory
from ringcomm.parallel.torch_checks import register_part
from ringcomm.torch_names import LOAD_MODULE, SAVE_MODULE

_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()

# 16 MiB of fp32. torch's CPU generator fills vectors of 16 numbers, and a shorter end differently:
# blocks have at least 16 rows.
BLOCK_ELEMS = 1 << 22
MIN_ROWS = 16


@dataclass(frozen=True)
class Split:
    """A rank's part of a parameter."""

    dim: int  # the dimension that is split
    ranges: tuple[tuple[int, int], ...]  # of it, [begin, end) of every rank of the group
    rank: int  # this one
    num_replicas: int = 1  # the number of consecutive ranks with the same part

    begin = property(lambda self: self.ranges[self.rank][0])
    end = property(lambda self: self.ranges[self.rank][1])
    total = property(lambda self: self.ranges[-1][1])  # of the whole parameter

    def cut(self, whole: Tensor) -> Tensor:
        """A view of this rank's part."""
        return whole.narrow(self.dim, self.begin, self.end - self.begin)

    def as_dtensor(self, part: Tensor, group: dist.ProcessGroup, name: str) -> DTensor:
        """A part as a DTensor, with the same memory.

        Raises RuntimeError if DTensor cannot describe it.
        """
        if isinstance(part, DTensor) or self.ranges != ranges_of(self.total, len(self.ranges)):
            raise RuntimeError(
                f"no DTensor describes this rank's part of {name}, which is split unevenly or"
                " sharded twice: use ringcomm.parallel.get_state_dict(model, full=True), or without"
                " full= for torch.distributed.checkpoint"
            )
        sizes = [*part.shape]
        sizes[self.dim] = self.total
        stride = torch.empty(sizes, dtype=part.dtype, device="meta").stride()
        placed = mesh_of(group, part.device), [Shard(self.dim)]
        return DTensor.from_local(
            part, *placed, run_check=False, shape=torch.Size(sizes), stride=stride
        )

    def own_part(self, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's part of a full tensor, or of a DTensor as from as_dtensor().

        Raises ValueError for other tensors.
        """
        if value.dim() > self.dim and value.shape[self.dim] == self.total:
            if not isinstance(value, DTensor):
                return self.cut(value)
            ranks = value.device_mesh.mesh.flatten().tolist(), [*value.placements]
            if ranks == (dist.get_process_group_ranks(group), [Shard(self.dim)]):
                return value.to_local()
        raise ValueError(
            f"expected a full tensor of {self.total} in dimension {self.dim}, or a DTensor of these"
            f" ranks, got {type(value).__name__} of shape {tuple(value.shape)}: for parts of"
            " other meshes use ringcomm.parallel.set_state_dict"
        )


def ranges_of(num: int, num_parts: int, multiple: int = 1) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each part: torch.chunk's, as DTensor has them; units are uneven by one."""
    if multiple > 1:
        units = (shard_range(num // multiple, num_parts, part) for part in range(num_parts))
        return tuple((begin * multiple, end * multiple) for begin, end in units)
    size = -(-num // num_parts)
    return tuple((min(part * size, num), min((part + 1) * size, num)) for part in range(num_parts))


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh of a group on a device; made once, without communication."""
    found = _meshes.setdefault(group, {})
    if device.type not in found:
        found[device.type] = DeviceMesh.from_group(group, device.type)
    return found[device.type]


def save_parts(module: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
    """_save_to_state_dict() of a module with `splits` over its `group`: parts become DTensors."""
    SAVE_MODULE(module, destination, prefix, keep_vars)
    if keep_vars or module.group.size() == 1:  # the parameters themselves are asked for
        return
    for key, split in ((prefix + name, split) for name, split in module.splits.items()):
        destination[key] = split.as_dtensor(destination[key], module.group, key)
        refuse_saving(destination[key], key)


def load_parts(
    module: Any, state_dict: Any, prefix: str, metadata: Any, strict: bool, *problems: Any
) -> None:
    """_load_from_state_dict() of such a module: takes DTensors as saved, or full tensors."""
    if module.splits and metadata.get("assign_to_params_buffers") and module.group.size() > 1:
        raise RuntimeError(
            "load_state_dict(assign=True) would drop the gradient hooks of sharded weights:"
            " leave assign out, or use ringcomm.parallel.set_state_dict"
        )
    given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
    for name, split in module.splits.items():
        if (key := prefix + name) in given:
            try:
                given[key] = split.own_part(given[key], module.group)
            except ValueError as problem:
                given[key] = module.get_parameter(name)
                problems[-1].append(f"{key}: {problem}")
    LOAD_MODULE(module, given, prefix, metadata, strict, *problems)


class SplitModule(nn.Module):
    """A tensor-parallel layer."""

    group: dist.ProcessGroup  # whose ranks have the parts
    splits: dict[str, Split]  # by the parameter's name in the module
    sequence_dim: int | None = None  # along which tokens are sharded outside such modules

    __deepcopy__ = __reduce_ex__ = refuse_copy
    _save_to_state_dict, _load_from_state_dict = save_parts, load_parts  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.splits = {}
        register_part(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, DTensor) and self.sequence_dim is not None and self.group.size() > 1:
            # The hooks of all_reduce_grad_() are on parameters, not on the DTensors of fully_shard.
            raise ValueError(
                f"this {type(self).__name__} has a sequence_dim, but fully_shard drops the sums"
                " of gradients that sequence parallelism needs: use DistributedDataParallel, or"
                " zero.shard at stage 1 or 2"
            )
        super().__setattr__(name, value)

    def take(self, whole: nn.Module) -> Self:
        """Copies this rank's part of an unsharded module, which becomes that of rank 0.

        Collective, unless the module is on the meta device.
        """
        take_from_rank0(whole.parameters(), self.group)
        for name, param in whole.named_parameters():
            mine, split = self.get_parameter(name), self.splits.get(name)
            mine.requires_grad_(param.requires_grad)
            give_memory(mine, param if split is None else split.cut(param))
        return self


def tensor_groups_of(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The groups of tensor-parallel layers in modules, each once, without groups of one rank."""
    found = (
        layer.group
        for module in modules
        for layer in module.modules()
        if isinstance(layer, SplitModule) and layer.group.size() > 1
    )
    return list(dict.fromkeys(found))


def drawn_part(
    shape: Sequence[int],
    split: Split | None,
    draw_: Callable[[Tensor], object],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    """This rank's part of a parameter of random values, or all of it without a split.

    `draw_` fills a tensor in place, the same on all ranks. On the CPU the values equal those of the
    unsharded parameter, on other devices they have the same distribution. Only the part and a block
    are in memory.
    """
    num_rows, *row_sizes = shape
    split = split or Split(0, ((0, num_rows),), 0)
    empty = partial(torch.empty, device=device, dtype=dtype)
    part = empty(split.cut(torch.empty(shape, dtype=dtype, device="meta")).shape)
    step = max(MIN_ROWS, BLOCK_ELEMS // max(1, math.prod(row_sizes)) // MIN_ROWS * MIN_ROWS)
    begin = 0
    while begin < num_rows:
        end = num_rows if num_rows - begin < step + MIN_ROWS else begin + step
        block = empty((end - begin, *row_sizes))
        draw_(block)
        if split.dim == 0:
            first, last = max(begin, split.begin), min(end, split.end)
            if first < last:
                part[first - split.begin : last - split.begin] = block[first - begin : last - begin]
        else:
            part[begin:end] = split.cut(block)
        begin = end
    return nn.Parameter(part)
