"""The norm of all stages' gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.pipeline.pipeline import Pipeline

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(pipe: Pipeline, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, of the whole model, whose stages are on several ranks.

    Args:
        pipe: after a step; where there are data-parallel replicas, after their gradients are means.
        max_norm: gradients are multiplied by min(1, max_norm / norm).
        error_if_nonfinite: whether a norm that is not finite is a RuntimeError, on all ranks.

    Returns:
        The 2-norm before, without dimensions, the same on all ranks. A weight that stages share
        counts once.

    Collective: one all_reduce of 4 bytes.
    """
    own = [p for p in pipe.parameters() if not pipe.tied.is_counted_elsewhere(p)]
    grads = [param.grad for param in own if param.grad is not None]
    total = torch.zeros((), device=pipe.device)
    if grads:
        total += torch.nn.utils.get_total_norm(grads).float().square()
    dist.all_reduce(total, group=pipe.group)
    norm = total.sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {float(norm)}")
    torch.nn.utils.clip_grads_with_norm_(pipe.parameters(), max_norm, norm)
    return norm
