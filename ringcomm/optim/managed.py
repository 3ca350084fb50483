"""The weights of an optimizer in the backward pass: which they are, and the hooks on them."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.optim.fused_layers import Handle, Uses, fuse, is_fusable, unfuse
from ringcomm.optim.gradients import Gradient
from ringcomm.optim.layouts import Layout, Split, layout_of, local_tensor
from ringcomm.parallel import find_shards
from ringcomm.parallel.expert.local_experts import refuse_experts
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder
from ringcomm.parallel.model_axes import axes_of, tied_over_stages
from ringcomm.parallel.tensor.splits import refuse_decisions, split_params

_NO_BACKWARD = -1  # torch's id of no graph task
_uses = itertools.count(1)


class Slot:
    """One weight, and where it stands in this step.

    Attributes:
        num_arrived: how many of its gradients have come in this step.
        arrived_in: the backward pass that brought the last one, by torch's number.
        autograd_in: of a fused layer's weight, the last pass that brought one past the layer.
        first_use: when a layer first used it in this step, a running number; 0 for not seen.
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
    ) -> None:
        self.param, self.name, self.index, self.group_idx = param, name, index, group_idx
        self.shards = find_shards(param)
        self.layout: Layout = layout_of(param, split)
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
        return grad.to_local() if isinstance(grad, DTensor) else grad

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

    def will_come(self, task: int) -> bool:
        """Whether a backward pass, by torch's number, will still bring a gradient of the weight."""
        return self.num_unseen_uses > 0 or (self.arrived_in != task and self.autograd_will_bring())

    def autograd_will_bring(self) -> bool:
        """Whether the backward pass that runs now brings a gradient to the parameter itself."""
        if not self.param.requires_grad:
            return False
        current = self.param.dtype, self.param.device  # a weight that moves gets a new node
        if self._node_is_for != current:
            self._node = torch.autograd.graph.get_gradient_edge(self.param).node
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
        f"{optimizer} has used the gradient of {name} inside the backward pass:"
        " torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler and DistributedDataParallel find"
        f" none. Use clip_grad_norm=, clip_grad_value=, loss_scale= and group= of {optimizer}; with"
        " Trainer and Accelerate call prepare() of ringcomm.integrations.transformers or"
        " .accelerate first",
        f"{name} got a gradient after its update: backward() ran again before step() (say"
        " accumulation_steps), or a weight is used in several segments of a reentrant checkpoint"
        " (use_reentrant=False)",
    )


class Consumer(Protocol):
    """Who is told of gradients."""

    def param_arrived(self, slot: Slot) -> None:
        """Autograd has added to the parameter's gradient."""

    def uses_arrived(self, slot: Slot, uses: Uses) -> None:
        """The uses of a fused layer's weight are complete."""


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


_consumers = WeakIdKeyDictionary()  # parameter -> weak reference to its consumer


