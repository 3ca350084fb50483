"""Makes torch functions raise that would treat a rank's part of a model as the whole model.

torch.nn.utils.clip_grad_norm_ counts the gradients that it is given, and torch.amp.GradScaler skips
the steps in which it finds an overflow in them. Ranks with different parts of one model would clip
by different factors and skip different steps, and replicated weights would diverge; so would those
of optimizers that need full weights, which are asked before their first step. States of optimizers
over parts of weights would be saved as full. No module is asked in these functions. The checks are
therefore installed when the first such module is made.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringcomm.parallel.optimizer_classes import params_in
from ringcomm.parallel.optimizer_kinds import needs_whole
from ringcomm.torch_names import TOTAL_NORM, UNSCALE, optimizer_state_dict, untraced

_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_needs_whole = functools.partial(
    needs_whole, is_copied=False, say="call ringcomm.parallel.declare_optimizers({})"
)
# Those that were asked, also by parallelize().
asked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def register_part(module: nn.Module) -> None:
    """Registers a module whose parameters are sharded over the ranks of its attribute `group`."""
    _modules.add(module)
    _check_torch()


@functools.cache
def _check_torch() -> None:
    """Installs the check around torch's functions, once per process."""
    _check(
        *TOTAL_NORM,  # of DTensors on two meshes it fails
        lambda grads, *_, **__: _params_with({*map(id, grads)}),
        "torch.nn.utils.clip_grad_norm_ counts only the gradients of this rank, which has a part"
        " of the model: use ringcomm.parallel.clip_grad_norm_(model, max_norm)",
    )
    _check(
        *UNSCALE,  # ShardedGradScaler, which synchronizes overflows, overrides it
        lambda _, optimizer, *__, **___: params_in(optimizer.param_groups),
        "torch.amp.GradScaler sees only the overflows of this rank, which has a part of the"
        " model, so ranks would skip different steps: use ShardedGradScaler of"
        " torch.distributed.fsdp.sharded_grad_scaler, the option loss_scale= of zero.shard() or"
        " Lomo, or bfloat16",
    )
    _check(
        *optimizer_state_dict(),  # its weights may be under full names, with this rank's state
        lambda model, *_, **__: [
            param
            for module in model.modules()
            if getattr(module, "splits", None)
            for param in module.parameters(recurse=False)
        ],
        "torch.distributed.checkpoint.state_dict would save this rank's part of the optimizer's"
        " state as all of it: use ringcomm.parallel.get_state_dict(model, optimizer)",
    )
    register_optimizer_step_pre_hook(_ask_class)


@untraced
def _ask_class(optimizer: Any, *_: Any) -> None:
    """Before an optimizer's first step: raises TypeError if it cannot take parts of a model."""
    if optimizer in asked or type(optimizer).__module__.startswith("ringcomm."):
        return
    given = {id(param) for param in params_in(optimizer.param_groups)}
    parts: Any = _parts_with(given)
    if parts and _needs_whole(optimizer):
        splits = (getattr(part, name) for part in parts for name in getattr(part, "splits", ()))
        if not given.isdisjoint(map(id, splits)):
            raise TypeError(
                f"{type(optimizer).__name__} needs full weights, and this rank has a part of the"
                " model, so that ranks would make different steps: use an optimizer that updates"
                " each element of a weight by itself, such as AdamW"
            )
    asked.add(optimizer)


def _params_with(grads: set[int]) -> list[Any]:
    params = {param for module in list(_modules) for param in module.parameters()}
    return [param for param in params if id(param.grad) in grads]


def _parts_with(params: set[int]) -> list[nn.Module]:
    """The modules of several ranks that have one of these parameters."""
    found = []
    for module in list(_modules):
        group = getattr(module, "group", None)  # None where its constructor has raised
        is_part = isinstance(group, dist.ProcessGroup) and group.size() > 1
        if is_part and not params.isdisjoint(map(id, module.parameters())):
            found.append(module)
    return found


def _check(owner: Any, name: str, params_of: Callable[..., list[Any]], message: str) -> None:
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _parts_with({id(param) for param in params_of(*args, **kwargs)}):
            raise RuntimeError(message)
        return wrapped(*args, **kwargs)

    setattr(owner, name, checked)
