"""Wrapper and fake of all_reduce_add_rms_norm_ in csrc/bindings/collective_ops.cc."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import _C
from ringcomm.backend import resolve_group
from ringcomm.torch_names import check_shapes

_ops: Any = torch.ops.ringcomm


def all_reduce_add_rms_norm_(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums `input` over the ranks, adds it to `residual`, and normalizes the result, in place.

    In a tensor-parallel decoder it replaces the all_reduce after a row-parallel layer, the residual
    addition and the next RMSNorm. On every rank, with `total` the ranks' sum of `input`:

        residual = residual + total
        input = residual / sqrt(mean(residual ** 2, over the last dimension) + eps) * weight

    Sums and the norm are computed in float32. `total`, `residual` and `input` are each rounded once
    to their dtype. If `residual` and `weight` are equal on all ranks, so are the results, bit for
    bit.

    Args:
        input: this rank's part of the sum, (..., features), contiguous, on the CPU; float32,
            float16 or bfloat16. It is overwritten with the normalized result.
        residual: of the same shape and dtype. It is overwritten with the new residual.
        weight: (features,), of the same dtype.
        eps: added to the mean.
        group: None for the default group; over any backend.

    Returns:
        `input` and `residual`.

    Raises:
        ValueError: a shape or layout is wrong, eps is negative, two tensors share memory, or one
            requires grad while gradients are enabled.
        TypeError: a dtype is wrong.
        RingcommError: a rank failed or called something else. `input` may then hold any values, and
            `residual` is unchanged.

    Collective; blocks until the results are available. Wrong arguments raise before anything is
    exchanged. It allocates no memory, and has no gradient.
    """
    if not torch.compiler.is_compiling():
        given = dist.group.WORLD if group is None else group
        if _C.eager.all_reduce_add_rms_norm_(input, residual, weight, eps, given):
            return input, residual
    name = resolve_group(group).group_name
    _ops.all_reduce_add_rms_norm_(input, residual, weight, eps, name)
    return input, residual


@torch.library.register_fake("ringcomm::all_reduce_add_rms_norm_")
def _(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> None:
    check_shapes(input.dim() > 0 and input.shape == residual.shape)
    check_shapes(weight.shape == input.shape[-1:])
