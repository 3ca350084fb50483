"""torch's optimizer over a server's copies of its keys, and its part of a whole state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.parameter_server.keys import Key, assign
from ringcomm.parallel.parameter_server.param_groups import MakeOptimizer, optimizer_of
from ringcomm.parallel.parameter_server.saved_state import number_params

__all__ = ["ServerOptimizer"]


class ServerOptimizer:
    """An optimizer over some keys.

    Args:
        make: of the user.
        groups: of all keys; "params" are indices of keys.
        values: by the index of each key of this server, what its copy starts from.
        keys: all of them.
        devices: the copies are spread over them by bytes.
        keeps_master: whether states have the values as well, since workers have rounded ones.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[Mapping[str, Any]],
        values: Mapping[int, Tensor],
        keys: Sequence[Key],
        devices: Sequence[torch.device],
        keeps_master: bool,
    ) -> None:
        self._keeps_master = keeps_master
        self._numbers = number_params(groups)
        placed = assign([keys[index].num_bytes for index in values], len(devices))
        self._params = {
            index: nn.Parameter(value.detach().to(devices[place], copy=True))
            for (index, value), place in zip(values.items(), placed, strict=True)
        }
        self._groups = groups
        self._optimizer = optimizer_of(make, groups, self._params)

    @property
    def weights(self) -> list[Tensor]:
        """In the order of keys."""
        return [param.detach() for param in self._params.values()]

    def step(self, gradient: Sequence[Tensor]) -> None:
        """One update, with a gradient by key; cast to its parameter's dtype and device."""
        for param, part in zip(self._params.values(), gradient, strict=True):
            param.grad = part.to(param.device, param.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but with the parameters' numbers among those of all servers."""
        own = self._optimizer.state_dict()
        index_of = {param: index for index, param in self._params.items()}
        state: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self._optimizer.param_groups, own["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                values = {
                    key: value.cpu() if isinstance(value, Tensor) else value
                    for key, value in own["state"].get(number, {}).items()
                }
                if self._keeps_master:
                    values["master"] = param.detach().cpu()
                if values:
                    state[self._numbers[index_of[param]]] = values
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in own["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this server's part of a whole state, which check_state() has seen."""
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
