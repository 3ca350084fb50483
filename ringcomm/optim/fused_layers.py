"""Layers that keep the factors of their weight's gradient instead of the gradient.

The backward of a fused layer's function computes the input's gradient, keeps (input, grad_out) in
the handle, and returns None for the weight. Autograd runs a leaf's post-accumulate hooks when all
nodes that lead to it have run, even if all of them returned None. The weight's hook therefore sees
all uses in this backward pass, and writes the weight after all reads.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.backward_pass import BackwardPass, current_pass, will_run
from ringcomm.optim.gradients import EmbeddingGradient, Gradient, LinearGradient
from ringcomm.torch_names import accumulate_hooks_of, backward_hooks_of, base_of, in_transform


class Handle:
    """Collects the uses of one weight in backward passes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._uses: dict[BackwardPass | None, list[Gradient]] = {}

    def forget(self) -> None:
        """Drops the uses of a backward pass that failed."""
        self._uses.clear()

    def keep(self, node: Any, given: Tensor, grad_out: Tensor) -> Tensor | None:
        """Called by the backward of each use; returns the gradient if autograd must have it.

        `node` accumulates the weight's gradient. It does not run if the pass is for gradients of
        other tensors only.
        """
        weight: Any = self.module.weight
        try:
            if not (will_run(node) and weight.requires_grad):
                return None
        except RuntimeError:  # of torch.autograd.grad(), for the weight
            return self._gradient(given, grad_out).dense()
        # With create_graph, hooks of users, or an optimizer that was closed since.
        num_late = len(accumulate_hooks_of(weight) or ())
        if torch.is_grad_enabled() or backward_hooks_of(weight) or num_late != 1:
            return self._gradient(given, grad_out).dense()
        base = base_of(given)
        root = given if base is None else base
        if root.grad_fn is None:  # the user's own buffer, or a weight: it may be written any time
            given = given.clone()
        self._uses.setdefault(current_pass(), []).append(self._gradient(given, grad_out))
        return None

    def take_factors(self, name: str) -> Gradient | None:
        """The sum of the uses in this backward pass; None without one. `name` is the weight's.

        Raises RuntimeError if their tensors were modified in place.
        """
        uses = self._uses.pop(current_pass(), [])
        for use in uses:
            use.check_unmodified(name)
        if len(uses) > 1:
            return self._gradient(*map(torch.cat, zip(*(use.parts for use in uses), strict=True)))
        return uses[0] if uses else None

    def _gradient(self, given: Tensor, grad_out: Tensor) -> Gradient:
        module: Any = self.module
        if given.is_floating_point():
            return LinearGradient(given, grad_out, module.weight.dtype)
        padding_idx = -1 if module.padding_idx is None else module.padding_idx
        return EmbeddingGradient(given, grad_out, module.weight, padding_idx)


_handles = WeakIdKeyDictionary()


def _handle_of(module: nn.Module, weight: Tensor, given: Tensor) -> Handle | None:
    """The handle of a fused layer's weight, if this use is recorded by autograd."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_transform():
        return None  # an ordinary gradient, as of nested and sparse inputs
    if given.layout != torch.strided or given.is_nested:
        return None
    handle: Handle | None = _handles.get(weight)
    if handle is None or not torch.is_grad_enabled() or not weight.requires_grad:
        return None
    if not weight.is_contiguous():  # the updates by factors are for rows in memory
        return None
    return handle if handle.module is module else None  # not for a layer tied to it later


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


class _Fused(torch.autograd.Function):
    """A linear layer, or an embedding if `given` are indices."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, given: Tensor, bias: Tensor | None, handle: Handle
    ) -> Tensor:
        is_linear = given.is_floating_point()
        ctx.save_for_backward(given, weight if is_linear else None)
        ctx.handle = handle
        if is_linear:
            out = nn.functional.linear(given, weight.to(given.dtype), bias)
        else:
            out = nn.functional.embedding(given, weight)
        # A view as a tensor of its own, which users may modify in place.
        if base_of(out) is None:
            return out
        memory = out.untyped_storage()
        return out.new_empty(0).set_(memory, out.storage_offset(), out.shape, out.stride())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        given, weight = ctx.saved_tensors
        (node, _), *_ = ctx.next_functions
        rows = _rows_of(grad_out)
        if weight is None:
            return ctx.handle.keep(node, given.reshape(-1), rows), None, None, None
        grad_x = grad_out @ weight.to(grad_out.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        grad = ctx.handle.keep(node, _rows_of(given), rows)
        return grad, grad_x, grad_bias, None


class FusedLinear(nn.Linear):
    """nn.Linear while an optimizer consumes its weight's gradient; made by `fuse` alone."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        handle = _handle_of(self, self.weight, input)
        if handle is None:
            return super().forward(input)
        bias: Tensor | None = self.bias
        device = self.weight.device.type
        if not input.is_floating_point() or input.dtype == torch.float64:  # not cast by autocast
            return super().forward(input)
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input = input.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        elif input.dtype != self.weight.dtype:
            return super().forward(input)  # which says what is wrong
        return _Fused.apply(self.weight, input, bias, handle)


class FusedEmbedding(nn.Embedding):
    """nn.Embedding while an optimizer consumes its weight's gradient; made by `fuse` alone."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Embedding."""
        handle = _handle_of(self, self.weight, input)
        if handle is None:
            return super().forward(input)
        return _Fused.apply(self.weight, input, None, handle)


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FusedLinear,
    nn.Embedding: FusedEmbedding,
}


def is_fusable(module: nn.Module, weight: nn.Parameter) -> bool:
    """Whether this is torch's own class with that weight, in a form that can be fused."""
    if type(module) not in _FUSED or module.weight is not weight or isinstance(weight, DTensor):
        return False
    if weight.dtype == torch.float64:  # the updates by factors compute in float32
        return False
    return not isinstance(module, nn.Embedding) or (
        module.max_norm is None and not module.scale_grad_by_freq
    )


def fuse(module: nn.Module) -> Handle:
    """Makes a module keep the uses of its weight; changes the class of the module."""
    handle = Handle(module)
    _handles[module.weight] = handle
    module.__class__ = _FUSED[type(module)]
    return handle


def unfuse(handle: Handle) -> None:
    """Undoes `fuse`."""
    module = handle.module
    module.__class__ = plain_class(module)
    _handles.pop(module.weight, None)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without `fuse`."""
    kind = type(module)
    return next((plain for plain, fused in _FUSED.items() if kind is fused), kind)
