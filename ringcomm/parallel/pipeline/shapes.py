"""What goes from stage to stage: shapes and dtypes, found by a forward without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ringcomm.parallel.pipeline.schedules import Plan

__all__ = ["TensorSpec", "find_boundaries", "specs_of"]


class TensorSpec(NamedTuple):
    """Of a tensor for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def like(self, device: torch.device | str) -> Tensor:
        """A tensor of zeros."""
        made = torch.zeros(self.shape, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Specs = tuple[TensorSpec, ...]


def specs_of(value: Any) -> Specs:
    """Of a tensor, or a tuple of them.

    Raises:
        TypeError: it is something else.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                "blocks hand on a tensor or a tuple of tensors, and this one returned a"
                f" {type(tensor).__name__}"
            )
    return tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def find_boundaries(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    inputs: Specs,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    computes: bool,
) -> list[Specs]:
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
                specs = None if computes else _inferred(modules[stage], found[-1], device)
                answer = [specs or _outputs_of(modules[stage], found[-1], device)]
            except Exception as error:
                answer = [f"{type(error).__name__}: {error}"]
        owner = plan.rank_of(stage)
        dist.broadcast_object_list(answer, group=group, group_src=owner)
        if isinstance(answer[0], str):
            took = ", ".join(map(str, found[-1]))
            raise ValueError(f"stage {stage} (rank {owner}) failed with {took}: {answer[0]}")
        found.append(answer[0])
    return found


def _outputs_of(module: nn.Module, inputs: Specs, device: torch.device) -> Specs:
    """Computes, and leaves no trace in buffers and generators."""
    places = [(part, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices):
            return specs_of(module(*(spec.like(device) for spec in inputs)))
    finally:
        for part, buffers in places:
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _inferred(module: nn.Module, inputs: Specs, device: torch.device) -> Specs | None:
    """By fake tensors; None where the module does what those cannot, such as looking at values."""
    kept = [(part, _contents_of(part)) for part in module.modules()]
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # or it would keep fake copies of weights
    try:
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            found = specs_of(module(*(spec.like(device) for spec in inputs)))
    except Exception:
        found = None
    finally:
        torch.set_autocast_cache_enabled(caches)
        for part, contents in kept:
            _put_back(part, contents)
    return found


def _contents_of(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Its attributes, and what is in those that are containers."""
    kinds = (dict, list, set)
    return {k: (v, v.copy() if isinstance(v, kinds) else None) for k, v in vars(part).items()}


def _put_back(part: nn.Module, contents: dict[str, tuple[Any, Any]]) -> None:
    """Forgets what a forward of fake tensors has left."""
    vars(part).clear()
    for name, (value, inside) in contents.items():
        vars(part)[name] = value
        if isinstance(value, list):
            value[:] = inside
        elif inside is not None:
            value.clear()
            value.update(inside)
