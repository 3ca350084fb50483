"""The norm of all stages' gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.grad_norm import clip_by_norm
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
    return clip_by_norm(pipe.parameters(), total, max_norm, error_if_nonfinite=error_if_nonfinite)
