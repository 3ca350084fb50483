"""Saving and loading the state of a sharded optimizer in torch's format."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    raise_on_all,
)
from ringcomm.parallel.model.saving import refuse_saving
from ringcomm.parallel.offload.state_rows import StatesView, numbered_groups
from ringcomm.parallel.optimizer_classes import params_in
from ringcomm.parallel.tensor.splits import mesh_of
from ringcomm.torch_names import run_state_hooks, shape_and_offset

_ROWS = (Shard(0),)


class States(torch.optim.Optimizer):
    """The states for ringcomm.parallel.get_state_dict() and torch.distributed.checkpoint.

    Offloaded optimizers have the states of the tensors `_own`, by weight.
    """

    group: dist.ProcessGroup
    options: Any
    _scale: LossScale | None
    _inners: list[Any]
    _inner_by_param: Any
    inner_of: Callable[[Any], Any]
    _is_made: bool
    _own: dict[Any, Any]
    _states: dict[Any, dict[str, Any]]
    _mode: str  # the last of train() and eval()
    _group_of: dict[Any, Any]
    _owner_of: dict[Any, int]
    _told: set[Any]  # weights whose owners' keys all ranks know

    @property
    def state(self) -> Any:
        """This rank's part of each weight's state, by weight; copies if it is offloaded.

        Raises RuntimeError with offload_weights: torch.distributed.checkpoint would find no state.
        """
        if self.options.offload_weights:
            raise RuntimeError(
                "with offload_weights the states are outside the optimizer, where torch's own"
                " get_state_dict() cannot find them: use ringcomm.parallel.get_state_dict()"
            )
        if not self.has_offloaded:
            return self._states
        params = self.all_params()
        stepped = [p for p in params if p in self._states or self._has_stepped(p)]
        return StatesView(stepped, lambda param: self._states.get(param) or self._state_of(param))

    @state.setter
    def state(self, states: Any) -> None:
        if self._is_made and self.has_offloaded:
            raise AttributeError(
                "the states are offloaded, and `state` has copies: use load_state_dict() to"
                " replace them"
            )
        self._states = states

    @property
    def has_offloaded(self) -> bool:
        """Whether states of any weights are offloaded."""
        return any(inner.is_offloaded for inner in self._inners)

    def all_params(self) -> list[Any]:
        """The parameters of all groups, as torch's state_dict() numbers them."""
        return params_in(self.param_groups)

    def numbered_groups(self) -> list[dict[str, Any]]:
        """The parameter groups as in torch's state_dict(), with the loss scale in each."""
        scale = {} if self._scale is None else self._scale.state()
        return [{**group, **scale} for group in numbered_groups(self)]

    @torch.inference_mode(False)  # DTensors cannot be detached there
    def state_dict(self) -> dict[str, Any]:
        """In torch's format; states are DTensors, of which this rank has rows.

        Use it with torch.distributed.checkpoint and its get_state_dict(model, optimizer). Pickling
        rows of several ranks, as torch.save() does, raises RuntimeError. "master" has the float32
        values of a 16-bit weight.

        Collective at stages 1 and 2, with offload_weights, and at stage 3 with optimizers that need
        full matrices, such as Muon: states are gathered one at a time and split into rows.
        """
        run_state_hooks(self, "state_dict_pre")
        with torch.no_grad():
            specs = dict(self._told_by_owners(self._specs_of))
            states = [self._row_state(param, specs) for param in self.all_params()]
        found = {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": self.numbered_groups(),
            "rank": self.group.rank(),
            "world_size": self.group.size(),
        }
        return run_state_hooks(self, "state_dict_post", found)

    @torch.inference_mode(False)  # updates must be able to write states
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict() of this rank, or a full one of torch's optimizer.

        Raises:
            ValueError: on all ranks: it is no state, or from another rank, world size or optimizer.
                Nothing has been written.

        Collective.
        """
        given, states, problem = dict[str, Any](), dict[Any, dict[str, Any]](), None
        try:
            given = run_state_hooks(self, "load_state_dict_pre", state_dict.copy())
            states = self._checked_states(given)
        except Exception as error:
            problem = error if isinstance(error, ValueError) else repr(error)
        raise_on_all(problem, self.group)
        self._load(given["param_groups"], states, self._cut)
        run_state_hooks(self, "load_state_dict_post")

    def load_parts(self, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        """Loads this rank's parts of states, by weight, as from part_state_of().

        Collective if weights have float32 masters.
        """
        self._load(groups, states, lambda _, value: value)

    def _load(
        self,
        groups: list[dict[str, Any]],
        states: dict[Any, dict[str, Any]],
        cut: Callable[[Any, Tensor], Tensor],
    ) -> None:
        for saved, group in zip(groups, self.param_groups, strict=True):
            given = deepcopy({key: value for key, value in saved.items() if key != "params"})
            LossScale.take(given, self._scale)
            group.update(given)
        self._mode = ""  # that of the saved groups
        with torch.no_grad(), self._replacing():
            for group in self.param_groups:
                for param in group["params"]:
                    state = states.get(param, {})
                    mine = {
                        key: _owned(value, param, cut) if isinstance(value, Tensor) else value
                        for key, value in state.items()
                        if value is not None
                    }
                    self._set_state(param, self._with_own_step(mine, group, param))
            self.share_keys()

    def _checked_states(self, state_dict: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        """The states by weight, checked; may be modified."""
        here = self.group.rank(), self.group.size()
        came_from = state_dict.get("rank", here[0]), state_dict.get("world_size", here[1])
        if came_from != here:
            raise ValueError(
                f"the state is from rank {came_from[0]} of {came_from[1]} and lacks the others'"
                f" rows, but this is rank {here[0]} of {here[1]}: save"
                " ringcomm.parallel.get_state_dict(model, optimizer, full=True), which any rank of"
                " any world size can load"
            )
        given, mine = state_dict["param_groups"], self.param_groups
        sizes = [len(group["params"]) for group in given], [len(g["params"]) for g in mine]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state has parameter groups of {sizes[0]} parameters, but the optimizer has"
                f" {sizes[1]}"
            )
        states = {}
        for number, param in zip(params_in(given), self.all_params(), strict=True):
            state = state_dict["state"].get(number, {})
            for key, value in state.items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                if value.shape != param.shape and self.owner_of(param) is None:
                    raise ValueError(
                        f"{key} of parameter {number} must have the parameter's shape"
                        f" {tuple(param.shape)}, got {tuple(value.shape)}"
                    )
                if isinstance(value, DTensor) and not self._is_own(param, value):
                    raise ValueError(
                        f"{key} of parameter {number} was saved by other ranks or at another"
                        " stage: use ringcomm.parallel.get_state_dict() between them"
                    )
            states[param] = state
        return states

    def _is_own(self, param: Any, value: DTensor) -> bool:
        """Whether a partial state is this rank's."""
        mesh, placements = self._rows_of(param)
        shape, _ = shape_and_offset(value.shape, mesh, placements)
        return value.placements == placements and tuple(value.to_local().shape) == tuple(shape)

    def _specs_of(self, param: Any) -> dict[str, Any]:
        return {key: _without_values(value) for key, value in self._state_of(param).items()}

    def _told_by_owners(
        self, fact_of: Callable[[Any], Any], wanted: set[Any] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Weights that have an owner, and what their owners know of them. Collective.

        Of the groups that share such weights, by default all, or one of `wanted`.
        """
        shared: dict[Any, list[Any]] = {}
        for param in self.all_params():
            if self.owner_of(param) is not None:
                shared.setdefault(self.group_of(param), []).append(param)
        for group, params in shared.items():
            if wanted is None or not wanted.isdisjoint(params):
                mine = {i: fact_of(p) for i, p in enumerate(params) if self.updates(p)}
                for of_rank in all_gathered(mine, group):
                    for number, fact in of_rank.items():
                        yield params[number], fact

    def share_keys(self, wanted: set[Any] | None = None) -> None:
        """Gives `state` of weights that others own the owners' keys, with empty tensors.

        torch.distributed.checkpoint asks `state` on each rank what there is to save or to load.
        Collective over the groups that share such weights, by default all, or one of `wanted`.
        """
        if self.options.offload_weights:  # see `state`
            return

        def keys_of(param: Any) -> list[str]:
            return [*(self._states.get(param) or self._state_of(param))]

        for param, keys in self._told_by_owners(keys_of, wanted):
            self._told -= {param}
            self._told |= {param} if keys else set()
            if not self.updates(param):
                self._states.pop(param, None)
                if keys:
                    nothing = torch.empty(0, dtype=param.dtype, device=param.device)
                    self._states[param] = {key: nothing.clone() for key in keys}

    def _row_state(self, param: Any, specs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
        """A weight's state as this rank's rows, split as torch does. Collective."""
        own = self._state_of(param)
        found = dict(specs.get(param, own))
        for key, value in found.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            # fully_shard splits between rows too.
            if not isinstance(value, DTensor):
                whole = self._whole(param, value, own.get(key))
                found[key] = self._as_rows(param, whole) if whole.shape == param.shape else whole
            is_part = isinstance(found[key], DTensor) or self.group_of(param) is None
            if is_part and self.group.size() > 1:
                found[key] = found[key].detach()  # not the state itself
                refuse_saving(found[key], key, "model, optimizer")
        return found

    def _whole(self, param: Any, like: Tensor, mine: Any) -> Tensor:
        """A tensor of a state, whole on every rank: its owner's, or all ranks' parts. Collective.

        `like` has the dtype, and of an owner's the shape.
        """
        group, owner = self.group_of(param), self.owner_of(param)
        if owner is None:
            ranges = [self.range_of(param, rank) for rank in range(place_in(group)[1])]
            whole = like.new_empty(param.numel())
            whole[slice(*self.range_of(param))] = mine
            all_gather_shards(whole, group, [end - begin for begin, end in ranges])
            return whole.view(param.shape)
        if self.updates(param):
            whole = mine.contiguous().to(param.device)
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=param.device)
        if group is not None:
            dist.broadcast(whole, group=group, group_src=owner)
        return whole

    def _as_rows(self, param: Any, whole: Tensor) -> Any:
        """This rank's rows of a value that every rank has, as of the weight."""
        if self.group_of(param) is None:
            return whole
        mesh, placements = self._rows_of(param)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)  # nothing is sent

    def _rows_of(self, param: Any) -> tuple[DeviceMesh, Any]:
        """Where the rows of a weight's state are in a state_dict()."""
        if isinstance(param, DTensor):
            return param.device_mesh, param.placements
        mesh = mesh_of(self.group_of(param) or self.group, param.device)
        return mesh, _ROWS if param.dim() else (Replicate(),)

    def _state_of(self, param: Any) -> dict[str, Any]:
        """This rank's part of a weight's state, as DTensors for a DTensor."""
        if not self.updates(param):
            return {}
        inner = self._inner_by_param[param]
        if inner.is_offloaded:
            state = inner.optimizer.state_of(self._own[param])
        else:
            state = self._states.get(param, {})
        return self._shown({key: x for key, x in state.items() if x is not None}, param)

    def _shown(self, state: dict[str, Any], param: Any) -> dict[str, Any]:
        """A state with DTensors for this rank's shards of a DTensor; others as they are."""
        if self.owner_of(param) is not None or not isinstance(param, DTensor):
            return state
        shards = {
            key: _joined(value, param.device_mesh, param.placements, param)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and not isinstance(value, DTensor)
        }
        return state | shards

    def range_of(self, param: Any, rank: int | None = None) -> Any:
        """The elements [begin, end) of a flat weight that a rank updates; by default this rank.

        None for DTensors.
        """

    def group_of(self, param: Any) -> Any:
        """The ranks that share a weight; None if this one is alone, with experts of its own."""
        return self._group_of[param]

    def owner_of(self, param: Any) -> int | None:
        """The rank that updates a weight as a whole; None if all update parts of it."""
        return self._owner_of.get(param)

    def updates(self, param: Any) -> bool:
        """Whether this rank updates a weight, or its part of one."""
        return self.owner_of(param) in (None, place_in(self.group_of(param))[0])

    def part_state_of(self, param: Any) -> dict[str, Any]:
        """This rank's part of a weight's state; an offloaded one has values before a step, too."""
        state, inner = self._state_of(param), self._inner_by_param[param]
        if not inner.is_offloaded or not self.updates(param) or self._has_stepped(param):
            return state
        if self.owner_of(param) is not None:  # the shape is enough; `state` has the master
            part = torch.zeros(param.shape, dtype=param.dtype, device="cpu")
        else:
            part = self._part_of(param)
        new = inner.optimizer.new_state_of(self._own[param], part)
        return {**self._shown(new, param), **state}

    def _part_of(self, param: Any) -> Tensor:
        """This rank's part of a weight, which the optimizer updates."""
        return local_of(param.data)

    def _has_stepped(self, param: Any) -> bool:
        """Whether a weight with offloaded state has been updated, or its state loaded."""
        inner = self._inner_by_param[param]
        return inner.is_offloaded and inner.optimizer.steps.get(self._own[param], 0) > 0

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """A context for replacing states outside a step. Collective."""
        yield

    def _cut(self, param: Any, value: Tensor) -> Tensor:
        """This rank's part of a full state, or of rows. Collective for rows."""
        owner = self.owner_of(param)
        if isinstance(param, DTensor) and owner is None:
            if not isinstance(value, DTensor):
                value = self._as_rows(param, value.to(param.device))
            return local_of(value)
        if isinstance(value, DTensor):
            # The mesh of a loaded state may have no process groups.
            mesh, placements = self._rows_of(param)[0], value.placements
            value = _joined(value.to_local(), mesh, placements, value).full_tensor()
        if owner is not None:
            return value.detach() if self.updates(param) else value.new_empty(0)
        return value.detach().reshape(-1)[slice(*self.range_of(param))]

    def _set_state(self, param: Any, state: dict[str, Any]) -> None:
        """Replaces this rank's part of a weight's state; it has none of weights of others."""
        inner = self._inner_by_param[param]
        state = state if self.updates(param) else {}
        self._states.pop(param, None)
        if inner.is_offloaded:
            inner.optimizer.set_state_of(self._own[param], state)
            return
        if state:
            self._states[param] = state

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


def _joined(part: Tensor, mesh: DeviceMesh, placements: Any, like: Any) -> DTensor:
    """A DTensor of all ranks' parts, in the shape of another."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _without_values(value: Any) -> Any:
    """A value of a state; a tensor with dimensions is on the meta device."""
    if not isinstance(value, Tensor):
        return value
    return value.new_empty(value.shape, device="meta") if value.dim() else value.cpu()


def _owned(value: Tensor, param: Any, cut: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """A copy of this rank's part of a loaded value; numbers are the same on all ranks."""
    if not value.dim() and not isinstance(value, DTensor):
        return value.detach().clone()
    mine = local_of(cut(param, value))
    dtype = torch.float32 if mine.is_floating_point() else mine.dtype
    return mine.to(device=param.device, dtype=dtype, copy=True)
