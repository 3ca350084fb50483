"""Maps a rank's weights and optimizer states to elements of full tensors.

Unstepped weights get the states that their optimizer would create in its first step.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import all_gathered, local_of
from ringcomm.parallel.model.axes import find_shards
from ringcomm.parallel.model.cut import Box
from ringcomm.parallel.model.describe import Weight, describe, plain_name
from ringcomm.parallel.offload.optimizers import Offloaded
from ringcomm.parallel.offload.state_rows import numbered_groups
from ringcomm.parallel.offload.weight_shards import WeightShards
from ringcomm.parallel.optimizer_classes import new_state
from ringcomm.parallel.state.tensor_part import Path, TensorPart, fill, own_elements, part_of
from ringcomm.parallel.zero import ZeroOptimizer
from ringcomm.torch_names import EXTRA_STATE, tree_leaves

State = dict[str, Any]

MASTER = "master"  # float32 values of 16-bit weights; optional for optimizers without masters
USER_NAMES = "param_names"  # of an optimizer made from named_parameters()


class ModelParts:
    """What a module saves, by its name in the model without torch's wrappers.

    Attributes:
        values: parameters and persistent buffers, tied ones under each of their names.
        extra: other values, with the modules that load them by set_extra_state(); None if only the
            module's own load_state_dict() can.
        name_of: the first name of each parameter.
        shards: the WeightShards.
    """

    def __init__(self, module: nn.Module) -> None:
        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise ValueError(
                "FullyShardedDataParallel has its own parts of flattened weights: use fully_shard,"
                " or torch.distributed.checkpoint.state_dict"
            )
        found = (find_shards(param) for param in module.parameters())
        self.shards: list[WeightShards] = list(dict.fromkeys(s for s in found if s is not None))
        # First: fully_shard replaces gathered parameters by its DTensors here.
        state = module.state_dict(keep_vars=True)
        described = describe(module)
        stage = described.stage
        weights = described.weights.items()
        self._weights: Mapping[Any, Weight] = described.weights
        # Flat weights of tensor-parallel ranks with uneven parts cut what all have differently.
        self._is_replica = any(group.rank() for group in described.tensor_groups)
        own = described.names
        known = set(own.values())
        owners = {
            plain_name(module, f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE): part
            for name, part in module.named_modules(remove_duplicate=False)
            if type(part).set_extra_state is not nn.Module.set_extra_state
        }
        self.values: dict[str, Tensor] = {}
        self.extra: dict[str, tuple[Any, nn.Module | None]] = {}
        for key, value in state.items():
            # Hooks of state_dict() may rename keys, and copy values.
            name = plain_name(module, key)
            if name in own or (isinstance(value, Tensor) and value in known):
                self.values[name] = own.get(name, value)
            else:
                self.extra[name] = value, owners.get(name)
        self.name_of: dict[Any, str] = {}
        # A stage may have a weight under a later name than that of the whole model.
        first = {} if stage is None else stage.first_names
        saved = {value: name for name, value in reversed(self.values.items())}
        for param, weight in weights:
            saved_as = saved.get(param, weight.name)
            self.name_of[param] = first.get(saved_as, saved_as)

    def of_value(self, value: Tensor, *, is_stored: bool = False) -> Tensor:
        """A parameter or buffer as a part; with is_stored one of another tier is read when used."""
        shards = find_shards(value)
        if shards is None:
            return self._placed(value.detach(), value, None)
        param: Any = value
        unit = shards.unit_of(param)
        part = self._placed(unit.read_shard(param), param, shards.range_of(param))
        if is_stored and unit.is_away(param):
            return part_of(part).like(local_of(part), partial(unit.read_shard, param))
        return part

    def of_state(
        self, value: Tensor, param: Any, key: str, span: tuple[int, int] | None, *, is_flat: bool
    ) -> Tensor:
        """An optimizer state of a parameter, as a part.

        `span` has the elements [begin, end) of the flat parameter that the optimizer updates. With
        is_flat values have one dimension.
        """
        value = value.detach()
        if span is None and (shards := find_shards(param)) is not None:
            span = shards.range_of(param)
        if not value.dim():
            return value
        if param.dim() == 2 and key.endswith(("_row", "_col")) and value.dim() == 1:
            return value
        if not is_flat or param.dim() == 1:
            self.check_state(value, param, key, span)
            return self._placed(value, param, span)
        cut = self._weights[param].cut(span)
        return TensorPart(value, [Box((cut.first_elem,), (value.numel(),))], (cut.shape.numel(),))

    def check_state(self, value: Any, param: Any, key: str, span: tuple[int, int] | None) -> None:
        """Raises ValueError for a state of a sharded weight that is not elements of the weight."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()]
        if isinstance(value, DTensor) or not tensors:
            return
        if span is not None:
            fits = isinstance(value, Tensor) and value.numel() == span[1] - span[0]
        elif isinstance(param, DTensor) or self._weights[param].split is not None:
            fits = isinstance(value, Tensor) and value.shape == local_of(param.detach()).shape
        else:
            return
        if not fits:
            raise ValueError(
                f"the state {key} of {self.name_of[param]}, which is sharded, is not one tensor"
                " like this rank's part: such states of ranks cannot be combined"
            )

    def _placed(self, value: Tensor, param: Any, span: tuple[int, int] | None) -> Tensor:
        """A part for a value of a weight's shape; `span` has the elements of the flat weight."""
        weight = self._weights.get(param, Weight(param))
        is_dtensor = isinstance(param, DTensor) and not isinstance(value, DTensor)
        if weight.split is None and span is None and not is_dtensor:
            return value
        cut, is_copy = weight.cut(span), span is not None and self._is_replica
        if span is not None and weight.layer is not None and weight.split is not None:
            is_copy = weight.split.rank % weight.split.num_replicas > 0
        return TensorPart(local_of(value), cut.boxes, cut.shape, is_copy=is_copy)


