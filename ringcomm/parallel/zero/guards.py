"""What would go past a sharded optimizer: DistributedDataParallel, and the given optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.parallel.shards.unit_hooks import refuse_create_graph, tensors_in
from ringcomm.torch_names import active_ddp, at_end_of_backward, graph_task, untraced

# Keyed weakly by parameter: a weak reference to the optimizer that has sharded it.
_optimizers: Any = WeakIdKeyDictionary()

# Of a weight with hooks of users that gradients at stage 3 do not pass.
HOOK_AT_STAGE_3 = (
    "has a hook of register_hook(), which stage 3 would never call, because gradients belong to"
    " gathered weights: remove it, or use stage 1 or 2"
)


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


def mark_sharded(params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Makes is_sharded() true as long as the optimizer exists."""
    _optimizers.update(dict.fromkeys(params, weakref.ref(optimizer)))


def is_sharded(param: nn.Parameter) -> bool:
    """Whether an optimizer of zero.shard() has the parameter."""
    return param in _optimizers and _optimizers[param]() is not None


def refuse_ddp(model: nn.Module, *_: Any) -> None:
    """A forward pre-hook; raises if DistributedDataParallel runs the model, but not its copies."""
    if active_ddp() is not None and any(map(is_sharded, model.parameters())):
        raise RuntimeError(
            "the model was sharded by zero.shard() but runs in DistributedDataParallel,"
            " which would reduce gradients again: call the model itself. With Accelerate or"
            " Trainer, call prepare() of ringcomm.integrations"
        )


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
