"""Names that differ between the supported versions of torch, and features that 2.11 lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single", "reduce_unused"]

# torch 2.13 renamed these; 2.11 has only the old names, and the new torch warns about
# them on every call.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_unused(unit: Any) -> None:
    """Makes a unit of fully_shard reduce zeros for weights without a gradient on this rank.

    Without it, ranks with gradients of different weights of equal sizes would sum unrelated
    gradients.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        for param in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(param, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and param.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        reduce(*unused)

    group.post_backward = post_backward
