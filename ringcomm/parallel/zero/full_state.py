"""Optimizer state in torch's own format, whole: between world sizes, stages and plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ringcomm.parallel.zero.optimizer import ZeroOptimizer


def full_state_dict(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """The state_dict() that the optimizer given to zero.shard() would have now.

    On every rank, in memory of the CPU; a weight's state also has "master", its values in float32,
    where the model's weights have 16 bits.

    Collective: gathers the states of one bucket or weight after the other.
    """
    states = dict(optimizer._whole_states())
    numbers = {param: number for number, param in enumerate(_params(optimizer))}
    groups = []
    for group in optimizer.param_groups:
        of_group = {key: value for key, value in group.items() if key != "params"}
        groups.append({**of_group, "params": [numbers[param] for param in group["params"]]})
    by_number = {numbers[param]: state for param, state in states.items() if state}
    return {"state": dict(sorted(by_number.items())), "param_groups": groups}


def load_full_state_dict(optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Takes this rank's shards of a whole state, one of torch's optimizers among them.

    Args:
        optimizer: sharded, of any world size and stage.
        state_dict: the same on all ranks; its parameter groups have as many parameters.

    Raises:
        ValueError: the groups or a state's shape do not fit; nothing has been written.

    Collective where weights have 16 bits and masters: these are gathered.
    """
    given, mine = state_dict["param_groups"], optimizer.param_groups
    sizes = [len(group["params"]) for group in given], [len(group["params"]) for group in mine]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state has parameter groups of {sizes[0]} parameters, and the optimizer of"
            f" {sizes[1]}"
        )
    states = {}
    for saved, group in zip(given, mine, strict=True):
        for number, param in zip(saved["params"], group["params"], strict=True):
            state = state_dict["state"].get(number, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                    raise ValueError(
                        f"{key} of parameter {number} is {tuple(value.shape)}, and the parameter"
                        f" {tuple(param.shape)}"
                    )
            states[param] = state
    for saved, group in zip(given, mine, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer._take_states(states)


def _params(optimizer: ZeroOptimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]