class OptimizerParts:
    """An optimizer's state as parts. Collective.

    With is_stored, states in another tier are read when a part is used, one weight at a time.

    Attributes:
        parts: values by ("optimizer", name of a parameter, key). They share memory with the
            optimizer's.
        groups: the parameter groups, with the names of all ranks' parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: ModelParts,
        group: dist.ProcessGroup | None,
        *,
        is_stored: bool = False,
    ) -> None:
        self._unstepped = make_states(optimizer)
        self._optimizer, self._model = optimizer, model
        params = [param for own in optimizer.param_groups for param in own["params"]]
        self._numbers = {param: number for number, param in enumerate(params)}
        strangers = [tuple(param.shape) for param in params if param not in model.name_of]
        if strangers:
            raise ValueError(
                f"the optimizer has a weight of shape {strangers[0]} that is not in the model"
            )
        if isinstance(optimizer, ZeroOptimizer):
            self._native: State = {"param_groups": optimizer.numbered_groups()}
        elif isinstance(optimizer, Offloaded):  # whose state_dict() has copies
            self._native = {"param_groups": numbered_groups(optimizer)}
        else:
            self._native = optimizer.state_dict()
        # Offloaded values are read one by one; the other states of the same parameter are kept.
        is_stored = is_stored and is_elsewhere(optimizer)
        stored = lru_cache(maxsize=1)(self._state_of) if is_stored else None
        self._params = {model.name_of[param]: param for param in params}
        self.parts: dict[Path, Any] = {}
        for name, param in self._params.items():
            self.parts |= self._parts_of(name, param, stored)
        own_names = [
            {
                model.name_of[param]: label
                for param, label in zip(
                    own["params"], native.get(USER_NAMES, native["params"]), strict=True
                )
            }
            for own, native in zip(
                optimizer.param_groups, self._native["param_groups"], strict=True
            )
        ]
        # Stages and experts of other ranks have other parameters.
        everyone = [*zip(*all_gathered(own_names, group), strict=True)]
        self.groups = []
        for own, of_ranks in zip(self._native["param_groups"], everyone, strict=True):
            names = {name: of_user for names in of_ranks for name, of_user in names.items()}
            named = {USER_NAMES: [*names.values()]} if USER_NAMES in own else {}
            self.groups.append(deepcopy({**own, **named, "params": [*names]}))

    def _parts_of(
        self, name: str, param: Any, stored: Callable[[Any], State] | None
    ) -> dict[Path, Any]:
        optimizer: Any = self._optimizer
        found: dict[Path, Any] = {}
        is_zero = isinstance(optimizer, ZeroOptimizer)
        span = optimizer.range_of(param) if is_zero else None
        has_owner = is_zero and optimizer.owner_of(param) is not None
        for key, value in self._state_of(param).items():
            part = value
            if has_owner and isinstance(value, Tensor):
                part = value.detach()  # the owner has all of it
            elif isinstance(value, Tensor):
                is_flat = key in getattr(optimizer, "flat_states", ())
                part = self._model.of_state(value, param, key, span, is_flat=is_flat)
            elif not has_owner:
                self._model.check_state(value, param, key, span)
            if stored is not None and isinstance(part, Tensor) and part.dim():
                read = partial(lambda key: local_of(stored(param)[key]), key)
                part = part_of(part).like(local_of(part), read)
            if value is not None:
                found["optimizer", name, key] = part
        return found

    def _state_of(self, param: Any) -> State:
        """This rank's values."""
        optimizer = self._optimizer
        if isinstance(optimizer, ZeroOptimizer):
            return optimizer.part_state_of(param)
        if isinstance(optimizer, Offloaded):
            if optimizer.steps:
                return optimizer.state_of(param)
            return optimizer.new_state_of(param, local_of(param.detach()))
        return optimizer.state.get(param, {})

    def load(self, given: dict[Path, Any], groups: list[State]) -> None:
        """Loads the values of known paths, and options by group; an empty dict has none."""
        own_groups = self._native["param_groups"]
        for own, other in zip(own_groups, groups, strict=True):
            given_options = {k: v for k, v in other.items() if k not in ("params", USER_NAMES)}
            own.update(deepcopy(given_options))
        states: dict[Any, State] = {param: {} for param in self._params.values()}
        for path, part in self.parts.items():
            if path in given:
                param, key = self._params[path[1]], path[2]
                states[param][key] = self._taken(param, key, part, given[path])
        optimizer = self._optimizer
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.load_parts(own_groups, states)
            self._unstepped.loaded(optimizer, states)
            return
        self._unstepped.loaded(optimizer, states)
        state = {self._numbers[param]: state for param, state in states.items() if state}
        optimizer.load_state_dict({**self._native, "state": state})

    def _taken(self, param: Any, key: str, part: Any, value: Any) -> Any:
        """A part's value for the optimizer's load: its own tensor, overwritten, or a new one."""
        if not isinstance(part, Tensor):
            return value
        if isinstance(self._optimizer, (ZeroOptimizer, Offloaded)):
            return own_elements(part, value)
        fill(part, value)
        return self._state_of(param)[key]


