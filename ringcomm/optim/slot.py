"""One weight of an optimizer in the backward pass, and its gradient until it is used."""

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from ringcomm.backward_pass import BackwardPass, current_pass, in_backward
from ringcomm.optim.fused_layers import Handle
from ringcomm.optim.gradients import Gradient
from ringcomm.optim.options import StepOptions
from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder, weakly
from ringcomm.parallel.model.cut import Cut, Sharding
from ringcomm.torch_names import (
    accumulate_hooks_of,
    active_ddp,
    like_dtensor,
    params_of_ddp,
    tree_leaves,
    without_torch_function,
)

Groups = tuple[dist.ProcessGroup, ...]
_uses = itertools.count(1)
_grad: Any = Tensor.grad


class _UpdatedWeight(nn.Parameter):
    """The class of a weight between its update and the end of the backward pass.

    A checkpointed segment that reads it without a gradient would be recomputed with other values
    than in the forward pass, so reading its values inside a backward pass raises RuntimeError.
    """

    name_in_model = "a weight"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
        if not in_backward() or func == _grad.__get__:
            return result
        for found in tree_leaves(result):
            if isinstance(found, (Tensor, float)) and not isinstance(found, cls):
                weights = (each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
                raise RuntimeError(_read_after_update(next(weights).name_in_model))
        return result


def _read_after_update(name: str) -> str:
    return (
        f"{name} was read inside a backward pass that has updated it: a checkpointed segment that"
        " uses it without a gradient would be recomputed with the new values. Compute what needs it"
        ' outside of the segment, or keep gradients until step() with clip_mode="deferred" and'
        " clip_grad_norm="
    )


def running_functions() -> tuple[Any, Any]:
    """The contexts of the torch.autograd.Functions that run in this thread; None without one.

    That of the outermost forward, inside the innermost backward, and that of this backward. The
    Function of a reentrant checkpoint calls layers in its forward without gradients, and a nested
    backward pass in its backward, with the same context. torch does not say so.
    """
    forward, frame = None, inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        first = code.co_varnames[:1] if code.co_name in ("forward", "backward") else ()
        context = None if first in ((), ("self",)) else frame.f_locals.get(*first)
        if isinstance(context, FunctionCtx):
            if code.co_name == "backward":
                return forward, context
            forward = context
        frame = frame.f_back
    return forward, None


def roots_of_pass() -> list[Tensor]:
    """The tensors that torch.autograd.backward() was given in this thread; else none."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            return [*tree_leaves(frame.f_locals["tensors"])]
        frame = frame.f_back
    return []


class Slot:
    """One weight and its state in this step.

    Attributes:
        optimizer: its name, for messages.
        num_parts: gradients in a step, of its micro-batches.
        num_arrived: of these in this step so far; `total` is their sum.
        is_written: whether the weight has been updated in this step.
        deferred: its complete gradient, if that waits for step().
        arrived_in: the backward pass of the last gradient.
        first_use: the sequence number of its first use by a layer in this step; 0 if not used.
        first_runs: of reentrant checkpoints that use it, until they are recomputed or their graph
            is gone.
        has_plain_use: whether there is a use in the graph of the outer backward pass, too; until
            that gradient, or step().
        grad_dtype: the dtype in which gradients are accumulated, and reduced over ranks.
        cut: the weight's elements on this rank.
        sharding: the ranks with the others, for norms.
        peers: for a shard, the groups of the mesh whose ranks have gradients of the same weights.
        whole: the parameter for autograd's gradients, which differs with fully_shard.
        reducer: of its gradient over the ranks that share the weight: Replicas, or Alone.
        divisor: of the gradient after that. An expert's is a sum over the ranks of its layer.
        placeholder: in .grad from a gradient's arrival until forget().
    """

    def __init__(
        self,
        param: Any,
        name: str,
        index: int,
        group_idx: int,
        cut: Cut,
        optimizer: str,
        options: StepOptions,
    ) -> None:
        self.param, self.name, self.index, self.group_idx = param, name, index, group_idx
        self.optimizer, self.num_parts = optimizer, options.accumulation_steps
        self.cut = cut
        self.sharding = Sharding((), 1)
        self.reducer: Any = None
        self.divisor = 1
        self.peers: Groups = ()
        self.whole = param
        self.grad_dtype = torch.promote_types(param.dtype, options.reduce_dtype or torch.float32)
        self.handle: Handle | None = None
        self.hook_id = -1  # of the hook that reports gradients
        placeholder = GradientPlaceholder(
            local_of(param),
            f"{optimizer} takes the gradient of {name} inside the backward pass:"
            " torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler and DistributedDataParallel find"
            f" none. Use clip_grad_norm=, clip_grad_value=, loss_scale=, group= and zero_grad() of"
            f" {optimizer}; with Trainer and Accelerate call register() of"
            " ringcomm.integrations.transformers or .accelerate first",
            weakly(self._added),  # autograd keeps the placeholder
        )
        # fully_shard adds to the local part.
        self.placeholder: Tensor = (
            like_dtensor(param, placeholder) if isinstance(param, DTensor) else placeholder
        )
        self.first_runs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_plain_use = False
        self.forget()

    def forget(self) -> None:
        """Resets the slot for the next step."""
        self.show()
        self.num_arrived = self.first_use = 0
        self.arrived_in: BackwardPass | None = None
        self.is_written = self._is_spent = self._is_marked = self._is_new = False
        self.total: Tensor | None = None
        self._factors: Gradient | None = None  # instead, of a step's only gradient
        self.deferred: Gradient | None = None
        if self.param.grad is self.placeholder:
            self.param.grad = None
        if self.handle is not None:
            self.handle.forget()

    @property
    def local(self) -> Tensor:
        """This rank's part of the weight, which updates write."""
        with without_torch_function():
            return local_of(self.param).detach()

    def hide(self) -> None:
        """After an update in a backward pass: reading the weight there raises until show()."""
        kind: Any = type(self.param)
        if kind is nn.Parameter and in_backward():
            self.param.name_in_model = self.name
            self.param.__class__ = _UpdatedWeight

    def show(self) -> None:
        """Undoes hide()."""
        kind: Any = type(self.param)
        if kind is _UpdatedWeight:
            del self.param.name_in_model
            self.param.__class__ = nn.Parameter

    # ---- its gradient

    @property
    def has_grad(self) -> bool:
        """Whether there is a gradient that was not taken; collects `.grad` first."""
        self.collect()
        return self.total is not None

    def collect(self) -> bool:
        """Adds `.grad`, from autograd or the user, to `total`; returns whether there was any."""
        grad, is_new, self._is_new = self.param.grad, self._is_new, False
        if grad is None or grad is self.placeholder:
            return is_new
        self.param.grad = None
        self.add(local_of(grad.detach()))
        return True

    def add(self, grad: Tensor) -> None:
        """Adds a gradient to `total`. A single gradient keeps its dtype."""
        self.total = grad if self.total is None else self.total.to(self.grad_dtype).add_(grad)

    def _added(self, grad: Tensor) -> None:
        """Called by autograd, which would add to the placeholder."""
        self.refuse_second(self._is_spent)
        self.add(local_of(grad))
        self._is_new = True

    def refuse_second(self, is_complete: bool) -> None:
        """Raises RuntimeError for a gradient after the last of a step."""
        if is_complete:
            raise RuntimeError(
                f"{self.name} got a gradient after its update by {self.optimizer}: backward() ran"
                " again before step() (set accumulation_steps=N), or a reentrant checkpoint uses"
                " the weight without its layer (set use_reentrant=False)"
            )

    def note_arrival(
        self, factors: Gradient | None, check_step: Callable[[], None], *, is_nested: bool
    ) -> bool:
        """Adds what has arrived; returns whether that completes a gradient of the step's.

        It does not if nothing has arrived, or if this backward pass will bring more of it: a
        reentrant checkpoint (Chen et al. 2016, the first form of torch.utils.checkpoint) runs each
        segment without gradients, then again in a nested backward pass. The gradient of a weight
        therefore arrives once for each segment, and once for all uses outside of segments.

        Raises RuntimeError for a gradient after the last of a step, and what `check_step` raises.
        """
        self.see_dropped()
        is_new = self.collect()
        if factors is None and not is_new:
            return False  # a function has returned None, or the weight is frozen now
        if not is_nested:
            self.has_plain_use = False
        awaits_more = len(self.first_runs) > 0 or self.has_plain_use
        if not awaits_more:
            if not self._is_last_hook:
                raise RuntimeError(
                    f"a hook of {self.name} was registered after the forward pass of its layer, and"
                    " would run after the gradient is used: register it before"
                )
            check_step()
            self.refuse_second(self.is_complete)
            self.num_arrived += 1
            self.arrived_in = current_pass()
        is_last = not awaits_more and self.is_complete
        if is_last and self.total is None:
            self._factors = factors
        elif factors is not None:
            self.add(factors.dense())  # micro-batches, or uses that autograd sees
        if not is_last and not awaits_more:
            self.mark(is_spent=False)
        return not awaits_more

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the step have arrived."""
        return self.num_arrived == self.num_parts

    def take(self, *, is_spent: bool) -> Gradient | None:
        """Returns the sum of the gradients that have arrived, and clears it; None without one.

        After one that `is_spent`, RuntimeError is raised for another one, until forget().
        """
        self.collect()
        total, factors = self.total, self._factors
        self.total = self._factors = None
        if is_spent:
            self.mark(is_spent=True)
        return factors if total is None else Gradient(total)

    def mark(self, *, is_spent: bool) -> None:
        """Makes torch's clipping and similar functions raise until forget().

        Until it is spent, gradients of other micro-batches are added.
        """
        # Gradients of other DTensors may have other placements than the parameter.
        is_fully_shard = self.whole is not self.param
        if is_spent or is_fully_shard or not isinstance(self.param, DTensor):
            self.param.grad, self._is_spent, self._is_marked = self.placeholder, is_spent, True

    def see_dropped(self) -> None:
        """Drops micro-batches if the user has set `.grad` to None or to another gradient.

        Raises RuntimeError if the gradient is complete, so that it was used.
        """
        if not self._is_marked or self.param.grad is self.placeholder:
            return
        if self._is_spent:
            raise RuntimeError(
                f"{self.name}.grad was replaced or set to None between backward() and step(), but"
                " its gradient was used in the backward pass. Call step() before zero_grad() of the"
                " model; to leave a weight out, use requires_grad_(False) before the forward pass"
            )
        self.total, self.num_arrived, self._is_marked = None, 0, False

    # ---- its uses, each of which brings a gradient

    def is_used(self, module: nn.Module, _: Any) -> None:
        """The forward pre-hook of a layer that has the weight."""
        if torch.compiler.is_compiling():
            return
        if self.is_written and in_backward():
            raise RuntimeError(_read_after_update(self.name))
        if not self._is_last_hook:  # others must see the gradient first
            hooks = accumulate_hooks_of(self.param)
            hooks[self.hook_id] = hooks.pop(self.hook_id)
        ddp = active_ddp()
        if ddp is not None and any(self.param is param for param in params_of_ddp(ddp)):
            raise ValueError(
                f"DistributedDataParallel would reduce the gradient of {self.name} after an "
                "optimizer has applied it in the backward pass: call the model without it and "
                "give the optimizer group=; with Trainer and Accelerate call register() of "
                "ringcomm.integrations.transformers or .accelerate"
            )
        if not self.first_use:
            self.first_use = next(_uses)
        if torch.is_grad_enabled() and not in_backward():
            self.has_plain_use = True
        elif self.first_runs or not in_backward():
            forward, backward = running_functions()
            if backward is not None:
                self.first_runs.discard(backward)
            if forward is not None and not torch.is_grad_enabled():
                self.first_runs.add(forward)

    @property
    def _is_last_hook(self) -> bool:
        """Whether the hook that reports gradients runs after users'."""
        return next(reversed(accumulate_hooks_of(self.param))) == self.hook_id
