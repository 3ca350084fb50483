"""What goes from stage to stage: shapes and dtypes, found by a forward without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ringcomm.parallel.pipeline.schedules import Plan

__all__ = ["Metas", "find_boundaries", "meta_like", "shown", "zeros"]

Metas = tuple[Tensor, ...]  # of one micro-batch, on the meta device


def meta_like(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A contiguous tensor on the meta device."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def zeros(metas: Metas, device: torch.device) -> tuple[Tensor, ...]:
    """Of the same shapes and dtypes; those require grad that do."""
    return tuple(
        torch.zeros(m.shape, dtype=m.dtype, device=device, requires_grad=m.requires_grad)
        for m in metas
    )


def shown(tensors: tuple[Tensor, ...]) -> str:
    """Their dtypes and shapes in words."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def find_boundaries(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    inputs: Metas,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    computes: bool,
) -> list[Metas]:
    """What each stage takes, and at the end what the last one returns.

    Stages answer one after the other. With `computes` they run a forward of zeros: in the first one
    modules may make what they keep, such as a table for their positions. Without it fake tensors
    are tried first, which have no memory and cost no computing.

    Modules are this rank's, by stage; inputs those of the first stage, the same on all ranks.

    Raises:
        ValueError: a stage failed; on all ranks.

    Collective: an object for each stage.
    """
    found = [inputs]
    for stage in range(plan.num_stages):
        answer: list[Any] = [None]
        if stage in modules:
            try:
                outputs = None if computes else _inferred(modules[stage], found[-1], device)
                answer = [outputs or _computed(modules[stage], found[-1], device)]
            except Exception as error:
                answer = [f"{type(error).__name__}: {error}"]
        owner = plan.rank_of(stage)
        dist.broadcast_object_list(answer, group=group, group_src=owner)
        if isinstance(answer[0], str):
            raise ValueError(
                f"stage {stage} (rank {owner}) failed with {shown(found[-1])}: {answer[0]}"
            )
        found.append(answer[0])
    return found


def _metas_of(value: Any) -> Metas:
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                "blocks hand on a tensor or a tuple of tensors, and this one returned a"
                f" {type(tensor).__name__}"
            )
    return tuple(meta_like(t, t.requires_grad) for t in tensors)


def _computed(module: nn.Module, inputs: Metas, device: torch.device) -> Metas:
    """By computing, which leaves no trace in buffers and generators."""
    places = [(part, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices):
            return _metas_of(module(*zeros(inputs, device)))
    finally:
        for part, buffers in places:
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _inferred(module: nn.Module, inputs: Metas, device: torch.device) -> Metas | None:
    """By fake tensors; None where the module does what those cannot, such as looking at values."""
    # A module's attributes, and what is in those that are containers.
    kept = [
        (vars(part), {k: (v, _inside(v)) for k, v in vars(part).items()})
        for part in module.modules()
    ]
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # or it would keep fake copies of weights
    try:
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            value = module(*zeros(inputs, device))
        return _metas_of(value)
    except Exception:
        return None
    finally:
        torch.set_autocast_cache_enabled(caches)
        for attributes, before in kept:
            attributes.clear()
            for name, (value, inside) in before.items():
                attributes[name] = value
                if isinstance(value, list):
                    value[:] = inside
                elif inside is not None:
                    value.clear()
                    value.update(inside)


def _inside(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else None
