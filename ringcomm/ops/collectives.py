"""Fakes, gradients and wrappers of csrc/bindings/ops/collective_ops.cc, in the same order.

Gradients are adjoints: a loss that every rank computes from its output is meant as the sum of the
ranks' losses, as in torch.distributed.nn. So all_reduce(sum) is its own adjoint, all_gather and
reduce_scatter(sum) are each other's, and broadcast and reduce are.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group

__all__ = ["monitored_barrier"]

_ops: Any = torch.ops.ringcomm


# ---- all_reduce_


def all_reduce_(
    tensor: Tensor, reduce_op: str = "sum", group: dist.ProcessGroup | None = None
) -> Tensor:
    """Reduces `tensor` over the ranks, in place.

    Args:
        tensor: any shape, the same on all ranks; bool, integer or floating; not requiring grad.
        reduce_op: sum, avg, product, min, max, band, bor or bxor.
        group: None for the default group.

    Returns:
        `tensor`.

    Raises:
        ValueError: the tensor requires grad, is not dense or not on the CPU, or the reduction is
            unknown or has no meaning for its dtype.
        TypeError: the dtype cannot be reduced.
        RingcommError: a rank failed or called something else.

    Collective; blocks until the result is there.
    """
    _ops.all_reduce_(tensor, reduce_op, resolve_group(group).group_name)
    return tensor


@torch.library.register_fake("ringcomm::all_reduce_")
def _(input: Tensor, reduce_op: str, group_name: str) -> None:
    return None


# ---- all_reduce


def all_reduce(
    tensor: Tensor,
    reduce_op: str = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The reduction of the ranks' tensors, as a new tensor or in `out`; `tensor` stays as it is.

    Arguments and errors as all_reduce_, but that the tensor may require grad where there is no
    `out`: differentiable for sum and avg, NotImplementedError in the backward pass for the others.
    `out` has the shape and dtype of `tensor`, else ValueError or TypeError, and may be `tensor`.
    Collective; blocks until the result is there.
    """
    name = resolve_group(group).group_name
    if out is not None:
        _ops.all_reduce_into(tensor, out, reduce_op, name)
        return out
    result: Tensor = _ops.all_reduce(tensor, reduce_op, name)
    return result


