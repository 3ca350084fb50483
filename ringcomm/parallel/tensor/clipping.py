"""The norm of all gradients where each rank has parts of some, and all of the others."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel.grad_norm import clip_by_norm
from ringcomm.parallel.tensor.splits import split_params

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, of the whole model, which is split over one group.

    Args:
        model: with modules of ringcomm.nn and gradients.
        max_norm: gradients are multiplied by min(1, max_norm / norm).
        error_if_nonfinite: whether a norm that is not finite is a RuntimeError, on all ranks.

    Returns:
        The 2-norm before, without dimensions, the same on all ranks.

    Collective: one all_reduce of 4 bytes.
    """
    num_ranks_of: dict[Tensor, int] = {}
    group: dist.ProcessGroup | None = None
    for _, param, module, split in split_params(model):
        num_ranks_of[param], group = split.num_copies, module.group
    by_num_ranks = defaultdict(list)  # so many ranks have the same gradients
    for param in model.parameters():
        if param.grad is not None:
            num = num_ranks_of.get(param, 1 if group is None else group.size())
            by_num_ranks[num].append(param.grad)
    total = torch.zeros((), device=next(model.parameters()).device)
    for num, grads in by_num_ranks.items():
        total += torch.nn.utils.get_total_norm(grads).float().square() / num
    if group is not None:
        dist.all_reduce(total, group=group)
    return clip_by_norm(model.parameters(), total, max_norm, error_if_nonfinite=error_if_nonfinite)
