"""The optimizer of a server's keys, and whole optimizer states by the names of parameters."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.parameter_server.keys import Key, MakeOptimizer, optimizer_of

__all__ = ["ServerOptimizer", "merged", "misfit", "packed", "unpacked"]

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
        self._groups = groups
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
        """As torch's, but by the parameters' keys, and groups without parameters."""
        own = self._optimizer.state_dict()
        index_of = {param: index for index, param in self._params.items()}
        state: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self._optimizer.param_groups, own["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                values = dict(own["state"].get(number, {}))
                if self._keeps_master:
                    values["master"] = param.detach()
                if values:
                    state[index_of[param]] = values
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in own["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def load(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        """Takes its keys of weights, and of a whole state that misfit() has accepted, if any.

        Args:
            weights: by name. A state's "master" comes first.
            state: by names of parameters; empty to keep the optimizer's.
            names: by key.
        """
        of_names = state.get("state", {})
        with torch.no_grad():
            for index, param in self._params.items():
                param.copy_(of_names.get(names[index], {}).get("master", weights[names[index]]))
        of_params: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        for saved, group in zip(state.get("param_groups", ()), self._groups, strict=False):
            begin = len(of_params)
            for index in (index for index in group["params"] if index in self._params):
                given = of_names.get(names[index], {})
                of_params[len(of_params)] = {k: v for k, v in given.items() if k != "master"}
            groups.append({**saved, "params": list(range(begin, len(of_params)))})
        if groups:
            used = {number: values for number, values in of_params.items() if values}
            self._optimizer.load_state_dict({"state": used, "param_groups": groups})


def packed(state: Mapping[str, Any]) -> Tensor:
    """As bytes, uint8."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(message: Tensor) -> dict[str, Any]:
    """The state of packed()."""
    state: dict[str, Any] = torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=True)
    return state


def merged(
    parts: Sequence[Mapping[str, Any]], groups: Groups, names: Sequence[str]
) -> dict[str, Any]:
    """The whole state by names of parameters, of the servers' parts by key."""
    states = {index: values for part in parts for index, values in part["state"].items()}
    whole = [
        {**hyper, "params": [names[index] for index in group["params"]]}
        for hyper, group in zip(parts[0]["param_groups"], groups, strict=True)
    ]
    return {
        "state": {names[index]: states[index] for index in sorted(states)},
        "param_groups": whole,
    }


def misfit(state: Mapping[str, Any], groups: Groups, keys: Sequence[Key]) -> str | None:
    """Why a whole state by names does not fit the keys; None if it does."""
    sizes = [len(group["params"]) for group in state.get("param_groups", ())]
    ours = [len(group["params"]) for group in groups]
    if sizes != ours:
        return (
            f"the state has parameter groups of {sizes} parameters, and the parameter server of"
            f" {ours}"
        )
    of_names = state.get("state", {})
    shapes = {key.name: key.shape for key in keys}
    strangers = sorted(of_names.keys() - shapes.keys())
    if strangers:
        return f"the state has {strangers[:3]}, which the parameter server does not train"
    for name, values in of_names.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shapes[name]:
                return f"{key} of {name} is {tuple(value.shape)}, and {name} {tuple(shapes[name])}"
    return None
