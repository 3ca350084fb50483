"""Whole states of optimizers, in torch's format: parameters numbered group behind group."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringcomm.parallel.parameter_server.keys import Key

__all__ = ["check_state", "copied", "merged", "number_params", "packed", "unpacked"]


def number_params(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """By key, its number in an optimizer's state_dict()."""
    keys = [key for group in groups for key in group["params"]]
    return {key: number for number, key in enumerate(keys)}


def packed(state: Mapping[str, Any]) -> Tensor:
    """As bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(message: Tensor) -> dict[str, Any]:
    """What was packed()."""
    state: dict[str, Any] = torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=True)
    return state


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict() on the CPU, in memory of its own."""
    return unpacked(packed(state))


def merged(
    parts: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The whole state, of the servers' parts."""
    numbers = number_params(groups)
    states = {number: values for part in parts for number, values in part["state"].items()}
    whole = [
        {**hyper, "params": [numbers[index] for index in group["params"]]}
        for hyper, group in zip(parts[0]["param_groups"], groups, strict=True)
    ]
    return {"state": dict(sorted(states.items())), "param_groups": whole}


def check_state(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], keys: Sequence[Key]
) -> None:
    """Raises ValueError where a whole state does not fit the keys."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if sizes != ours:
        raise ValueError(
            f"the state has parameter groups of {sizes} parameters, and the parameter server of"
            f" {ours}"
        )
    for index, number in number_params(groups).items():
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != keys[index].shape:
                raise ValueError(
                    f"{name} of parameter {number} is {tuple(value.shape)}, and"
                    f" {keys[index].name} {tuple(keys[index].shape)}"
                )