# ---- states of weights before their first step


class Unstepped:
    """The weights whose state stands for none: their next step begins without it.

    A state dict has a value for every key, so that a checkpoint can be loaded into it. But no
    value is the same as none for momentum with dampening, NAdam, ASGD and Rprop.
    """

    def __init__(self) -> None:
        self.params: set[Any] = set()

    def make_states(self, optimizer: Any) -> None:
        """Makes the missing states."""
        is_zero = isinstance(optimizer, ZeroOptimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if is_zero and optimizer._inner_by_param[param].is_offloaded:
                    continue
                known = optimizer._state_of(param) if is_zero else optimizer.state.get(param, {})
                if not param.requires_grad or known.keys() - {MASTER}:
                    continue
                if is_zero and not optimizer.updates(param):
                    continue
                own = _value_of(optimizer, param)
                new = new_state(_inner_of(optimizer, param), group, param, own)
                if new and is_zero:
                    optimizer._set_state(param, new)
                elif new:
                    optimizer.state[param] = {**known, **new}
                self.params.add(param)
        if is_zero:
            optimizer.share_keys()

    def loaded(self, optimizer: Any, states: Mapping[Any, State]) -> None:
        """To be called with states that replace those of the optimizer."""
        self.params.clear()
        for param, state in states.items():
            inner = _inner_of(optimizer, param)
            is_torchs = type(inner).__module__.startswith("torch.optim")
            counts_from_0 = is_torchs and not isinstance(inner, torch.optim.Adagrad)
            if counts_from_0 and float(state.get("step", 1)) == 0:
                self.params.add(param)


def _value_of(optimizer: Any, param: Any) -> Any:
    """A copy of what this rank updates of a weight; zeros of a whole one that others have, too."""
    if not isinstance(optimizer, ZeroOptimizer):
        return param.detach().clone()
    if optimizer.owner_of(param) is not None and isinstance(param, DTensor):
        return torch.zeros(param.shape, dtype=param.dtype, device=param.device)
    part = optimizer._part_of(param).detach()
    return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)


def _inner_of(optimizer: Any, param: Any) -> Any:
    """The optimizer of a class that updates a weight, in that of zero.shard() or Offloaded."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.inner_of(param)
    return getattr(optimizer, "inner", optimizer)


_unstepped: WeakKeyDictionary[Any, Unstepped] = WeakKeyDictionary()


def make_states(optimizer: Any) -> Unstepped:
    """Makes the missing states of an optimizer, until its next step."""
    if not isinstance(optimizer, ZeroOptimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what Accelerate has wrapped
    if optimizer not in _unstepped:
        _unstepped[optimizer] = Unstepped()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(drop_unstepped)
    if hasattr(optimizer, "make_states"):  # it applies gradients in the backward pass
        optimizer.make_states()
    elif not isinstance(optimizer, Offloaded):
        _unstepped[optimizer].make_states(optimizer)
    return _unstepped[optimizer]


def drop_unstepped(optimizer: Any, *_: Any) -> None:
    """Removes the states that stand for none."""
    params = _unstepped[optimizer].params if optimizer in _unstepped else set()
    for param in params:
        if isinstance(optimizer, ZeroOptimizer):
            optimizer._set_state(param, {})
        elif isinstance(optimizer, Offloaded):
            optimizer.set_state_of(param, {})
        elif MASTER in (state := optimizer.state.pop(param, {})):
            optimizer.state[param] = {MASTER: state[MASTER]}
    params.clear()


def is_elsewhere(optimizer: Any) -> bool:
    """Whether states are in another tier than device memory."""
    return isinstance(optimizer, Offloaded) or getattr(optimizer, "has_offloaded", False)
