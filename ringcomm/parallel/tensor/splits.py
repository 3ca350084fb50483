"""A rank's part of a sharded parameter, and its random initialization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel.parts_of_models import register_part

__all__ = ["Split", "SplitModule", "refuse_copy", "split_params", "take_part"]

# 16 MiB of fp32. torch's CPU generator fills vectors of 16 numbers, and a shorter end differently:
# blocks have at least 16 rows.
BLOCK_ELEMS = 1 << 22
MIN_ROWS = 16


def refuse_copy(*_: Any) -> NoReturn:
    """Raises RuntimeError for a copy, which would lack the gradient hooks."""
    raise RuntimeError(
        "layers that are sharded over ranks cannot be copied: copy the layers before you shard them"
    )


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


class SplitModule(nn.Module):
    """A module with parameters that are this rank's parts of sharded ones."""

    group: dist.ProcessGroup  # whose ranks have the parts
    splits: dict[str, Split]  # by the parameter's name in the module
    sequence_dim: int | None = None  # along which tokens are sharded outside such modules

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __init__(self) -> None:
        super().__init__()
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


def split_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, SplitModule, Split]]:
    """Name, parameter, module and part of all split parameters of a model; tied ones once."""
    seen = set()
    for prefix, module in model.named_modules():
        if not isinstance(module, SplitModule):
            continue
        for name, split in module.splits.items():
            param = module.get_parameter(name)
            if param not in seen:
                seen.add(param)
                yield f"{prefix}.{name}" if prefix else name, param, module, split


def take_part(
    whole: Tensor,
    split: Split | None,
    drawn_on: torch.device | None,
    draw_: Callable[[Tensor], object],
) -> nn.Parameter:
    """This rank's part of a parameter, or all of it without a split, in new memory.

    A copy of `whole`; or, with the device `drawn_on`, random values from `draw_`, which fills a
    tensor in place, the same on all ranks. On the CPU they equal those of the unsharded parameter,
    on other devices they have the same distribution. Only the part and a block are in memory.
    """
    if drawn_on is None:
        part = whole.detach() if split is None else split.cut(whole.detach())
        return nn.Parameter(part.clone(), requires_grad=whole.requires_grad)
    split = split or Split(0, ((0, whole.shape[0]),), 0)
    empty = partial(torch.empty, device=drawn_on, dtype=whole.dtype)
    part, num_rows, row_sizes = empty(split.cut(whole).shape), whole.shape[0], whole.shape[1:]
    step = max(MIN_ROWS, BLOCK_ELEMS // max(1, row_sizes.numel()) // MIN_ROWS * MIN_ROWS)
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
