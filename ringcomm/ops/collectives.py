"""Wrappers, fakes and gradients of csrc/bindings/collective_ops.cc.

A call that fails leaves its input unchanged, and returns no result; `out` may then hold any values.

Gradients are adjoints of the sum of the ranks' losses, as in torch.distributed.nn. all_reduce(sum)
is therefore its own adjoint; all_gather and reduce_scatter(sum) are each other's adjoints, and so
are broadcast and reduce.

Some operators have no wrapper and take the group's name, in torch.ops.ringcomm: broadcast(tensor,
src, name), reduce(tensor, dst, reduce_op, name), which is zeros on other ranks than dst, those that
write their input, all_reduce_ and broadcast_, and the explicit ring, ring_all_reduce_.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import _C
from ringcomm.backend import resolve_group
from ringcomm.torch_names import check_shapes, group_named, keep_calls_in_order

_ops: Any = torch.ops.ringcomm


# ---- wrappers


def _call(name: str, tensor: Tensor, *options: Any) -> Tensor:
    """Without torch's dispatcher where that would only run the kernel for CPUs."""
    result = None
    if not torch.compiler.is_compiling():
        result = getattr(_C.eager, name)(tensor, *options)
    return getattr(_ops, name)(tensor, *options) if result is None else result


def all_reduce(
    tensor: Tensor,
    reduce_op: str = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Reduces the ranks' tensors into a new tensor or `out`; `tensor` is unchanged.

    Args:
        tensor: any shape, the same on all ranks; bool, integer or floating.
        reduce_op: sum, avg, product, min, max, band, bor or bxor.
        group: None for the default group.
        out: a tensor for the result, of the shape and dtype of `tensor`, which then must not
            require grad; it may be `tensor` itself.

    Returns:
        The reduction: a new tensor, or `out`.

    Raises:
        ValueError: a tensor is not dense, `out` has another shape or requires grad, or the
            reduction is unknown or not defined for the dtype.
        TypeError: the dtype cannot be reduced, or `out` has another dtype.
        RingcommError: a rank failed or called something else. `tensor` is unchanged, and `out`
            may hold any values.

    Collective; blocks until the result is available. Differentiable for sum and avg; the backward
    pass of another reduction raises NotImplementedError.
    """
    if not torch.compiler.is_compiling():
        given = dist.group.WORLD if group is None else group
        if (result := _C.eager.all_reduce(tensor, reduce_op, given, out)) is not None:
            return result
    name = resolve_group(group).group_name
    if out is not None:
        _ops.all_reduce_into(tensor, out, reduce_op, name)
        return out
    return _ops.all_reduce(tensor, reduce_op, name)


def reduce_scatter(
    tensor: Tensor, reduce_op: str = "sum", group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns this rank's part of the reduction; arguments and errors as for all_reduce.

    Returns:
        A new tensor of shape (d, ...), for tensors of shape (N * d, ...) on N ranks: rows [rank *
        d, (rank + 1) * d) of the reduction. Raises ValueError if N does not divide the rows.

    Collective; blocks until the result is available. Differentiable for sum and avg.
    """
    return _call("reduce_scatter", tensor, reduce_op, resolve_group(group).group_name)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenates the ranks' tensors along the first dimension, in rank order, as a new tensor.

    Tensors have the same shape (d, ...) on all ranks and any dtype; a scalar raises ValueError.
    Collective; blocks until the result is available. Differentiable.
    """
    return _call("all_gather", tensor, resolve_group(group).group_name)


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

    Sums and the norm are computed in float32. `total`, `residual` and `input` are each rounded
    once. If `residual` and `weight` are equal on all ranks, so are the bits of the results.

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


# ---- fakes


def _world_size(group_name: str) -> int:
    return group_named(group_name).size()


for _name in ("all_reduce", "broadcast", "reduce"):
    torch.library.register_fake(f"ringcomm::{_name}", lambda x, *_: x.new_empty(x.shape))
for _name in ("all_reduce_", "broadcast_", "ring_all_reduce_"):
    torch.library.register_fake(f"ringcomm::{_name}", lambda *_: None)


@torch.library.register_fake("ringcomm::all_reduce_into")
def _(input: Tensor, out: Tensor, reduce_op: str, group_name: str) -> None:
    for what in ("device", "dtype", "shape"):
        ours, theirs = getattr(input, what), getattr(out, what)
        check_shapes(ours == theirs, lambda: f"all_reduce: {what} {ours} into {theirs}")  # noqa: B023


@torch.library.register_fake("ringcomm::reduce_scatter")
def _(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    world_size = _world_size(group_name)
    check_shapes(input.dim() > 0 and input.size(0) % world_size == 0)
    return input.new_empty([input.size(0) // world_size, *input.shape[1:]])


@torch.library.register_fake("ringcomm::all_gather")
def _(input: Tensor, group_name: str) -> Tensor:
    check_shapes(input.dim() > 0)
    return input.new_empty([input.size(0) * _world_size(group_name), *input.shape[1:]])


@torch.library.register_fake("ringcomm::all_reduce_add_rms_norm_")
def _(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> None:
    check_shapes(input.dim() > 0 and input.shape == residual.shape)
    check_shapes(weight.shape == input.shape[-1:])


# ---- order

# Ranks make the same calls in the same order, also where one of them does not use a result.
for _name in ("all_gather", "all_reduce", "broadcast", "merge_softmax_stats", "reduce"):
    keep_calls_in_order(f"ringcomm::{_name}")
keep_calls_in_order("ringcomm::reduce_scatter")

# ---- gradients


def _adjoint_of_reduce_scatter(grad: Tensor, reduce_op: str, group_name: str) -> Tensor:
    gathered = _ops.all_gather(grad, group_name)
    return gathered / _world_size(group_name) if reduce_op == "avg" else gathered


def _register_adjoint(name: str, adjoint: Callable[..., Tensor], *reductions: str) -> None:
    """The adjoint of the gradient and the operator's arguments after its tensor.

    `reductions` are those that have a gradient, if the operator takes one.
    """

    def save_options(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.options = inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if reductions and ctx.options[-2] not in reductions:
            raise NotImplementedError(
                f"{name} with reduce_op={ctx.options[-2]!r} has no gradient; use"
                f" {' or '.join(reductions)}"
            )
        return adjoint(grad, *ctx.options), *[None] * len(ctx.options)

    torch.library.register_autograd(f"ringcomm::{name}", backward, setup_context=save_options)


_register_adjoint("all_reduce", _ops.all_reduce, "sum", "avg")
_register_adjoint("reduce_scatter", _adjoint_of_reduce_scatter, "sum", "avg")
_register_adjoint("all_gather", lambda grad, name: _ops.reduce_scatter(grad, "sum", name))
_register_adjoint("broadcast", lambda grad, src, name: _ops.reduce(grad, src, "sum", name))
_register_adjoint("reduce", lambda grad, dst, _, name: _ops.broadcast(grad, dst, name), "sum")

# Fixed overloads, because the selection of an overload takes several microseconds per call.
_all_reduce, _all_reduce_ = _ops.all_reduce.default, _ops.all_reduce_.default


def summed(x: Tensor, group_name: str, inplace: bool) -> Tensor:
    """The sum over the ranks; `inplace` overwrites `x` if it is contiguous. Collective."""
    if inplace and x.is_contiguous():
        _all_reduce_(x, "sum", group_name)
        return x
    return _all_reduce(x, "sum", group_name)


class SumOneWay(torch.autograd.Function):
    """The sum over the ranks in one direction, and the identity in the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, is_forward: bool, inplace: bool) -> Tensor:
        """The sum, or a copy: autograd refuses to modify a view of a custom function in place."""
        ctx.group_name, ctx.is_forward, ctx.inplace = group_name, is_forward, inplace
        if not is_forward:
            return x.clone()
        result = summed(x, group_name, inplace)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The identity, or the sum."""
        (grad,) = grads
        if torch.is_grad_enabled():
            grad = SumOneWay.apply(grad, ctx.group_name, not ctx.is_forward, False)
        elif not ctx.is_forward:
            grad = summed(grad, ctx.group_name, ctx.inplace)
        return grad, None, None, None
