"""The model of an optimizer in the backward pass: what is refused of it, and the hooks on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.optim.fused_layers import fuse, is_fusable, unfuse
from ringcomm.optim.gradients import Uses, exact
from ringcomm.optim.slot import Slot
from ringcomm.parallel.expert.local_experts import refuse_experts
from ringcomm.parallel.model_axes import Axes, Held, axes_of, tied_over_stages
from ringcomm.parallel.shards import find_shards
from ringcomm.parallel.shards.units import watch_whole_weights
from ringcomm.parallel.tensor.splits import split_params

if TYPE_CHECKING:
    from ringcomm.optim.gradient_path import GradientPath
    from ringcomm.optim.in_backward import InBackwardOptimizer

_managed = WeakIdKeyDictionary()  # parameters that have an optimizer in their backward pass


class ModelWeights:
    """A model and names for its parameters, or parameters alone.

    Args:
        model: None for parameters alone.
        optimizer: its name, for messages.

    Raises:
        ValueError: the model reduces gradients itself, or makes sparse ones.
    """

    def __init__(self, model: nn.Module | None, optimizer: str) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "DistributedDataParallel keeps all gradients to reduce them: give the model itself,"
                " and group="
            )
        self._model, self._optimizer = model, optimizer
        # The modules that have a parameter, each with its name there.
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self.parts: dict[nn.Parameter, Any] = {}  # of tensor-parallel layers
        if model is None:
            return
        self._names = {param: name for name, param in model.named_parameters()}
        self.parts = {param: (module, split) for _, param, module, split in split_params(model)}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ValueError(f"{name} makes sparse gradients: give it sparse=False")
            for attribute, param in module._parameters.items():
                if param is not None:
                    self._places.setdefault(param, []).append((module, attribute))

    def name_of(self, param: nn.Parameter, index: int) -> str:
        """What messages call it."""
        return self._names.get(param, f"parameter {index} of shape {tuple(param.shape)}")

    # ---- what is refused, by ValueError

    def check_param(self, param: nn.Parameter, name: str) -> None:
        """Of a parameter that cannot be managed."""
        if self._model is not None and param not in self._names:
            why = "is none of the model's"
        elif self._model is not None and param in tied_over_stages(self._model):
            why = (
                "is shared by stages of a pipeline, which sum its gradients behind the backward"
                " pass: train it by an optimizer that keeps gradients"
            )
        elif not param.requires_grad:
            why = "does not require grad, and can have no hook: leave it out"
        elif not param.is_floating_point():
            why = f"is {param.dtype}, and weights are floating point"
        elif param in _managed:
            why = "has an optimizer in its backward pass already: close() that one first"
        else:
            return
        raise ValueError(f"{name} {why}")

    def check_replicas(self, slots: Iterable[Slot], group: dist.ProcessGroup) -> None:
        """Of weights that differ between the ranks of a data-parallel group."""
        if self._model is not None:
            refuse_experts(self._model, f"{self._optimizer} over several ranks")
        for slot in slots:
            if slot.shards is not None or any(_overlap(g, group) for g in slot.layout.groups):
                raise ValueError(
                    f"{slot.name} is sharded: leave group= out, because its shards have a group "
                    "of their own"
                )

    def check_ranks(self, slots: Iterable[Slot], group: dist.ProcessGroup | str | None) -> None:
        """Of ranks in a job that would train replicas that drift apart."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            return
        if self._model is None:
            raise ValueError(
                f"{self._optimizer} got parameters without their model in a job of {world_size} "
                "ranks, and cannot see DistributedDataParallel or fully_shard: give the model, or "
                "model= beside the parameters"
            )
        plain = [s for s in slots if s.shards is None and not isinstance(s.param, DTensor)]
        if group is not None or not plain:
            return
        refuse_experts(self._model, f"{self._optimizer} over several ranks")
        if all(module.group.size() < world_size for module, _ in self.parts.values()):
            raise ValueError(
                f"{self._optimizer} without group= would train {plain[0].name} separately on each "
                f"of {world_size} ranks, and the replicas would diverge: pass "
                'group=dist.group.WORLD to average their gradients, or group="none" if each rank '
                "trains a model of its own"
            )

    def check_unchanged(self, slots: Iterable[Slot]) -> None:
        """Of a weight that is no longer the one that the optimizer updates."""
        modules = set() if self._model is None else set(self._model.modules())
        for slot in slots:
            param: Any = slot.param
            if isinstance(param, DTensor):  # fully_shard has others in its place meanwhile
                continue
            for module, attribute in self._places.get(param, []):
                if module not in modules or module._parameters.get(attribute) is not param:
                    raise ValueError(
                        f"{slot.name} was replaced or taken out after {self._optimizer} was made,"
                        " which would train the old one: close() it, change the model, and make it"
                        " again"
                    )
            if find_shards(param) is not slot.shards:
                raise ValueError(
                    f"{slot.name} was sharded after {self._optimizer} was made, or is no longer:"
                    f" make WeightShards first, then {self._optimizer}"
                )

    def place_parts(self, slots: Sequence[Slot]) -> Axes:
        """Notes for each weight who holds the rest of it; the axes over which norms are summed.

        Raises:
            ValueError: other ranks have gradients that are not known of here.
        """
        axes = Axes({}, (), None) if self._model is None else axes_of(self._model)
        if axes.stages is not None and axes.stages.size() > 1:
            raise ValueError(
                f"clip_grad_norm and loss_scale of {self._optimizer} would go by the gradients of"
                " this rank's stages of the pipeline alone: leave them out, or use zero.shard()"
                " with its clip_grad_norm= and loss_scale="
            )
        shard_groups: list[dist.ProcessGroup] = []
        for slot in slots:
            slot.parts = axes.held.get(slot.param, Held((), 1))
            if slot.shards is not None and slot.shards.group.size() > 1:
                group = slot.shards.group
                slot.parts = slot.parts._replace(groups=(group, *slot.parts.groups))
                shard_groups.append(group)
        held = {**axes.held, **{slot.param: slot.parts for slot in slots}}
        return axes._replace(held=held, groups=(*dict.fromkeys(shard_groups), *axes.groups))

    # ---- hooks; each returns what undoes it, and an optimizer does when it goes

    def before_forward(self, optimizer: InBackwardOptimizer) -> list[Callable[[], Any]]:
        """Has the optimizer, a weak proxy, look at the model before each of its forward passes."""

        def call(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                optimizer.check_model()

        return [] if self._model is None else [self._model.register_forward_pre_hook(call).remove]

    def attach(self, slot: Slot, path: GradientPath, *, may_fuse: bool) -> list[Callable[[], Any]]:
        """Tells the path, a weak proxy, of a weight's gradients."""

        def param_arrived(_: Tensor) -> None:
            with exact(slot.param.device):
                path.param_arrived(slot)

        def uses_arrived(uses: Uses) -> None:
            with exact(slot.param.device):
                path.uses_arrived(slot, uses)

        param, owners = slot.param, [module for module, _ in self._places.get(slot.param, [])]
        _managed[param] = True
        undo = [
            param.register_post_accumulate_grad_hook(param_arrived).remove,
            lambda: _managed.pop(param, None),
            *(owner.register_forward_pre_hook(slot.is_used).remove for owner in owners),
        ]
        if may_fuse and len(owners) == 1 and is_fusable(owners[0], param):
            slot.handle = handle = fuse(owners[0], uses_arrived)
            undo.append(lambda: unfuse(handle))
        return undo

    def watch_units(self, slots: Iterable[Slot], path: GradientPath) -> list[Callable[[], Any]]:
        """Tells the path, a weak proxy, of whole gradients that fully_shard will reduce."""
        undo: list[Callable[[], Any]] = []
        slot_at = {place: slot for slot in slots for place in self._places.get(slot.param, [])}

        def seen(module: nn.Module, name: str, param: nn.Parameter) -> None:
            slot = slot_at.get((module, name))
            if slot is not None and slot.whole is not param:
                slot.whole = param
                hook = param.register_post_accumulate_grad_hook(lambda _: path.whole_arrived(slot))
                undo.append(hook.remove)

        for unit in () if self._model is None else self._model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            mine = set(unit.parameters())
            for slot in slots:
                if slot.param in mine and isinstance(slot.param, DTensor):
                    mesh = slot.param.device_mesh
                    slot.peers = tuple(mesh.get_group(i) for i in range(mesh.ndim))
            undo.append(watch_whole_weights(unit, seen))
        return [partial(run_all, undo)]


def run_all(actions: list[Callable[[], Any]]) -> None:
    """Calls them and forgets them."""
    while actions:
        actions.pop()()


def _overlap(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether two groups have more than one rank in common."""
    ranks = set(dist.get_process_group_ranks(one))
    return len(ranks.intersection(dist.get_process_group_ranks(other))) > 1
