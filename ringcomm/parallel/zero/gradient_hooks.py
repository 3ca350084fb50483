"""Hooks that take gradients out of `param.grad`, and what is there afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ringcomm.parallel.gradient_placeholder import GradientPlaceholder

_MESSAGE = (
    "param.grad of a weight that zero.shard() has sharded has no values; gradients are in the"
    " optimizer. Use optimizer.clip_grad_norm_() in place of torch.nn.utils.clip_grad_norm_, the"
    " option loss_scale= in place of torch.amp.GradScaler, optimizer.statistics() to look at"
    " gradients, and no DistributedDataParallel"
)


class GradientTaker(Protocol):
    """Who has the gradients in place of `param.grad`."""

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """A gradient to be added to what is there; called without autograd."""

    def drop_gradient(self, param: nn.Parameter) -> None:
        """The user has set `param.grad` to None, or nothing has come yet."""


class GradientHooks:
    """Gives each gradient to `taker` when autograd has made it, and leaves a GradientPlaceholder.

    The taker and the hooks live as long as the taker: they refer to it weakly. Gradients of `late`
    parameters are ordinary ones until collect(), since somebody adds to them behind autograd.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        taker: GradientTaker,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        self._taker = weakref.ref(taker)
        self._late = list(late)
        self._placeholders = {p: GradientPlaceholder(p, _MESSAGE) for p in params if p not in late}
        # They are kept, since autograd would make others, without hooks, for the next graph.
        self.nodes = {param: get_gradient_edge(param).node for param in self._placeholders}
        told = weakref.ref(self)
        handles: list[Any] = []
        for param, node in self.nodes.items():
            handles.append(node.register_prehook(_before(told, weakref.ref(param))))
            handles.append(param.register_post_accumulate_grad_hook(_after(told)))
        weakref.finalize(self, remove_hooks, handles)

    def before(self, param: nn.Parameter) -> None:
        """Makes `param.grad` ready for autograd to add to it."""
        if isinstance(param.grad, GradientPlaceholder):
            param.grad = None
        elif (taker := self._taker()) is not None:  # None or another gradient, by the user
            taker.drop_gradient(param)

    def after(self, param: nn.Parameter) -> None:
        """Takes what autograd has left."""
        if (taker := self._taker()) is not None and param.grad is not None:
            with torch.no_grad():
                taker.take_gradient(param, param.grad)
            param.grad = self._placeholders[param]

    def collect(self) -> None:
        """Takes what users have put in place of gradients, and drops what they set to None."""
        for param in self._placeholders:
            if not isinstance(param.grad, GradientPlaceholder):
                self.before(param)
                self.after(param)
        taker = self._taker()
        for param in self._late:
            if taker is not None and param.grad is not None:
                taker.take_gradient(param, param.grad)
                param.grad = None


def _before(
    told: weakref.ref[GradientHooks], of_param: weakref.ref[nn.Parameter]
) -> Callable[[Any], None]:
    def before(_: Any) -> None:
        hooks, param = told(), of_param()
        if hooks is not None and param is not None:
            hooks.before(param)

    return before


def _after(told: weakref.ref[GradientHooks]) -> Callable[[Tensor], None]:
    def arrived(param: Any) -> None:
        if (hooks := told()) is not None:
            hooks.after(param)

    return arrived


def remove_hooks(handles: list[Any]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()
