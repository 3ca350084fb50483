"""The optimizer of a server's keys, and whole optimizer states in torch's format."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.parameter_server.keys import Key, MakeOptimizer, optimizer_of

__all__ = ["ServerOptimizer", "check_state", "merged", "packed", "unpacked"]

Groups = Sequence[Mapping[str, Any]]  # of all keys; "params" are indices of keys


class ServerOptimizer:
    """torch's optimizer over a server's copies of its keys, on the CPU.

    Args:
        make: the user's.
        groups: of all keys.
        values: by the index of each key of this server, the initial value of its copy.
        keeps_master: whether states contain the values, since workers have rounded ones.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Groups,
        values: Mapping[int, Tensor],
        *,
        keeps_master: bool,
    ) -> None:
        self._keeps_master = keeps_master
        self._groups, self._numbers = groups, _number_params(groups)
        self._params = {
            index: nn.Parameter(value.detach().to("cpu", copy=True))
            for index, value in values.items()
        }
        self._optimizer = optimizer_of(make, groups, self._params)

    @property
    def weights(self) -> list[Tensor]:
        """In the order of keys."""
        return [param.detach() for param in self._params.values()]

    def step(self, gradient: Sequence[Tensor]) -> None:
        """One update, with a gradient by key; cast to its parameter's dtype."""
        for param, part in zip(self._params.values(), gradient, strict=True):
            param.grad = part.to(param.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but with the parameters' numbers among those of all servers."""
        own = self._optimizer.state_dict()
        index_of = {param: index for index, param in self._params.items()}
        state: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self._optimizer.param_groups, own["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                values = dict(own["state"].get(number, {}))
                if self._keeps_master:
                    values["master"] = param.detach()
                if values:
                    state[self._numbers[index_of[param]]] = values
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in own["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this server's part of a whole state that check_state() has accepted."""
        of_params: dict[int, Mapping[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        for saved, group in zip(state["param_groups"], self._groups, strict=True):
            begin = len(of_params)
            for index in (index for index in group["params"] if index in self._params):
                values = dict(state["state"].get(self._numbers[index], {}))
                master = values.pop("master", None)
                if master is not None:
                    with torch.no_grad():
                        self._params[index].copy_(master)
                of_params[len(of_params)] = values
            groups.append({**saved, "params": list(range(begin, len(of_params)))})
        used = {number: values for number, values in of_params.items() if values}
        self._optimizer.load_state_dict({"state": used, "param_groups": groups})


def _number_params(groups: Groups) -> dict[int, int]:
    """By key, its number in an optimizer's state_dict()."""
    keys = [key for group in groups for key in group["params"]]
    return {key: number for number, key in enumerate(keys)}


def packed(state: Mapping[str, Any]) -> Tensor:
    """As bytes, uint8."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(message: Tensor) -> dict[str, Any]:
    """The state of packed()."""
    state: dict[str, Any] = torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=True)
    return state


def merged(parts: Sequence[Mapping[str, Any]], groups: Groups) -> dict[str, Any]:
    """The whole state, of the servers' parts."""
    numbers = _number_params(groups)
    states = {number: values for part in parts for number, values in part["state"].items()}
    whole = [
        {**hyper, "params": [numbers[index] for index in group["params"]]}
        for hyper, group in zip(parts[0]["param_groups"], groups, strict=True)
    ]
    return {"state": dict(sorted(states.items())), "param_groups": whole}


def check_state(state: Mapping[str, Any], groups: Groups, keys: Sequence[Key]) -> None:
    """Raises ValueError if a whole state does not fit the keys."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if sizes != ours:
        raise ValueError(
            f"the state has parameter groups of {sizes} parameters, and the parameter server of"
            f" {ours}"
        )
    for index, number in _number_params(groups).items():
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != keys[index].shape:
                raise ValueError(
                    f"{name} of parameter {number} is {tuple(value.shape)}, and"
                    f" {keys[index].name} {tuple(keys[index].shape)}"
                )
