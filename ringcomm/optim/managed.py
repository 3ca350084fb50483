"""The weights of an optimizer in the backward pass: which they are, and the hooks on them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.optim.fused_layers import Uses, fuse, is_fusable, unfuse
from ringcomm.optim.layouts import Split
from ringcomm.optim.slot import Slot
from ringcomm.parallel import find_shards
from ringcomm.parallel.expert.local_experts import refuse_experts
from ringcomm.parallel.model_axes import axes_of, tied_over_stages
from ringcomm.parallel.shards.units import watch_whole_weights
from ringcomm.parallel.tensor.splits import refuse_decisions, split_params


class Consumer(Protocol):
    """Who is told of gradients."""

    def param_arrived(self, slot: Slot) -> None:
        """Autograd has added to the parameter's gradient."""

    def uses_arrived(self, slot: Slot, uses: Uses) -> None:
        """The uses of a fused layer's weight are complete."""

    def whole_arrived(self, slot: Slot) -> None:
        """Autograd has made a whole gradient, which fully_shard will reduce."""


# A module, and under which name it has a weight.
Place = tuple[nn.Module, str]

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
        self._places: dict[nn.Parameter, list[Place]] = {}
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
        new = [slot for slot in slots if slot.shards is None]
        if world_size == 1 or not new:
            return
        if self._model is None:
            raise ValueError(
                f"{optimizer} was given parameters and no model in a job of {world_size} ranks,"
                " where it could not see a DistributedDataParallel, or what fully_shard reduces:"
                " give the model, or model= beside parameters"
            )
        first = next((slot for slot in new if not isinstance(slot.param, DTensor)), None)
        if first is None:
            return
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

    def units(self) -> list[nn.Module]:
        """Those of fully_shard."""
        modules: Iterable[nn.Module] = () if self._model is None else self._model.modules()
        return [module for module in modules if isinstance(module, FSDPModule)]

    def places(self, slots: Iterable[Slot]) -> dict[Place, Slot]:
        """Where the model has weights."""
        return {place: slot for slot in slots for place in self._places.get(slot.param, [])}

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


def watch_units(
    units: Iterable[nn.Module], slots: Mapping[Place, Slot], consumer: Consumer
) -> Callable[[], Any]:
    """Has whole gradients of fully_shard's units told to the consumer; returns what undoes it."""
    told = weakref.ref(consumer)
    undo: list[Callable[[], Any]] = []

    def arrived(slot: Slot, _: Tensor) -> None:
        if (found := told()) is not None:
            found.whole_arrived(slot)

    def seen(module: nn.Module, name: str, param: nn.Parameter) -> None:
        slot = slots.get((module, name))
        if slot is not None and slot.whole is not param:
            slot.compute_as(param)
            undo.append(param.register_post_accumulate_grad_hook(partial(arrived, slot)).remove)

    for unit in units:
        for module in unit.modules():
            for name in module._parameters:
                if (slot := slots.get((module, name))) is not None:
                    param: Any = slot.param
                    mesh = param.device_mesh
                    slot.peers = tuple(mesh.get_group(i) for i in range(mesh.ndim))
        undo.append(watch_whole_weights(unit, seen))
    return partial(run_all, undo)


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


def check_dtypes(
    slots: Collection[Slot],
    stochastic_rounding: bool,
    master: str | None,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Raises ValueError where an option does not fit the weights' dtypes."""
    for slot in slots:
        if reduce_dtype not in (None, torch.float32, slot.param.dtype):
            raise ValueError(
                f"reduce_dtype is torch.float32 or {slot.param.dtype}, the dtype of {slot.name},"
                f" got {reduce_dtype}"
            )
    if not (stochastic_rounding or master):
        return
    option = "stochastic_rounding" if stochastic_rounding else 'master="split"'
    if not any(slot.param.dtype == torch.bfloat16 for slot in slots):
        raise ValueError(f"{option} is for bfloat16 weights, and there are none")
