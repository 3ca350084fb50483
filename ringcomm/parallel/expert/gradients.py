"""Gradients of a model with experts under data parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.backend import resolve_group
from ringcomm.parallel.constant_buffer import all_reduce_mean_
from ringcomm.parallel.expert.local_experts import LocalExperts, expert_parameters, split_experts

__all__ = ["average_gradients"]

_AVERAGED = "_ringcomm_averaged"


def average_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> None:
    """Makes gradients those of the mean of the ranks' losses; between backward() and step().

    A replicated parameter's gradient becomes the mean over the ranks. An expert's is the sum over
    the tokens of all ranks that share the experts already, since these have sent them: it is
    divided by the number of ranks, and summed over the ranks that have the same expert.

    Args:
        model: with experts or without. Of DistributedDataParallel and of fully_shard, which have
            averaged the other parameters themselves, only the experts are left to do.
        group: all ranks that have rows of their own. None: DistributedDataParallel's, or the
            default group.
        mesh: a one-dimensional DeviceMesh of them, in place of a group.

    Raises:
        ValueError: a layer's group and replica_group do not make up the group; nothing was written.
        RuntimeError: gradients of experts have been averaged already, or a backward pass has added
            to such ones: they would be divided twice. Nothing was written.

    Collective: over the group 2(N-1)/N of the replicated gradients' bytes and of a byte for each
    parameter, over a replica_group likewise of its experts'; nothing where experts have no replica.
    A gradient that some ranks have is 0 on the others. Accumulate first, and call it once behind
    the last backward().
    """
    ddp: Any = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None and group is None and mesh is None:
        group = ddp.process_group
    resolved = resolve_group(group, mesh)
    layers = split_experts(model)
    for name, experts in layers.items():
        _check_groups(name, experts, resolved)
    of_experts = set(expert_parameters(model).values())
    if layers:
        handled = [*of_experts] if ddp is not None else [*model.parameters()]
        _check_fresh(handled)
    if ddp is None:
        others = [param for param in model.parameters() if param not in of_experts]
        replicated = [param for param in others if not isinstance(param, DTensor)]
        all_reduce_mean_(_gradients(replicated, resolved), resolved)
    for experts in layers.values():
        params = list(experts.parameters())
        if experts.replica_group is not None:
            all_reduce_mean_(_gradients(params, experts.replica_group), experts.replica_group)
        for param in params:
            if param.grad is not None:
                param.grad.div_(experts.group.size())
    if layers:
        for param in handled:
            _note_average(param)


def _check_fresh(params: Iterable[nn.Parameter]) -> None:
    """No gradient is an average, or has one in it."""
    if any(_has_average(param.grad) for param in params):
        raise RuntimeError(
            "average_gradients() has averaged these gradients before: call it once in a step,"
            " after the last backward() and before step() and zero_grad()"
        )


def _has_average(grad: Tensor | None) -> bool:
    return grad is not None and getattr(grad, _AVERAGED, None) == grad._version


def _note_average(param: nn.Parameter) -> None:
    """A gradient with an average in it has its version as an attribute: zero_grad() changes it."""
    if param.grad is None or not param.requires_grad:
        return
    setattr(param.grad, _AVERAGED, param.grad._version)
    if not hasattr(param, _AVERAGED):
        setattr(param, _AVERAGED, True)
        param.register_hook(partial(_before_accumulation, weakref.ref(param)))


def _before_accumulation(of: weakref.ref[nn.Parameter], _: Tensor) -> None:
    grad: Any = getattr(of(), "grad", None)
    if _has_average(grad):
        setattr(grad, _AVERAGED, grad._version + 1)


def _check_groups(name: str, experts: LocalExperts, group: dist.ProcessGroup) -> None:
    num_replicas = 1 if experts.replica_group is None else experts.replica_group.size()
    if experts.group.size() * num_replicas != group.size():
        raise ValueError(
            f"{group.size()} ranks average, and {name or 'the model'} has experts over"
            f" {experts.group.size()} ranks in {num_replicas} replicas: give the layer its"
            " replica_group, and all ranks that have rows of their own as the group here"
        )


def _gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> list[Tensor]:
    """The gradients that some rank of the group has, of zeros where this one has none."""
    trained = [param for param in params if param.requires_grad]
    if not trained:
        return []
    has_grad = torch.tensor([param.grad is not None for param in trained], dtype=torch.uint8)
    has_grad = has_grad.to(trained[0].device)
    dist.all_reduce(has_grad, op=dist.ReduceOp.MAX, group=group)
    grads = []
    for param, is_there in zip(trained, has_grad.tolist(), strict=True):
        if is_there:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
    return grads
