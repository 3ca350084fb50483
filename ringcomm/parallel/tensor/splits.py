"""Which part of a whole parameter a rank has, and random values of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Split", "SplitModule", "draw_part", "refuse_copy", "split_params"]

# 16 MiB of fp32. torch's generator of the CPU fills vectors of 16 numbers, and an end that is
# shorter in another way: blocks are of 16 rows and more.
BLOCK_ELEMS = 1 << 22
MIN_ROWS = 16


def refuse_copy(*_: Any) -> NoReturn:
    """Instead of copying layers that are split: hooks of gradients would not be copied.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("layers that are split over ranks have no copy: copy the whole ones before")


@dataclass(frozen=True)
class Split:
    """A rank's part of a parameter.

    Attributes:
        dim: the dimension that is split.
        ranges: of it, [begin, end) of every rank of the group.
        rank: this one.
        num_replicas: so many ranks in a row have the same part.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    rank: int
    num_replicas: int = 1

    @property
    def begin(self) -> int:
        """Where this rank's part begins."""
        return self.ranges[self.rank][0]

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.ranges[self.rank][1]

    @property
    def total(self) -> int:
        """The dimension's length in the whole parameter."""
        return self.ranges[-1][1]

    def cut(self, whole: Tensor) -> Tensor:
        """A view of this rank's part."""
        return whole.narrow(self.dim, self.begin, self.end - self.begin)


class SplitModule(nn.Module):
    """A module some of whose parameters are this rank's parts of whole ones.

    Attributes:
        group: whose ranks have the parts.
        splits: by the parameter's name in the module.
        sequence_dim: the dimension that ranks share tokens along outside of such modules, if any.

    Raises:
        ValueError: torch's fully_shard shards it, and it has a sequence_dim.
    """

    group: dist.ProcessGroup
    splits: dict[str, Split]
    sequence_dim: int | None = None

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, DTensor) and self.sequence_dim is not None and self.group.size() > 1:
            # Hooks of parameters, which all_reduce_grad_() makes, are not those of its DTensors.
            raise ValueError(
                f"this {type(self).__name__} has a sequence_dim, and fully_shard drops the sums of"
                " gradients that sequence parallelism needs: take DistributedDataParallel, or"
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


def draw_part(
    shape: tuple[int, ...],
    split: Split | None,
    draw_: Callable[[Tensor], object],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Tensor:
    """This rank's part of random values that all ranks draw alike.

    Args:
        shape: of the whole.
        split: which part is kept; None for all of it.
        draw_: fills a tensor in place.
        device: of the result.
        dtype: of the result; None for torch's default.

    Returns:
        On the CPU the values that `draw_` gives the whole; on other devices values of the same
        distribution. Either way the generator and the whole do not depend on the number of ranks,
        and no more than the part and a block are in memory.
    """
    if split is None:
        whole = torch.empty(shape, device=device, dtype=dtype)
        draw_(whole)
        return whole
    kept = list(shape)
    kept[split.dim] = split.end - split.begin
    part = torch.empty(kept, device=device, dtype=dtype)
    row_elems = max(1, torch.Size(shape[1:]).numel())
    step = max(MIN_ROWS, BLOCK_ELEMS // row_elems // MIN_ROWS * MIN_ROWS)
    begin = 0
    while begin < shape[0]:
        end = shape[0] if shape[0] - begin < step + MIN_ROWS else begin + step
        block = torch.empty((end - begin, *shape[1:]), device=device, dtype=dtype)
        draw_(block)
        if split.dim == 0:
            first, last = max(begin, split.begin), min(end, split.end)
            if first < last:
                part[first - split.begin : last - split.begin] = block[first - begin : last - begin]
        else:
            part[begin:end] = split.cut(block)
        begin = end
    return part
