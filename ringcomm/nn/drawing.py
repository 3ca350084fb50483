"""Random values of whole layers, of which a rank keeps its part: drawn in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringcomm.parallel.tensor.splits import Split

__all__ = ["BLOCK_ELEMS", "draw_part"]

# 16 MiB of fp32. torch's generator of the CPU fills vectors of 16 numbers, and an end that is
# shorter in another way: blocks are of 16 rows and more.
BLOCK_ELEMS = 1 << 22
MIN_ROWS = 16


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
