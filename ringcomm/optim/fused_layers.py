"""Layers that hide their weight from autograd and deliver the factors of its gradient.

A fused layer's function takes a token in the weight's place: a scalar leaf that requires grad. Its
backward computes the input's gradient from the weight as it is, keeps (input, grad_out) in the
handle, and autograd runs the token's hook once everything that leads to the token has run. The hook
therefore sees all uses of the weight in this backward pass, and writes the weight after all reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.optim.gradients import Uses


class Handle:
    """Collects the uses of one weight; `deliver` gets all of a backward pass."""

    def __init__(self, module: nn.Module, deliver: Callable[[Uses], None]) -> None:
        self.module, self._deliver = module, deliver
        self._token: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Drops what has not been delivered: a backward pass that failed."""
        self._uses: Uses = []
        self.num_forwards = 0  # uses that may still deliver

    def token(self, device: torch.device) -> Tensor:
        """The leaf that replaces the weight, on the weight's current device."""
        if self._token is None or self._token.device != device:
            self._token = torch.zeros([], device=device, requires_grad=True)
            # Avoids a reference cycle: Python's garbage collector does not see a tensor's hooks.
            told = weakref.ref(self)

            def complete(token: Tensor) -> None:
                token.grad = None
                if (handle := told()) is not None:
                    uses, handle._uses = handle._uses, []
                    handle._deliver(uses)

            self._token.register_post_accumulate_grad_hook(complete)
        self.num_forwards += 1
        return self._token

    def keep(self, given: Tensor, grad_out: Tensor) -> Tensor:
        """Called by the backward of each use; returns the token's gradient, which is 0."""
        assert self._token is not None
        self._uses.append((given, grad_out))
        return self._token.detach()


_handles = WeakIdKeyDictionary()


def _handle_of(module: nn.Module, weight: Tensor) -> Handle | None:
    """The handle of a fused layer's weight, if this use is recorded by autograd."""
    if torch.compiler.is_compiling():  # it then has an ordinary gradient, for the parameter's hook
        return None
    handle: Handle | None = _handles.get(weight)
    if handle is None or not torch.is_grad_enabled() or not weight.requires_grad:
        return None
    if weight._backward_hooks:  # such as tensor.all_reduce_grad_(), which needs autograd's gradient
        return None
    if handle.module is not module:
        raise RuntimeError(
            f"the weight of shape {tuple(weight.shape)} was tied to another layer after the"
            " optimizer was made: tie weights before"
        )
    return handle


class _Fused(torch.autograd.Function):
    """A linear layer, or an embedding if `given` are indices, with the token as its weight."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, bias: Tensor | None, _: Tensor, weight: Tensor, handle: Handle
    ) -> Tensor:
        is_linear = given.is_floating_point()
        ctx.save_for_backward(given, weight if is_linear else None)
        ctx.handle = handle
        if not is_linear:
            return nn.functional.embedding(given, weight)
        return nn.functional.linear(given, weight.to(given.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        given, weight = ctx.saved_tensors
        rows = grad_out.reshape(-1, grad_out.shape[-1])
        if weight is None:
            return None, None, ctx.handle.keep(given.reshape(-1), rows), None, None
        grad_x = grad_out @ weight.to(grad_out.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[1] else None
        token_grad = ctx.handle.keep(given.reshape(-1, weight.shape[1]), rows)
        return grad_x, grad_bias, token_grad, None, None


class FusedLinear(nn.Linear):
    """nn.Linear while an optimizer consumes its weight's gradient; made by `fuse` alone."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        handle = _handle_of(self, self.weight)
        if handle is None:
            return super().forward(input)
        bias: Tensor | None = self.bias
        device = self.weight.device
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            input = input.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        elif input.dtype != self.weight.dtype:
            return super().forward(input)  # which says what is wrong
        token = handle.token(device)
        out: Tensor = _Fused.apply(input, bias, token, self.weight.detach(), handle)
        return out


class FusedEmbedding(nn.Embedding):
    """nn.Embedding while an optimizer consumes its weight's gradient; made by `fuse` alone."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Embedding."""
        handle = _handle_of(self, self.weight)
        if handle is None:
            return super().forward(input)
        token = handle.token(self.weight.device)
        rows: Tensor = _Fused.apply(input, None, token, self.weight.detach(), handle)
        return rows


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FusedLinear,
    nn.Embedding: FusedEmbedding,
}


def is_fusable(module: nn.Module, weight: nn.Parameter) -> bool:
    """Whether this is torch's own class with that weight, and no hook needs the gradient."""
    if type(module) not in _FUSED or module.weight is not weight or isinstance(weight, DTensor):
        return False
    return not isinstance(module, nn.Embedding) or (
        module.max_norm is None and not module.scale_grad_by_freq
    )


def fuse(module: nn.Module, deliver: Callable[[Uses], None]) -> Handle:
    """Sends a module's weight gradients to `deliver`; changes the class of the module."""
    handle = Handle(module, deliver)
    _handles[module.weight] = handle
    module.__class__ = _FUSED[type(module)]
    return handle


def unfuse(handle: Handle) -> None:
    """Undoes `fuse`."""
    module = handle.module
    module.__class__ = type(module).__mro__[1]
    _handles.pop(module.weight, None)
