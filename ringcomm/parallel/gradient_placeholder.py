"""Hooks that pass gradients to an optimizer, and the placeholder that stays in `param.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

__all__ = ["GradientHooks", "GradientPlaceholder", "remove_hooks"]

_add: Any = torch.ops.aten.add_
_MESSAGE = (
    "param.grad of a weight that zero.shard() has sharded has no values; gradients are in the"
    " optimizer. Use optimizer.clip_grad_norm_() instead of torch.nn.utils.clip_grad_norm_, the"
    " option loss_scale= instead of torch.amp.GradScaler, and no DistributedDataParallel"
)


class GradientPlaceholder(Tensor):
    """A placeholder for a gradient; raises when an operator reads or writes it.

    Without it torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler, DistributedDataParallel and
    other optimizers over the same weights would find no gradient and silently do nothing. It has
    the parameter's shape, strides, dtype and device, and no memory.

    Args:
        param: the parameter whose `grad` it will be.
        message: the message of the RuntimeError.
        message_of_add: the message if another gradient is added; default: `message`.
    """

    message: str
    message_of_add: str

    # Attributes such as the shape can be read, as torch.compile does.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, param: Tensor, message: str, message_of_add: str | None = None
    ) -> GradientPlaceholder:
        """See the class."""
        make: Any = Tensor._make_wrapper_subclass
        made: GradientPlaceholder = make(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            storage_size=0,
        )
        made.message = message
        made.message_of_add = message if message_of_add is None else message_of_add
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises RuntimeError, always."""
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise RuntimeError(found.message_of_add if func.overloadpacket is _add else found.message)

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copy of the parameter has no gradient and no optimizer."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without values."""
        return f"GradientPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype})"


class GradientHooks:
    """Passes each gradient from autograd to `taker` and leaves a GradientPlaceholder.

    It calls taker.take_gradient(param, grad), which accumulates the gradient, and
    taker.drop_gradient(param) if the user has set `param.grad` to None or no gradient has arrived
    yet. The hooks live as long as the taker and refer to it weakly. Gradients of `late` parameters
    are ordinary until collect(), because other code adds to them after autograd.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        taker: Any,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        self._taker = weakref.ref(taker)
        self._late = list(late)
        self._placeholders = {p: GradientPlaceholder(p, _MESSAGE) for p in params if p not in late}
        # References are kept: autograd would otherwise make new nodes, without hooks, for the next
        # graph.
        self.nodes = {param: get_gradient_edge(param).node for param in self._placeholders}
        told = weakref.ref(self)
        handles: list[Any] = []
        for param, node in self.nodes.items():
            before = partial(_tell, told, GradientHooks.before, weakref.ref(param))
            after = partial(_tell, told, GradientHooks.after, weakref.ref(param))
            handles += [node.register_prehook(before)]
            handles += [param.register_post_accumulate_grad_hook(after)]
        weakref.finalize(self, remove_hooks, handles)

    def before(self, param: nn.Parameter) -> None:
        """Prepares `param.grad` for autograd, which adds to it."""
        if isinstance(param.grad, GradientPlaceholder):
            param.grad = None
        elif (taker := self._taker()) is not None:  # None or another gradient, by the user
            taker.drop_gradient(param)

    def after(self, param: nn.Parameter) -> None:
        """Takes the gradient that autograd has stored."""
        if (taker := self._taker()) is not None and param.grad is not None:
            with torch.no_grad():
                taker.take_gradient(param, param.grad)
            param.grad = self._placeholders[param]

    def collect(self) -> None:
        """Takes gradients that users have replaced, and drops those that they set to None."""
        for param in self._placeholders:
            if not isinstance(param.grad, GradientPlaceholder):
                self.before(param)
                self.after(param)
        taker = self._taker()
        for param in self._late:
            if taker is not None and param.grad is not None:
                taker.take_gradient(param, param.grad)
                param.grad = None


def _tell(told: Any, method: Any, of_param: Any, *_: Any) -> None:
    """A hook that keeps neither the GradientHooks nor the parameter alive."""
    hooks, param = told(), of_param()
    if hooks is not None and param is not None:
        method(hooks, param)


def remove_hooks(handles: list[Any]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()
