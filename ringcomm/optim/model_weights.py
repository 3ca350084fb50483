"""The model of an optimizer in the backward pass: checks of its weights, and hooks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringcomm.optim.fused_layers import fuse, is_fusable, plain_class, unfuse
from ringcomm.optim.slot import Slot
from ringcomm.parallel.expert.local_experts import check_data_ranks
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.model.cut import (
    Axes,
    Sharding,
    find_trainer,
    note_trainer,
    overlap,
)
from ringcomm.parallel.model.describe import Weight, describe, start_equal
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.model.stage_part import StagePart, has_several_stages
from ringcomm.parallel.model.units import watch_whole_weights
from ringcomm.torch_names import FORWARD_PRE_HOOKS, forward_pre_hooks_of


class ModelWeights:
    """A model and the names of its parameters, or parameters without a model.

    Args:
        model: None for parameters alone.
        optimizer: its name, for messages.
        is_whole: whether it trains all weights of the model that require grad.
    """

    def __init__(self, model: nn.Module | None, optimizer: str, *, is_whole: bool) -> None:
        self._has_model, self._optimizer, self._is_whole = model is not None, optimizer, is_whole
        self._model = nn.Module() if model is None else model
        self.has_several_stages = has_several_stages(model)
        self._described = describe(self._model)
        self.has_experts = bool(self._described.experts)
        refuse(self._described, Asked("Lomo", optimizer, is_replicated=False))

    def weight_of(self, param: nn.Parameter) -> Weight:
        """Its description; without names and places if no model has it."""
        return self._described.weights.get(param, Weight(param))

    # ---- checks, which raise ValueError

    def check_param(self, param: nn.Parameter, name: str) -> None:
        """Raises for a parameter that is not supported."""
        steps = zip(param.shape, param.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps)
        if self._has_model and param not in self._described.weights:
            why = "is not a parameter of the model"
        elif isinstance(self._model, StagePart) and param in self._model.tied:
            why = (
                "is shared by stages of a pipeline, which sum its gradients after the backward"
                " pass: train it with an optimizer that keeps gradients"
            )
        elif not param.requires_grad:
            why = "does not require grad: leave it out"
        elif param.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            why = f"must be float64, float32, float16 or bfloat16, got {param.dtype}"
        elif param.numel() not in (0, span):
            why = f"has strides {param.stride()}, with gaps or overlaps in memory: copy it"
        elif (trainer := find_trainer(param)) is not None:
            why = f"already has an optimizer, {type(trainer).__name__}: close() that one first"
        else:
            return
        raise ValueError(f"{name} {why}")

    def check_replicas(self, slots: Iterable[Slot], group: dist.ProcessGroup) -> None:
        """Raises for weights that differ between the ranks of a data-parallel group. Collective."""
        self._refuse_replicas()
        check_data_ranks(self._described.experts, group, self._optimizer)
        for slot in slots:
            apart = slot.cut.groups if self.weight_of(slot.param).experts is None else ()
            if any(overlap(g, group) for g in apart):
                raise ValueError(
                    f"{slot.name} is sharded, and its shards have their own group: leave group= out"
                )
        # Gradients are averaged by position.
        names = [s.name for s in slots if self.weight_of(s.param).experts is None]
        check_agreement({"weights": names}, group)

    def share(
        self, slots: Iterable[Slot], group: dist.ProcessGroup
    ) -> dict[dist.ProcessGroup, list[Slot]]:
        """Numbers the weights of each group that averages gradients; experts have their own."""
        found: dict[dist.ProcessGroup | None, list[Slot]] = {group: []}
        for slot in slots:
            weight = self.weight_of(slot.param)
            slot.divisor = 1 if weight.experts is None else weight.experts.group.size()
            sharing = found.setdefault(weight.data_group(group), [])
            slot.index = len(sharing)  # ranks may have different numbers of experts
            sharing.append(slot)
        return {of: sharing for of, sharing in found.items() if of is not None and sharing}

    def check_ranks(self, slots: Iterable[Slot], group: dist.ProcessGroup | str | None) -> None:
        """Raises if ranks of a job would train replicas that diverge."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            return
        if not self._has_model:
            raise ValueError(
                f"{self._optimizer} got parameters without their model in a job of {world_size} "
                "ranks, and cannot see DistributedDataParallel or fully_shard: give the model, or "
                "model= beside the parameters"
            )
        every = list(slots)
        plain = [s for s in every if not isinstance(s.param, DTensor)]
        is_plain = isinstance(group, dist.ProcessGroup) and len(plain) == len(every)
        if self.has_experts and not is_plain:
            raise ValueError(
                f"{self._optimizer} trains models with sharded experts over data-parallel ranks"
                " only: pass their group=, without fully_shard"
            )
        if group is not None or not plain:
            return
        self._refuse_replicas()
        layers = [w.layer for w in self._described.weights.values() if w.layer is not None]
        if all(layer.group.size() < world_size for layer in layers):
            raise ValueError(
                f"{self._optimizer} without group= would train {plain[0].name} separately on each "
                f"of {world_size} ranks, and the replicas would diverge: pass "
                'group=dist.group.WORLD to average their gradients, or group="none" if each rank '
                "trains its own model"
            )

    def _refuse_replicas(self) -> None:
        refuse(self._described, Asked("Lomo", f"{self._optimizer} over several ranks"))

    def check_unchanged(self, slots: Sequence[Slot]) -> None:
        """Raises for a weight that was replaced or unfrozen since the optimizer was made."""
        mine = {slot.param for slot in slots}
        for own, weight in self._described.weights.items() if self._is_whole else ():
            if own.requires_grad and own not in mine and find_trainer(own) is None:
                raise ValueError(
                    f"{weight.name} requires grad since {self._optimizer} was made, which does not"
                    " train it: call add_param_group(), or give the optimizer parameters and model="
                )
        modules = set(self._model.modules())
        for slot in slots:
            param: Any = slot.param
            if isinstance(param, DTensor):  # fully_shard temporarily puts others in its place
                continue
            if param.dtype != slot.placeholder.dtype:
                raise ValueError(
                    f"{slot.name} was cast to {param.dtype} after {self._optimizer} was made: cast"
                    " the model before"
                )
            for module, attribute in self.weight_of(param).places:
                if module not in modules or getattr(module, attribute, None) is not param:
                    raise ValueError(
                        f"{slot.name} was replaced or removed after {self._optimizer} was made,"
                        " which would train the old one: close() it, change the model, and make"
                        " it again"
                    )

    def place_parts(self, slots: Sequence[Slot]) -> Axes:
        """Records for each weight the ranks with its other parts; returns the axes for norms."""
        axes = self._described.axes()
        if axes.stages is not None and axes.stages.size() > 1:
            raise ValueError(
                f"clip_grad_norm and loss_scale of {self._optimizer} would see only the gradients"
                " of this rank's pipeline stages: leave them out, or use zero.shard() with its"
                " clip_grad_norm= and loss_scale="
            )
        for slot in slots:
            slot.sharding = axes.shardings.get(slot.param, Sharding((), 1))
            # Its squares are those of a gradient that is not divided yet.
            num_copies = slot.sharding.num_copies * slot.divisor**2
            slot.sharding = slot.sharding._replace(num_copies=num_copies)
        shardings = {**axes.shardings, **{slot.param: slot.sharding for slot in slots}}
        return axes._replace(shardings=shardings)

    def take_values_of_rank0(self, slots: Iterable[Slot], group: Any) -> None:
        """Makes replicated weights, and buffers, those of rank 0, as DistributedDataParallel does.

        Collective over `group`, if it is one, and over the ranks that share sharded weights.
        """
        replicas = [group] if isinstance(group, dist.ProcessGroup) else []
        groups = dict.fromkeys([*replicas, *(peer for slot in slots for peer in slot.peers)])
        start_equal(self._described, groups, over_data=True)

    # ---- hooks; each returns functions that remove it, which the optimizer calls at its end

    def attach(
        self, slot: Slot, arrived: Callable[[Slot], None], *, may_fuse: bool
    ) -> list[Callable[[], Any]]:
        """Reports a weight's gradients, and uses by its layers."""
        param, owners = slot.param, [module for module, _ in self.weight_of(slot.param).places]
        hook = param.register_post_accumulate_grad_hook(lambda _: arrived(slot))
        slot.hook_id = hook.id
        undo = [hook.remove, lambda: note_trainer([param], None), slot.show]
        for owner in owners:
            undo.append(owner.register_forward_pre_hook(slot.is_used).remove)
            owner.__dict__["__reduce_ex__"] = partial(_reduce_plain, owner)
            undo.append(partial(owner.__dict__.pop, "__reduce_ex__", None))
        if may_fuse and len(owners) == 1 and is_fusable(owners[0], param):
            slot.handle = handle = fuse(owners[0])
            undo.append(lambda: unfuse(handle))
        return undo

    def watch_units(
        self, slots: Iterable[Slot], arrived: Callable[[Slot], None]
    ) -> list[Callable[[], Any]]:
        """Reports unsharded gradients, which fully_shard will reduce."""
        undo: list[Callable[[], Any]] = []
        slot_at = {place: slot for slot in slots for place in self.weight_of(slot.param).places}

        def seen(module: nn.Module, name: str, param: nn.Parameter) -> None:
            slot = slot_at.get((module, name))
            if slot is not None and slot.whole is not param:
                slot.whole = param
                hook = param.register_post_accumulate_grad_hook(lambda _: arrived(slot))
                undo.append(hook.remove)

        for unit in self._model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            mine = set(unit.parameters())
            for slot in slots:
                if slot.param in mine and isinstance(slot.param, DTensor):
                    mesh = slot.param.device_mesh
                    slot.peers = tuple(mesh.get_group(i) for i in range(mesh.ndim))
            undo.append(watch_whole_weights(unit, seen))
        return [partial(run_all, undo)]


def _reduce_plain(module: nn.Module, protocol: Any) -> Any:
    """Copies and pickles of a module are torch's own, without what attach() has added."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    make, args, state, *rest = reduced
    if (plain := plain_class(module)) is not type(module):
        make, args = plain.__new__, (plain,)
    if isinstance(state, dict):
        state = {key: value for key, value in state.items() if key != "__reduce_ex__"}
        hooks = forward_pre_hooks_of(module).items()
        mine = [k for k, hook in hooks if isinstance(getattr(hook, "__self__", None), Slot)]
        state[FORWARD_PRE_HOOKS] = OrderedDict((k, hook) for k, hook in hooks if k not in mine)
    return make, args, state, *rest


def run_all(actions: list[Callable[[], Any]]) -> None:
    """Calls all functions and clears the list."""
    while actions:
        actions.pop()()
