"""Saving and loading the state of a sharded optimizer in torch's format."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.flat_collectives import (
    all_gather_shards,
    all_gathered,
    local_of,
    place_in,
)
from ringcomm.parallel.model.saving import refuse_saving
from ringcomm.parallel.offload.state_rows import numbered_groups
from ringcomm.parallel.optimizer_classes import (
    MASTER,
    State,
    States,
    params_in,
)
from ringcomm.parallel.tensor.splits import mesh_of
from ringcomm.torch_names import shape_and_offset

_ROWS = (Shard(0),)


class ShardedStates(States):
    """Those of zero.shard(): this rank's parts, offloaded or not, and rows for torch's formats."""

    is_in_place = False

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._inner, self._group = optimizer.inner, optimizer.group
        self.is_stored = self._inner.has_offloaded

    # ---- see States

    def groups(self) -> list[State]:
        """With the loss scale in each."""
        scale = self.optimizer.loss_scaling
        own = {} if scale is None else scale.state()
        return [{**group, **own} for group in numbered_groups(self.optimizer)]

    def parts(self, param: Any) -> State:
        """An offloaded state has values before the first step, too."""
        state, inner = self.of(param), self._inner.by_param[param]
        if not inner.is_offloaded or not self._inner.updates(param) or self.has_stepped(param):
            return state
        if param in self._inner.owner_of:  # the shape is enough; `state` has the master
            part = torch.zeros(param.shape, dtype=param.dtype, device="cpu")
        else:
            part = self.optimizer.part_of(param)
        new = inner.optimizer.new_state_of(self._inner.own[param], part)
        return {**self._shown(new, param), **state}

    def kept(self, param: Any) -> Any:
        """See States."""
        inner = self._inner.by_param[param]
        if inner.is_offloaded:
            return inner.optimizer.kept_of(self._inner.own[param])
        return self.optimizer.kept_states.get(param)

    def place(self, param: Any) -> tuple[tuple[int, int] | None, bool]:
        """See States."""
        return self.optimizer.range_of(param), param in self._inner.owner_of

    def inner_of(self, param: Any) -> Any:
        """See States."""
        return self._inner.by_param[param].plain

    def new(self, param: Any) -> Tensor | None:
        """In float32 at least; zeros of a full weight that other ranks have, too."""
        if self._inner.by_param[param].is_offloaded or not self._inner.updates(param):
            return None
        if not param.requires_grad or self.of(param).keys() - {MASTER}:
            return None
        if param in self._inner.owner_of and isinstance(param, DTensor):
            return torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        part = self.optimizer.part_of(param).detach()
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def replace(self, param: Any, state: State) -> None:
        """This rank's part; it has none of weights of others."""
        self.optimizer.set_state_of(param, state if self._inner.updates(param) else {})

    def make(self) -> None:
        """See States. Collective."""
        super().make()
        self.share_keys()

    # ---- in torch's formats

    def rows(self) -> dict[str, Any]:
        """A state_dict() of rows. Collective where states are gathered."""
        specs = dict(
            self._told_by_owners(
                lambda param: {key: _without_values(x) for key, x in self.of(param).items()}
            )
        )
        states = [self._row_state(param, specs) for param in self.optimizer.all_params()]
        return {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": self.groups(),
            "rank": self._group.rank(),
            "world_size": self._group.size(),
        }

    def checked(self, state_dict: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        """The states by weight, checked; may be modified."""
        here = self._group.rank(), self._group.size()
        came_from = state_dict.get("rank", here[0]), state_dict.get("world_size", here[1])
        if came_from != here:
            raise ValueError(
                f"the state is from rank {came_from[0]} of {came_from[1]} and lacks the others'"
                f" rows, but this is rank {here[0]} of {here[1]}: save"
                " ringcomm.parallel.get_state_dict(model, optimizer, full=True), which any rank of"
                " any world size can load"
            )
        given, mine = state_dict["param_groups"], self.optimizer.param_groups
        sizes = [len(group["params"]) for group in given], [len(g["params"]) for g in mine]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state has parameter groups of {sizes[0]} parameters, but the optimizer has"
                f" {sizes[1]}"
            )
        states = {}
        for number, param in zip(params_in(given), self.optimizer.all_params(), strict=True):
            state = state_dict["state"].get(number, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                if param not in self._inner.owner_of:
                    check_shape(key, number, value, param)
                if isinstance(value, DTensor) and not self._is_own(param, value):
                    raise ValueError(
                        f"{key} of parameter {number} was saved by other ranks or at another"
                        " stage: use ringcomm.parallel.get_state_dict() between them"
                    )
            states[param] = state
        return states

    def _is_own(self, param: Any, value: DTensor) -> bool:
        mesh, placements = self._rows_of(param)
        shape, _ = shape_and_offset(value.shape, mesh, placements)
        return value.placements == placements and tuple(value.to_local().shape) == tuple(shape)

    def _load(
        self, groups: list[State], states: Mapping[Any, State], *, is_full: bool = False
    ) -> None:
        """With is_full states are full, or rows."""
        for saved, group in zip(groups, self.optimizer.param_groups, strict=True):
            given = deepcopy({key: value for key, value in saved.items() if key != "params"})
            LossScale.take(given, self.optimizer.loss_scaling)
            group.update(given)
        self._inner.mode = ""  # that of the saved groups
        with torch.no_grad(), self.optimizer.replacing():
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    state = states.get(param, {})
                    mine = {
                        key: self._owned(value, param, is_full=is_full)
                        if isinstance(value, Tensor)
                        else value
                        for key, value in state.items()
                        if value is not None
                    }
                    self.replace(param, self._with_own_step(mine, group, param))
            self.share_keys()

    def _told_by_owners(
        self, fact_of: Callable[[Any], Any], wanted: set[Any] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Weights that have an owner, and what their owners know of them. Collective.

        Of the groups that share such weights, by default all, or one of `wanted`.
        """
        shared: dict[Any, list[Any]] = {}
        for param in self.optimizer.all_params():
            if param in self._inner.owner_of:
                shared.setdefault(self._inner.group_of[param], []).append(param)
        for group, params in shared.items():
            if wanted is None or not wanted.isdisjoint(params):
                mine = {i: fact_of(p) for i, p in enumerate(params) if self._inner.updates(p)}
                for of_rank in all_gathered(mine, group):
                    for number, fact in of_rank.items():
                        yield params[number], fact

    def share_keys(self, wanted: set[Any] | None = None) -> None:
        """Gives `state` of weights that others own the owners' keys, with empty tensors.

        torch.distributed.checkpoint asks `state` on each rank what there is to save or to load.
        Collective over the groups that share such weights, by default all, or one of `wanted`.
        """
        if self.optimizer.options.offload_weights:  # see `state`
            return

        def keys_of(param: Any) -> list[str]:
            return [*(self.optimizer.kept_states.get(param) or self.of(param))]

        for param, keys in self._told_by_owners(keys_of, wanted):
            (self._inner.told.add if keys else self._inner.told.discard)(param)
            if not self._inner.updates(param):
                self.optimizer.kept_states.pop(param, None)
                if keys:
                    nothing = torch.empty(0, dtype=param.dtype, device=param.device)
                    self.optimizer.kept_states[param] = {key: nothing.clone() for key in keys}

    def _row_state(self, param: Any, specs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
        """A weight's state as this rank's rows, split as torch does. Collective."""
        own = self.of(param)
        found = dict(specs.get(param, own))
        is_live = any(isinstance(value, DTensor) for value in found.values())
        for key, value in found.items():
            if not isinstance(value, Tensor):
                continue
            if not value.dim():
                found[key] = value if is_live else value.clone()
                continue
            # fully_shard splits between rows too.
            if not isinstance(value, DTensor):
                whole = self._whole(param, value, own.get(key))
                found[key] = self._as_rows(param, whole) if whole.shape == param.shape else whole
            is_part = isinstance(found[key], DTensor) or self._inner.group_of[param] is None
            if is_part and self._group.size() > 1:
                found[key] = found[key].detach()  # not the state itself
                refuse_saving(found[key], key, "model, optimizer")
        return found

    def _whole(self, param: Any, like: Tensor, mine: Any) -> Tensor:
        """A tensor of a state, whole on every rank: its owner's, or all ranks' parts. Collective.

        `like` has the dtype, and of an owner's the shape.
        """
        group, owner = self._inner.group_of[param], self._inner.owner_of.get(param)
        if owner is None:
            ranges = [self.optimizer.range_of(param, rank) for rank in range(place_in(group)[1])]
            whole = like.new_empty(param.numel())
            whole[slice(*self.optimizer.range_of(param))] = mine
            all_gather_shards(whole, group, [end - begin for begin, end in ranges])
            return whole.view(param.shape)
        if self._inner.updates(param):
            whole = mine.contiguous().to(param.device)
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=param.device)
        if group is not None:
            dist.broadcast(whole, group=group, group_src=owner)
        return whole

    def _as_rows(self, param: Any, whole: Tensor) -> Any:
        """This rank's rows of a value that every rank has, as of the weight."""
        if self._inner.group_of[param] is None:
            return whole
        mesh, placements = self._rows_of(param)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)  # nothing is sent

    def _rows_of(self, param: Any) -> tuple[DeviceMesh, Any]:
        """Where the rows of a weight's state are in a state_dict()."""
        if isinstance(param, DTensor):
            return param.device_mesh, param.placements
        mesh = mesh_of(self._inner.group_of[param] or self._group, param.device)
        return mesh, _ROWS if param.dim() else (Replicate(),)

    def of(self, param: Any) -> dict[str, Any]:
        """This rank's part of a weight's state, as DTensors for a DTensor."""
        if not self._inner.updates(param):
            return {}
        inner = self._inner.by_param[param]
        if inner.is_offloaded:
            state = inner.optimizer.state_of(self._inner.own[param])
        else:
            state = self.optimizer.kept_states.get(param, {})
        state = state | self.optimizer.master_of(param)
        return self._shown({key: x for key, x in state.items() if x is not None}, param)

    def _shown(self, state: dict[str, Any], param: Any) -> dict[str, Any]:
        """A state with DTensors for this rank's shards of a DTensor; others as they are."""
        if param in self._inner.owner_of or not isinstance(param, DTensor):
            return state
        shards = {
            key: _joined(value, param.device_mesh, param.placements, param)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and not isinstance(value, DTensor)
        }
        return state | shards

    def has_stepped(self, param: Any) -> bool:
        """Whether a weight with offloaded state has been updated, or its state loaded."""
        inner = self._inner.by_param[param]
        return inner.is_offloaded and inner.optimizer.steps.get(self._inner.own[param], 0) > 0

    def _owned(self, value: Tensor, param: Any, *, is_full: bool) -> Tensor:
        """A copy of this rank's part of a loaded value; numbers are the same on all ranks."""
        if not value.dim() and not isinstance(value, DTensor):
            return value.detach().clone()
        mine = local_of(self._cut(param, value) if is_full else value)
        dtype = torch.float32 if mine.is_floating_point() else mine.dtype
        return mine.to(device=param.device, dtype=dtype, copy=True)

    def _cut(self, param: Any, value: Tensor) -> Tensor:
        """This rank's part of a full state, or of rows. Collective for rows."""
        owner = self._inner.owner_of.get(param)
        if isinstance(param, DTensor) and owner is None:
            if not isinstance(value, DTensor):
                value = self._as_rows(param, value.to(param.device))
            return local_of(value)
        if isinstance(value, DTensor):
            # The mesh of a loaded state may have no process groups.
            mesh, placements = self._rows_of(param)[0], value.placements
            value = _joined(value.to_local(), mesh, placements, value).full_tensor()
        if owner is not None:
            return value.detach() if self._inner.updates(param) else value.new_empty(0)
        return value.detach().reshape(-1)[slice(*self.optimizer.range_of(param))]

    def _with_own_step(
        self, state: dict[str, Any], group: dict[str, Any], param: Tensor
    ) -> dict[str, Any]:
        """Makes the step count a tensor where torch's optimizers need it."""
        is_torchs = type(self.inner_of(param)).__module__.startswith("torch.optim")
        if "step" not in state or not (is_torchs or isinstance(state["step"], Tensor)):
            return state
        is_on_device = group.get("fused") or group.get("capturable")
        device = param.device if is_on_device else torch.device("cpu")
        step = torch.tensor(float(state["step"]), dtype=torch.float32, device=device)
        return {**state, "step": step}


def check_shape(key: str, number: int, value: Any, param: Tensor) -> None:
    """Raises ValueError for a state, of an elementwise optimizer, of another shape."""
    if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
        raise ValueError(
            f"{key} of parameter {number} must have the parameter's shape {tuple(param.shape)}, got"
            f" {tuple(value.shape)}"
        )


def _joined(part: Tensor, mesh: DeviceMesh, placements: Any, like: Any) -> DTensor:
    """A DTensor of all ranks' parts, in the shape of another."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _without_values(value: Any) -> Any:
    """A value of a state; a tensor with dimensions is on the meta device."""
    if not isinstance(value, Tensor):
        return value
    return value.new_empty(value.shape, device="meta") if value.dim() else value.cpu()
