"""What would go past a sharded optimizer: DistributedDataParallel, and the given optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ringcomm.parallel.shards.unit_hooks import refuse_create_graph, tensors_in
from ringcomm.torch_names import active_ddp, at_end_of_backward, graph_task, untraced


def retire(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer that was given to zero.shard() raise before it writes anything."""
    optimizer.register_step_pre_hook(_refuse_use)  # a scheduler has replaced `step`
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(optimizer, name, _refuse_use)


def _refuse_use(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "this optimizer was given to zero.shard() and no longer has the weights: use the"
        " optimizer that zero.shard() returned"
    )


class ForwardGuard:
    """Raises if DistributedDataParallel runs the model; copies of the model do not have it."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        """A forward pre-hook."""
        if active_ddp() is not None and self._optimizer() is not None:
            raise RuntimeError(
                "the model was sharded by zero.shard() but runs in DistributedDataParallel,"
                " which would reduce gradients again: call the model itself. With Accelerate or"
                " Trainer, call prepare() of ringcomm.integrations"
            )

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    """The guard of a copy."""


class BackwardGuard:
    """Watches the backward passes through a model whose weights are freed after use.

    Attributes:
        failed: whether a pass has raised.
    """

    def __init__(self, model: nn.Module) -> None:
        self._running: set[int] = set()
        model.register_forward_hook(self._after_forward)

    @property
    def failed(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return bool(self._running)

    @untraced
    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._pass_begins)

    def _pass_begins(self, _: tuple[Tensor, ...]) -> None:
        refuse_create_graph("stage 3 of zero.shard()")
        task = graph_task()
        if task not in self._running:
            self._running.add(task)
            at_end_of_backward(lambda: self._running.discard(task))


def refuse_hooks(param: Any, name: str) -> None:
    """Raises ValueError for hooks of users that gradients at stage 3 do not pass."""
    if param._backward_hooks:
        raise ValueError(
            f"{name} has a hook of register_hook(), which stage 3 would never call, because"
            " gradients belong to gathered weights: remove it, or use stage 1 or 2"
        )
