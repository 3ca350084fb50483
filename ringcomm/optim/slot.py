"""One weight of an optimizer in the backward pass: its gradient, until it is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.optim.fused_layers import Handle
from ringcomm.optim.gradients import Gradient
from ringcomm.optim.layouts import Layout, Split, layout_of, local_tensor
from ringcomm.optim.step_facts import Groups
from ringcomm.parallel import find_shards
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder, GradientSum

_NO_BACKWARD = -1  # torch's id of no graph task
_uses = itertools.count(1)


class Slot:
    """One weight, and where it stands in this step.

    Attributes:
        num_arrived: how many of its gradients have come in this step.
        arrived_in: the backward pass that brought the last one, by torch's number.
        autograd_in: of a fused layer's weight, the last pass that brought one past the layer.
        first_use: when a layer first used it in this step, a running number; 0 for not seen.
        grad_dtype: what several gradients are added up in, and reduced in over ranks.
        peers: of a shard, the groups of the mesh whose ranks have the others.
        whole: of fully_shard, the parameter that computes, once its unit has run.
        spent: what .grad is between the use of the gradient and forget().
    """

    def __init__(
        self,
        param: nn.Parameter,
        name: str,
        index: int,
        group_idx: int,
        split: Split | None,
        optimizer: str,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.param, self.name, self.index, self.group_idx = param, name, index, group_idx
        self.shards = find_shards(param)
        self.peers: Groups = () if self.shards is None else (self.shards.group,)
        self.whole: nn.Parameter | None = None
        self.layout: Layout = layout_of(param, split)
        self.grad_dtype = torch.promote_types(param.dtype, reduce_dtype or torch.float32)
        self.handle: Handle | None = None
        self.num_arrived = self.first_use = 0
        self.held: Gradient | None = None
        self.num_unseen_uses = 0
        self.arrived_in = self.autograd_in = self._made_in = _NO_BACKWARD
        self.spent = _placeholder(param, name, optimizer)
        self._node: Any = None
        self._node_is_for: Any = None

    @property
    def local(self) -> Tensor:
        """What this rank holds of the weight."""
        return local_tensor(self.param, self.shards)

    @property
    def has_grad(self) -> bool:
        """Whether autograd has left a gradient that nobody has taken."""
        grad = self.param.grad
        return grad is not None and grad is not self.spent

    def mark_spent(self) -> None:
        """Has torch's clipping and the like raise until forget()."""
        self.param.grad = self.spent

    def take_grad(self) -> Tensor:
        """The gradient that autograd has left, which is then gone."""
        grad, self.param.grad = self.param.grad, None
        assert grad is not None
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        return local.total if isinstance(local, GradientSum) else local

    def add_grad(self, grad: Tensor) -> None:
        """Adds one to what autograd has left; more are to come."""
        self.await_more_grads()
        if self.has_grad:
            assert self.param.grad is not None
            self.param.grad.add_(grad)
        else:
            self.param.grad = grad
            self.await_more_grads()

    def await_more_grads(self) -> None:
        """Has the gradients to come added in `grad_dtype`, by whoever adds them to `.grad`."""
        grad: Any = self.param.grad
        if not self.has_grad or grad.dtype == self.grad_dtype:
            return
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if isinstance(local, GradientSum):
            return
        total = GradientSum(local, self.spent.message, self.grad_dtype)
        if isinstance(grad, DTensor):
            make: Any = DTensor  # from_local() would make a view of it
            self.param.grad = make(total, grad._spec, requires_grad=False)
        else:
            self.param.grad = total

    def is_used(self, module: nn.Module, _: Any) -> None:
        """The hook before a forward pass of a layer that has the weight."""
        if torch.compiler.is_compiling():
            return
        if DistributedDataParallel._get_active_ddp_module() is not None:
            refuse_ddp([self])
        if not self.first_use:
            self.first_use = next(_uses)
        if torch.is_grad_enabled():
            self._made_in = torch._C._current_graph_task_id()
        elif module.training:
            self.num_unseen_uses += 1

    @property
    def is_nested(self) -> bool:
        """Whether the gradient that arrives now is one of a reentrant checkpoint's own pass."""
        return self._made_in not in (_NO_BACKWARD, torch._C._current_graph_task_id())

    def compute_as(self, whole: nn.Parameter) -> None:
        """Autograd brings gradients to this parameter, which fully_shard reduces."""
        self.whole, self._node_is_for = whole, None

    def will_come(self, task: int) -> bool:
        """Whether a backward pass, by torch's number, will still bring a gradient of the weight."""
        return self.num_unseen_uses > 0 or (self.arrived_in != task and self.autograd_will_bring())

    def autograd_will_bring(self) -> bool:
        """Whether the backward pass that runs now brings a gradient to the parameter itself."""
        param = self.param if self.whole is None else self.whole
        if not param.requires_grad:
            return False
        current = param.dtype, param.device  # a weight that moves gets a new node
        if self._node_is_for != current:
            self._node = torch.autograd.graph.get_gradient_edge(param).node
            self._node_is_for = current
        return bool(torch._C._will_engine_execute_node(self._node))

    def awaits_more(self) -> bool:
        """Called as a gradient arrives: whether this backward pass will bring more of it.

        A reentrant checkpoint (Chen et al. 2016, as torch.utils.checkpoint had it first) runs each
        segment without gradients, then again in a backward pass of its own inside the outer one.
        So a weight of several segments arrives several times: as often as it was used unseen.
        """
        if self._made_in == _NO_BACKWARD or self._made_in == torch._C._current_graph_task_id():
            return False
        self.num_unseen_uses -= 1
        return self.num_unseen_uses > 0

    def forget(self) -> None:
        """Ready for the next step."""
        self.num_arrived = self.num_unseen_uses = self.first_use = 0
        self.arrived_in = self.autograd_in = self._made_in = _NO_BACKWARD
        self.held = None
        if self.param.grad is self.spent:
            self.param.grad = None
        if self.handle is not None:
            self.handle.forget()


def _placeholder(param: nn.Parameter, name: str, optimizer: str) -> GradientPlaceholder:
    return GradientPlaceholder(
        param,
        f"{optimizer} takes the gradient of {name} inside the backward pass:"
        " torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler and DistributedDataParallel find"
        f" none. Use clip_grad_norm=, clip_grad_value=, loss_scale= and group= of {optimizer}; with"
        " Trainer and Accelerate call prepare() of ringcomm.integrations.transformers or"
        " .accelerate first",
        f"{name} got a gradient after its update: backward() ran again before step() (say"
        " accumulation_steps), or a weight is used in several segments of a reentrant checkpoint"
        " (use_reentrant=False)",
    )


def refuse_ddp(slots: Iterable[Slot]) -> None:
    """Raises ValueError inside a forward pass of a DistributedDataParallel that has a weight."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return
    theirs = set(ddp._module_parameters)
    for slot in slots:
        if slot.param in theirs:
            raise ValueError(
                f"DistributedDataParallel reduces the gradient of {slot.name}, which an optimizer"
                " in the backward pass uses before: call the model without it and give the"
                " optimizer group=; with Trainer and Accelerate call prepare() of"
                " ringcomm.integrations.transformers or .accelerate"
            )