@torch.library.register_fake("ringcomm::all_reduce")
def _(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("ringcomm::all_reduce_into")
def _(input: Tensor, out: Tensor, reduce_op: str, group_name: str) -> None:
    for what in ("device", "dtype", "shape"):
        ours, theirs = getattr(input, what), getattr(out, what)
        torch._check(ours == theirs, lambda: f"all_reduce: {what} {ours} into {theirs}")  # noqa: B023


def _save_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.reduce_op, ctx.group_name = inputs[1], inputs[2]


def _check_linear(op: str, reduce_op: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise NotImplementedError(
            f"{op} with reduce_op={reduce_op!r} has no gradient; sum and avg have"
        )


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    _check_linear("all_reduce", ctx.reduce_op)
    return _ops.all_reduce(grad, ctx.reduce_op, ctx.group_name), None, None


torch.library.register_autograd(
    "ringcomm::all_reduce", _all_reduce_backward, setup_context=_save_reduction
)


# ---- reduce_scatter


def reduce_scatter(
    tensor: Tensor, reduce_op: str = "sum", group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's part of the reduction of the ranks' tensors.

    Args:
        tensor: shape (N * d, ...) for N ranks, the same on all.
        reduce_op: as in all_reduce_.
        group: None for the default group.

    Returns:
        A new tensor of shape (d, ...): rows [rank * d, (rank + 1) * d) of the reduction.

    Raises:
        ValueError: N does not divide the first dimension.
        RingcommError: a rank failed or called something else.

    Collective; blocks until the result is there. Differentiable for sum and avg.
    """
    result: Tensor = _ops.reduce_scatter(tensor, reduce_op, resolve_group(group).group_name)
    return result


def _world_size(group_name: str) -> int:
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return int(resolve(group_name).size())


@torch.library.register_fake("ringcomm::reduce_scatter")
def _(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    world_size = _world_size(group_name)
    torch._check(input.dim() > 0 and input.size(0) % world_size == 0)
    return input.new_empty([input.size(0) // world_size, *input.shape[1:]])


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    _check_linear("reduce_scatter", ctx.reduce_op)
    gathered = _ops.all_gather(grad, ctx.group_name)
    if ctx.reduce_op == "avg":
        gathered = gathered / _world_size(ctx.group_name)
    return gathered, None, None


torch.library.register_autograd(
    "ringcomm::reduce_scatter", _reduce_scatter_backward, setup_context=_save_reduction
)


# ---- all_gather


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The ranks' tensors, joined along the first dimension.

    Args:
        tensor: shape (d, ...), the same on all ranks; any dtype.
        group: None for the default group.

    Returns:
        A new tensor of shape (N * d, ...), in rank order.

    Raises:
        ValueError: the tensor has no dimension.
        RingcommError: a rank failed or called something else.

    Collective; blocks until the result is there. Differentiable.
    """
    result: Tensor = _ops.all_gather(tensor, resolve_group(group).group_name)
    return result


@torch.library.register_fake("ringcomm::all_gather")
def _(input: Tensor, group_name: str) -> Tensor:
    torch._check(input.dim() > 0)
    return input.new_empty([input.size(0) * _world_size(group_name), *input.shape[1:]])


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _ops.reduce_scatter(grad, "sum", ctx.group_name), None


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group_name = inputs[-1]


torch.library.register_autograd(
    "ringcomm::all_gather", _all_gather_backward, setup_context=_save_group
)


# ---- broadcast_


def broadcast_(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Overwrites `tensor` with that of rank `src`.

    Args:
        tensor: any shape and dtype, the same on all ranks; not requiring grad.
        src: a rank of the group, in the group's numbering.
        group: None for the default group.

    Returns:
        `tensor`.

    Raises:
        ValueError: the tensor requires grad, or `src` is no rank of the group.
        RingcommError: a rank failed or called something else.

    Collective; blocks until the result is there.
    """
    _ops.broadcast_(tensor, src, resolve_group(group).group_name)
    return tensor


@torch.library.register_fake("ringcomm::broadcast_")
def _(input: Tensor, src: int, group_name: str) -> None:
    return None


# ---- broadcast


def broadcast(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensor of rank `src`, as a new tensor.

    Arguments and errors as broadcast_, but that the tensor may require grad: differentiable.
    Collective; blocks until the result is there.
    """
    result: Tensor = _ops.broadcast(tensor, src, resolve_group(group).group_name)
    return result


@torch.library.register_fake("ringcomm::broadcast")
def _(input: Tensor, src: int, group_name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _save_root(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.root, ctx.group_name = inputs[1], inputs[-1]


def _broadcast_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _ops.reduce(grad, ctx.root, "sum", ctx.group_name), None, None


torch.library.register_autograd(
    "ringcomm::broadcast", _broadcast_backward, setup_context=_save_root
)


# ---- reduce


def reduce(
    tensor: Tensor, dst: int, reduce_op: str = "sum", group: dist.ProcessGroup | None = None
) -> Tensor:
    """The reduction of the ranks' tensors on rank `dst`, zeros on the others.

    Arguments and errors as all_reduce; `dst` is a rank of the group, in the group's numbering.
    Collective; blocks until the result is there. Differentiable for sum.
    """
    result: Tensor = _ops.reduce(tensor, dst, reduce_op, resolve_group(group).group_name)
    return result


@torch.library.register_fake("ringcomm::reduce")
def _(input: Tensor, dst: int, reduce_op: str, group_name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.root, ctx.reduce_op, ctx.group_name = inputs[1:]


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    if ctx.reduce_op != "sum":
        raise NotImplementedError(
            f"reduce with reduce_op={ctx.reduce_op!r} has no gradient; sum has"
        )
    return _ops.broadcast(grad, ctx.root, ctx.group_name), None, None, None


torch.library.register_autograd("ringcomm::reduce", _reduce_backward, setup_context=_save_reduce)


# ---- ring_all_reduce_


def ring_all_reduce_(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    num_slots: int = 2,
    slot_bytes: int | None = None,
) -> Tensor:
    """Sums `tensor` over the ranks in place, around the ring, whatever the group's algorithm is.

    For experiments. Sends exactly 2(N-1)/N of the tensor's bytes when N divides its elements;
    `ringcomm.stats()` counts them under ("all_reduce", "ring").

    Args:
        tensor: any shape, the same on all ranks; bool, integer or floating; not requiring grad.
        group: a group of backend "ringcomm"; None for the default group.
        num_slots: slots of each link, 2 to 64: how far a sender may run ahead.
        slot_bytes: bytes of a slot, a multiple of 64: the unit of pipelining. None takes what the
            group's links hold with `num_slots` slots.

    Returns:
        `tensor`.

    Raises:
        ValueError: the slots are not as said, or do not fit the links that the group was made with;
            the tensor requires grad; the group's backend is another one.
        TypeError: the dtype cannot be reduced.
        RingcommError: a rank failed or called something else.

    Collective; blocks until the result is there.
    """
    if num_slots == 0 or slot_bytes == 0:  # which the operator takes for "as the group has it"
        raise ValueError(f"num_slots={num_slots} and slot_bytes={slot_bytes}: there must be some")
    _ops.ring_all_reduce_(tensor, resolve_group(group).group_name, num_slots, slot_bytes or 0)
    return tensor


@torch.library.register_fake("ringcomm::ring_all_reduce_")
def _(input: Tensor, group_name: str, num_slots: int, slot_bytes: int) -> None:
    return None


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier after which, if it fails, rank 0 knows which ranks did not come.

    As torch.distributed.monitored_barrier, which takes groups of backend "gloo" only. It uses
    messages of its own: a failure leaves the group as it is, and a rank that comes late is told.

    Args:
        group: None for the default group.
        timeout: how long rank 0 waits for the others; None takes the group's. The others wait for
            rank 0 as long as the group's time-out says, or twice this one if that is longer.
        wait_all_ranks: whether rank 0 names all missing ranks, or the first of them only.

    Raises:
        TypeError: the timeout is no timedelta.
        ValueError: this rank is not in the group, or there is none.
        CollectiveTimeoutError: on rank 0, "Rank 2 failed to pass monitoredBarrier in 1000 ms"; on
            the ranks that came, that rank 0 failed, and why. Its `rank` is the first that was
            missing.

    Collective over the group; blocks until rank 0 has heard from all ranks.
    """
    resolved: Any = resolve_group(group)
    if timeout is None:
        resolved.monitored_barrier(wait_all_ranks=wait_all_ranks)
    elif isinstance(timeout, timedelta):
        resolved.monitored_barrier(timeout, wait_all_ranks)
    else:
        raise TypeError(f"timeout of monitored_barrier is a timedelta, got {timeout!r}")