class ModelWeights:
    """A model and names for its parameters, or parameters alone."""

    def __init__(self, model: nn.Module | None) -> None:
        """Raises ValueError where the model reduces gradients itself, or makes sparse ones."""
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "DistributedDataParallel keeps all gradients to reduce them: give the model itself,"
                " and group="
            )
        self._model = model
        self._names: dict[nn.Parameter, str] = {}
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        if model is None:
            return
        self._names = {param: name for name, param in model.named_parameters()}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ValueError(f"{name} makes sparse gradients: sparse=False")
            for attribute, param in module._parameters.items():
                if param is not None:
                    self._places.setdefault(param, []).append((module, attribute))

    def check_replicas(self, optimizer: str) -> None:
        """Raises ValueError where ranks are known to have other weights."""
        if self._model is not None:
            refuse_experts(self._model, f"{optimizer} over several ranks")

    def check_decisions(self, optimizer: str, known: Container[nn.Parameter]) -> None:
        """Raises ValueError where other ranks have other gradients to decide by, not known of."""
        if self._model is None:
            return
        refuse_decisions(self._model, optimizer, known)
        stages = axes_of(self._model).stages
        if stages is not None and stages.size() > 1:
            raise ValueError(
                f"clip_grad_norm and loss_scale of {optimizer} would go by the gradients of this"
                " rank's stages of the pipeline alone: leave them out, or use zero.shard() with"
                " its clip_grad_norm= and loss_scale="
            )

    def check_ranks(
        self,
        optimizer: str,
        slots: Iterable[Slot],
        group: dist.ProcessGroup | str | None,
        splits: Iterable[Split],
    ) -> None:
        """Raises ValueError where the ranks of a job would train replicas that drift apart."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        alone = (s for s in slots if s.shards is None and not isinstance(s.param, DTensor))
        first = next(alone, None)
        if world_size == 1 or first is None:
            return
        if self._model is None:
            raise ValueError(
                f"{optimizer} was given parameters and no model in a job of {world_size} ranks,"
                " where it could not see a DistributedDataParallel: give the model, or model="
                " beside parameters"
            )
        if group is not None:
            return
        self.check_replicas(optimizer)
        parts = {split.group for split in splits}
        parts.update(module.group for _, _, module, _ in split_params(self._model))
        if all(part.size() < world_size for part in parts):
            raise ValueError(
                f"{optimizer} without group= would train {first.name} on each of {world_size} ranks"
                " apart, and the replicas would drift: say group=dist.group.WORLD to average their"
                ' gradients, or group="none" where this rank trains a model of its own'
            )

    def check_unchanged(self, optimizer: str, slots: Iterable[Slot]) -> None:
        """Raises ValueError where a weight is no longer the one that the optimizer updates."""
        if self._model is None:
            return
        modules = set(self._model.modules())
        for slot in slots:
            if isinstance(slot.param, DTensor):  # fully_shard has others in its place meanwhile
                continue
            for module, attribute in self._places.get(slot.param, []):
                if module not in modules or module._parameters.get(attribute) is not slot.param:
                    raise ValueError(
                        f"{slot.name} was replaced or taken out after {optimizer} was made, which"
                        " would train the old one: close() it, change the model, and make it again"
                    )
            if find_shards(slot.param) is not slot.shards:
                raise ValueError(
                    f"{slot.name} was sharded after {optimizer} was made, or is no longer: make"
                    f" WeightShards first, then {optimizer}"
                )

    def before_forward(self, check: weakref.WeakMethod[Callable[[], None]]) -> list[Any]:
        """Has `check` called before every forward pass of the model; returns what undoes it."""

        def call(*_: Any) -> None:
            if not torch.compiler.is_compiling() and (found := check()) is not None:
                found()

        return [] if self._model is None else [self._model.register_forward_pre_hook(call).remove]

    def check(self, param: nn.Parameter, name: str) -> None:
        """Raises ValueError for a parameter that cannot be managed."""
        if self._model is not None and param not in self._names:
            raise ValueError(f"{name} is none of the model's")
        if self._model is not None and param in tied_over_stages(self._model):
            raise ValueError(
                f"{name} is shared by stages of a pipeline, which sum its gradients behind the"
                " backward pass: train it by an optimizer that keeps gradients"
            )
        if not param.requires_grad:
            raise ValueError(f"{name} does not require grad, and can have no hook: leave it out")
        if not param.is_floating_point():
            raise ValueError(f"{name} is {param.dtype}, and weights are floating point")
        consumer = _consumers.get(param)
        if consumer is not None and consumer() is not None:
            raise ValueError(
                f"{name} has an optimizer in its backward pass already: close() that one first"
            )

    def name_of(self, param: nn.Parameter, index: int) -> str:
        """What messages call it."""
        return self._names.get(param, f"parameter {index} of shape {tuple(param.shape)}")

    def owners(self, param: nn.Parameter) -> list[nn.Module]:
        """The layers that have it."""
        return [module for module, _ in self._places.get(param, [])]

    def fusable_owner(self, param: nn.Parameter) -> nn.Module | None:
        """The one layer that has it, if it is one whose weight gradient need not be made."""
        owners = self.owners(param)
        if len(owners) != 1 or not is_fusable(owners[0]) or owners[0].weight is not param:
            return None
        return owners[0]


def attach(
    slot: Slot, consumer: Consumer, owners: Iterable[nn.Module], fusable: nn.Module | None
) -> list[Callable[[], Any]]:
    """Has a weight's gradients told to the consumer, who may go away; returns what undoes it."""
    told = weakref.ref(consumer)

    def param_arrived(_: Tensor) -> None:
        if (found := told()) is not None:
            found.param_arrived(slot)

    def uses_arrived(uses: Uses) -> None:
        if (found := told()) is not None:
            found.uses_arrived(slot, uses)

    param = slot.param
    _consumers[param] = told
    undo = [
        param.register_post_accumulate_grad_hook(param_arrived).remove,
        lambda: _consumers.pop(param, None),
    ]
    for owner in owners:
        undo.append(owner.register_forward_pre_hook(slot.is_used).remove)
    if fusable is not None:
        slot.handle = handle = fuse(fusable, uses_arrived)
        undo.append(lambda: unfuse(handle))
    return undo


def run_all(actions: list[Callable[[], Any]]) -> None:
    """Calls them and forgets them."""
    while actions:
        actions.pop()()


def split_model(
    model_or_params: nn.Module | Iterable[Any], model: nn.Module | None, name: str
) -> tuple[nn.Module | None, Iterable[Any]]:
    """The model, if there is one, and what torch.optim takes for parameters.

    Raises:
        ValueError: two models, or one without weights to train.
    """
    if not isinstance(model_or_params, nn.Module):
        if model is None:
            warnings.warn(
                f"{name} was given parameters and no model: every gradient is consumed by a hook,"
                " but weights of linear layers and embeddings have theirs made first. Give the"
                " model, or model= beside parameter groups",
                stacklevel=4,
            )
        return model, model_or_params
    if model is not None and model is not model_or_params:
        raise ValueError("the model is given twice, and the two differ")
    params = [param for param in model_or_params.parameters() if param.requires_grad]
    if not params:
        raise ValueError("the model has no parameter that requires grad")
    return model_or_params, params


def checked_dtypes(slots: Iterable[Slot], stochastic_rounding: bool, master: str | None) -> None:
    """Raises ValueError where an option for bfloat16 weights finds none."""
    if not (stochastic_rounding or master):
        return
    option = "stochastic_rounding" if stochastic_rounding else 'master="split"'
    if not any(slot.param.dtype == torch.bfloat16 for slot in slots):
        raise ValueError(f"{option} is for bfloat16 weights, and there are none")
