"""Maps a rank's weights and optimizer states to elements of full tensors.

Unstepped weights get the states that their optimizer would create in its first step.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ringcomm.parallel.flat_collectives import all_gathered, local_of
from ringcomm.parallel.model.cut import Box, find_shards
from ringcomm.parallel.model.describe import Weight, describe, plain_name
from ringcomm.parallel.offload.weight_shards import WeightShards
from ringcomm.parallel.optimizer_classes import (
    State,
    params_in,
    states_of,
)
from ringcomm.parallel.state.tensor_part import Path, TensorPart, fill, own_elements, part_of
from ringcomm.torch_names import EXTRA_STATE, tree_leaves

USER_NAMES = "param_names"  # of an optimizer made from named_parameters()


class ModelParts:
    """What a module saves, by its name in the model without torch's wrappers.

    Attributes:
        values: parameters and persistent buffers, tied ones under each of their names.
        extra: other values, with the modules that load them by set_extra_state(); None if only the
            module's own load_state_dict() can.
        name_of: the first name of each parameter.
        names_of_tied: those of parameters that several blocks of a pipeline have.
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
        self.names_of_tied = [] if stage is None else stage.names_of_tied
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
        self._states, self._model = states_of(optimizer), model
        optimizer = self._states.optimizer
        self._states.make()
        params = params_in(optimizer.param_groups)
        strangers = [tuple(param.shape) for param in params if param not in model.name_of]
        if strangers:
            raise ValueError(
                f"the optimizer has a weight of shape {strangers[0]} that is not in the model"
            )
        self._own_groups = self._states.groups()
        # Offloaded values are read one by one; the other states of the same parameter are kept.
        is_stored = is_stored and self._states.is_stored
        stored = lru_cache(maxsize=1)(self._states.parts) if is_stored else None
        self._params = {model.name_of[param]: param for param in params}
        self.parts: dict[Path, Any] = {}
        for name, param in self._params.items():
            self.parts |= self._parts_of(name, param, stored)
        own_names = [
            {
                model.name_of[param]: label
                for param, label in zip(
                    own["params"], native.get(USER_NAMES) or native["params"], strict=True
                )
            }
            for own, native in zip(optimizer.param_groups, self._own_groups, strict=True)
        ]
        # Stages and experts of other ranks have other parameters.
        everyone = [*zip(*all_gathered(own_names, group), strict=True)]
        self.groups = []
        for own, of_ranks in zip(self._own_groups, everyone, strict=True):
            names = {name: of_user for names in of_ranks for name, of_user in names.items()}
            named = {USER_NAMES: [*names.values()]} if USER_NAMES in own else {}
            self.groups.append(deepcopy({**own, **named, "params": [*names]}))

    def _parts_of(
        self, name: str, param: Any, stored: Callable[[Any], State] | None
    ) -> dict[Path, Any]:
        found: dict[Path, Any] = {}
        flat_states = self._states.flat
        span, has_owner = self._states.place(param)
        for key, value in self._states.parts(param).items():
            part = value
            if has_owner and isinstance(value, Tensor):
                part = value.detach()  # the owner has all of it
            elif isinstance(value, Tensor):
                is_flat = key in flat_states
                part = self._model.of_state(value, param, key, span, is_flat=is_flat)
            elif not has_owner:
                self._model.check_state(value, param, key, span)
            if stored is not None and isinstance(part, Tensor) and part.dim():
                read = partial(lambda key: local_of(stored(param)[key]), key)
                part = part_of(part).like(local_of(part), read)
            if value is not None:
                found["optimizer", name, key] = part
        return found

    def load(self, given: dict[Path, Any], groups: list[State]) -> None:
        """Loads the values of known paths, and options by group; an empty dict has none."""
        for own, other in zip(self._own_groups, groups, strict=True):
            given_options = {k: v for k, v in other.items() if k not in ("params", USER_NAMES)}
            own.update(deepcopy(given_options))
        states: dict[Any, State] = {param: {} for param in self._params.values()}
        for path, part in self.parts.items():
            if path in given:
                param, key, value = self._params[path[1]], path[2], given[path]
                if isinstance(part, Tensor) and self._states.is_in_place:
                    fill(part, value)
                    value = self._states.parts(param)[key]
                elif isinstance(part, Tensor):
                    value = own_elements(part, value)
                states[param][key] = value
        self._states.load(self._own_groups, states)
