"""Gathers the weights of a unit for its forward and backward pass.

A forward gathers the weights and frees them afterwards, but not within a backward, where
checkpointing runs the forward again right before the gradients. A backward enters through the
unit's outputs. It has left when the gradients of the inputs are complete and those of the
parameters have arrived. Both are needed: frozen weights have no gradient, and some weights compute
other weights.
"""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringcomm import torch_names
from ringcomm.backward_pass import BackwardPass, OpenPasses, current_pass, in_backward, will_run
from ringcomm.parallel.gradient_placeholder import weakly
from ringcomm.parallel.model.saving import refuse_copy
from ringcomm.parallel.model.units import refuse_create_graph, tensors_in, with_own_memory
from ringcomm.parallel.offload.sharded_unit import ShardedUnit
from ringcomm.torch_names import tree_map_only, untraced

# Containers that a module may change in place.
_CHANGEABLE = (list, dict)


@untraced
def refuse_compile(model: nn.Module | None = None) -> None:
    """Compiled code would keep freed weights for its backward pass, and read freed memory.

    Raises RuntimeError if the caller runs under torch.compile, or a part of the model is compiled.
    """
    parts = () if model is None else model.modules()
    if torch_names.is_traced() or any(map(torch_names.is_compiled, parts)):
        raise RuntimeError(
            "torch.compile is not supported with offload_weights=True, which frees weights between"
            " uses: train without torch.compile, or use zero.shard(stage=3) without it"
        )


@dataclasses.dataclass(eq=False)
class _Use:
    """One forward of a unit."""

    num_inputs: int = 0  # that require grad
    last_pass: BackwardPass | None = None  # the last backward pass that came through


class UnitHooks:
    """Gathers and frees a unit's weights as forward and backward go through its module.

    Args:
        unit: the unit whose weights are gathered.
        is_root: whether other units run within it. Its weights then stay until the backward pass
            ends, because a gradient may arrive before the last use of its weight (a nested backward
            pass adds its own part).
    """

    def __init__(self, unit: ShardedUnit, *, is_root: bool) -> None:
        self.unit = unit
        self._is_root = is_root
        self._params = set(unit.params)
        self._running: list[_Use] = []
        self._watched: set[nn.Parameter] = set()
        self._passes: OpenPasses[None] = OpenPasses()
        self.forget_backward()
        module = unit.module
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]
        for part in module.modules():
            has_weights = not self._params.isdisjoint(part.parameters(recurse=False))
            if has_weights and part is not module:
                self._handles += [
                    part.register_forward_pre_hook(self._check_full, prepend=True),
                    part.register_forward_hook(self._watch_part),
                ]

    # A copy of the model copies its modules' hooks.
    __deepcopy__ = __reduce_ex__ = refuse_copy

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()

    # ---- forward

    @untraced
    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        refuse_compile()
        is_first = not self._running
        use = _Use()
        self._running.append(use)
        if in_backward():
            self._gather_in_backward()
        else:
            if is_first:  # the state of a failed backward pass is stale
                self.forget_backward()
                self.unit.free()
            self.unit.gather()
        if not torch.is_grad_enabled():
            return None
        use.num_inputs = sum(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        kinds, watched = (Tensor, *_CHANGEABLE), partial(self._watched_input, use)
        args = tree_map_only(kinds, watched, args, is_leaf=_is_changeable)
        values = tree_map_only(kinds, watched, (*kwargs.values(),), is_leaf=_is_changeable)
        return args, dict(zip(kwargs, values, strict=True))

    def _watched_input(self, use: _Use, value: Any) -> Any:
        """An alias of a tensor: its gradient is complete when this unit's part is.

        Lists and dicts remain, because the caller may see what the module does to them.
        """
        left = partial(self._backward_left, use)
        if _is_changeable(value):
            for tensor in tensors_in(value):
                if tensor.grad_fn is not None:  # else the unit waits for the end of the backward
                    tensor.register_hook(left)
            return value
        if not value.requires_grad or value.layout != torch.strided:
            return value
        view = value.view_as(value)
        view.register_hook(left)
        return view

    @untraced
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Also called after a failed forward, without an output."""
        use = self._running.pop() if self._running else _Use()
        output = with_own_memory(output, self.unit.params)
        if torch.is_grad_enabled():
            self._watch_params()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._backward_comes, use))
        if not in_backward() and not self._running:
            self.unit.free()
        return output

    @untraced
    def _watch_part(self, module: nn.Module, args: Any, output: Any) -> None:
        """A loss may begin at a tensor that the unit does not return, such as a kept activation."""
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(self._gather_in_backward)

    def _watch_params(self) -> None:
        for param in self._params - self._watched:
            if param.requires_grad:
                self._watched.add(param)
                arrived = weakly(self.grad_arrived)
                self._handles.append(param.register_post_accumulate_grad_hook(arrived))

    @untraced
    def _check_full(self, module: nn.Module, args: Any) -> None:
        refuse_compile()
        if self.unit.is_full:
            return
        if not in_backward():
            raise RuntimeError(
                f"the weights of this {type(module).__name__} are freed: call the whole model"
            )
        self._gather_in_backward()

    def forget_forward(self) -> None:
        """As if no forward were in progress."""
        self._running.clear()

    # ---- backward

    def forget_backward(self) -> None:
        """As before any backward."""
        self._passes.forget()
        self._num_inputs = 0  # of the uses that the backward has reached, and not left
        self._missing: set[Tensor] | None = None  # without gradient; None before any use

    def _gather_in_backward(self, _: Tensor | None = None) -> None:
        self._passes.enter(self._pass_ends)
        self.unit.gather()

    def _backward_comes(self, use: _Use, grad: Tensor) -> None:
        current = current_pass()
        if use.last_pass == current:
            return  # through another output
        use.last_pass = current
        self._gather_in_backward()
        self._num_inputs += use.num_inputs
        if self._missing is None:
            # Without inputs, the backward has left when all parameters have gradients.
            self._missing = {
                param
                for param in self._params
                if param.requires_grad and (use.num_inputs == 0 or _may_get_grad(param))
            }

    def _backward_left(self, use: _Use, grad: Tensor) -> None:
        refuse_create_graph("offload_weights=True")
        if use.last_pass == current_pass():
            self._num_inputs -= 1
            self._free_if_done()

    def grad_arrived(self, param: Tensor) -> None:
        """The parameter's gradient has arrived: nothing earlier in the graph needs the weight."""
        if self._missing is not None:
            self._missing.discard(param)
            self._free_if_done()

    def _free_if_done(self) -> None:
        if not self._missing and self._num_inputs == 0 and not self._is_root:
            self._missing = None
            self.unit.free()

    def _pass_ends(self, _: None) -> None:
        """Frees weights without a gradient; a nested backward pass leaves this to the outer one."""
        if not self._passes:
            self.forget_backward()
            self.unit.free()


def _is_changeable(value: Any) -> bool:
    return isinstance(value, _CHANGEABLE)


def _may_get_grad(param: nn.Parameter) -> bool:
    """Whether the current backward computes the parameter's gradient; True if unknown."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return will_run(node)
    except RuntimeError:  # torch.autograd.grad() of the parameter
        return True
