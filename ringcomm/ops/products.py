"""Matrix products that accumulate into existing memory."""

import torch
from torch import Tensor


def add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1.0) -> Tensor:
    """total = beta * total + left @ right, in place; with beta 0 total is not read.

    The product is summed in fp32 and rounded to total's dtype: that of the operands, or float32.
    """
    if total.dtype == left.dtype:
        return total.addmm_(left, right, beta=beta)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    return total.addmm_(left.float(), right.float(), beta=beta)
