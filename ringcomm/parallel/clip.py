"""Clipping by one norm of all gradients, whatever the axes of parallelism."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.model_axes import Axes, Held, axes_of
from ringcomm.torch_names import all_gather_single

__all__ = ["clip_grad_norm_", "total_norm"]


@torch.no_grad()
def clip_grad_norm_(
    model: Any, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a model on any mesh of ranks.

    Every element of the whole model's gradient counts once: layers in tensor, sequence and expert
    parallelism, copied key and value heads, the stages of a pipeline with the weights they share,
    and DTensors of fully_shard, in any combination. The norm and the factor have the same bits on
    all ranks, so that replicas stay alike.

    Args:
        model: an nn.Module, or a `pipeline.Pipeline`, after the backward pass; gradients are
            averaged over data parallelism (by DistributedDataParallel, fully_shard or
            `expert.average_gradients`). An optimizer that has a clip_grad_norm_() of its own is
            asked for that.
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
        norm_type: 2, another p > 0, or infinity.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before, of no dimension, in float64, the same on all ranks.

    Raises:
        TypeError: `model` is parameters, or an optimizer that does not know its model.
        ValueError: norm_type is out of range, or the model is a piece of a pipeline.
        RuntimeError: on all ranks and before gradients change: no rank has a gradient, or the norm
            is not finite and that is an error.

    Collective: an all_gather of 16 bytes a rank for each group of a mesh dimension, of tensor
    parallelism, of experts and of stages; 32 for tensor-parallel groups of experts in parts.
    """
    if isinstance(model, torch.optim.Optimizer) and hasattr(model, "clip_grad_norm_"):
        options = {} if norm_type == 2.0 else {"norm_type": norm_type}
        norm: Tensor = model.clip_grad_norm_(
            max_norm, error_if_nonfinite=error_if_nonfinite, **options
        )
        return norm
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(
            "clip_grad_norm_ takes the model or its Pipeline, which know what other ranks have;"
            f" got a {type(model).__name__}"
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type is 2, another positive number or infinity, got {norm_type}")
    axes = axes_of(module)
    grads = {param: param.grad for param in module.parameters() if param.grad is not None}
    norm = total_norm(axes, {param: _own(grad) for param, grad in grads.items()}, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {float(norm)}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads.values()]
    for of_kind in _by_kind(parts):
        torch._foreach_mul_(of_kind, factor.to(of_kind[0].device))
    return norm


def total_norm(axes: Axes, grads: dict[nn.Parameter, Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient.

    Args:
        axes: of the model.
        grads: this rank's elements of the gradients that it has.
        norm_type: as in clip_grad_norm_().

    Returns:
        A tensor of no dimension, in float64, with the same bits on all ranks.

    Raises:
        RuntimeError: no rank has a gradient; on all ranks.

    Collective: as clip_grad_norm_().
    """
    is_max = norm_type == math.inf
    pools = _own_pools(axes, grads, norm_type)
    for group in axes.groups:
        # The same pools in the same order on all ranks of the group: they have the same modules,
        # but for a group of experts, which is last, so that it has one pool.
        mine = [rest for rest in pools if rest[:1] == (group,)]
        rows = _gathered(torch.stack([pools[rest] for rest in mine]), group)
        for rest, row in zip(mine, rows.unbind(1), strict=True):
            pools[rest[1:]] = _joined([pools[rest[1:]], *row], is_max)
    total = pools[()]
    if axes.stages is not None and axes.stages.size() > 1:
        total = _joined([*_gathered(total, axes.stages)], is_max)
    # A rank that has a gradient need not look, and so does not wait for its device.
    if not grads and not total[1]:
        raise RuntimeError(
            "no rank has a gradient to clip: call backward() before. An optimizer that takes"
            " gradients in the backward pass, such as Lomo, clips by its option clip_grad_norm"
        )
    return total[0] if is_max else total[0] ** (1 / norm_type)


def _own_pools(
    axes: Axes, grads: dict[nn.Parameter, Tensor], norm_type: float
) -> dict[tuple[dist.ProcessGroup, ...], Tensor]:
    """This rank's sums, by the groups that are still to be summed over.

    Each is the sum of |g|^p (or the largest |g|), and the number of gradients in it.
    """
    device = next((grad.device for grad in grads.values()), torch.device("cpu"))
    by_held: dict[Held, list[Tensor]] = {}
    for param, held in axes.held.items():
        of_held = by_held.setdefault(held, [])
        if param in grads:
            of_held.append(grads[param])
    pools = {}
    for groups in [(), *((group,) for group in axes.groups), *(held.groups for held in by_held)]:
        for idx in range(len(groups) + 1):
            pools[groups[idx:]] = torch.zeros(2, dtype=torch.float64, device=device)
    is_max = norm_type == math.inf
    for held, of_held in by_held.items():
        own = _power(of_held, norm_type, device)
        own = own if is_max else own / held.num_copies
        pair = torch.stack([own, torch.full_like(own, len(of_held))])
        pools[held.groups] = _joined([pools[held.groups], pair], is_max)
    return pools


def _joined(pairs: list[Tensor], is_max: bool) -> Tensor:
    """One of several pairs, added in this order, so that the bits are the same on all ranks."""
    first, *others = pairs
    for other in others:
        norm = torch.maximum(first[0], other[0]) if is_max else first[0] + other[0]
        first = torch.stack([norm, first[1] + other[1]])
    return first


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks', (ranks, *shape). Not by all_reduce, whose order may differ between groups."""
    sent = mine.to(device_of(group)).contiguous()
    rows = sent.new_empty(group.size(), *mine.shape)
    all_gather_single(rows.view(-1), sent.view(-1), group=group)
    return rows.to(mine.device)


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over all elements, or the largest |g|; 0 without any."""
    found = [torch.zeros((), dtype=torch.float64, device=device)]
    for of_kind in _by_kind([grad for grad in grads if grad.numel()]):
        wide = torch.promote_types(of_kind[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(of_kind, norm_type, dtype=wide)).double()
        value = norms.amax() if norm_type == math.inf else norms.pow(norm_type).sum()
        found.append(value.to(device))
    every = torch.stack(found)
    return every.amax() if norm_type == math.inf else every.sum()


def _by_kind(grads: list[Tensor]) -> list[list[Tensor]]:
    """Lists of one device and dtype each."""
    found: dict[Any, list[Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(found.values())


def _own(grad: Tensor) -> Tensor:
    """This rank's elements of a gradient."""
    if not isinstance(grad, DTensor):
        return grad
    whole = [Replicate() if p.is_partial() else p for p in grad.placements]
    return grad.redistribute(placements=whole).to_local()
