"""The optimizer of a server's keys, and whole optimizer states by the names of parameters."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.parameter_server.messages import Key

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Groups = Sequence[Mapping[str, Any]]  # of all keys; "params" are names


class ServerOptimizer:
    """torch's optimizer over a server's copies of its keys, on the CPU.

    `groups` are those of all keys, `values` the initial values of this server's keys. A group is
    kept even if none of its parameters is here. States contain "master" if workers have rounded
    values.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Groups,
        values: Mapping[str, Tensor],
        *,
        keeps_master: bool,
    ) -> None:
        self._keeps_master = keeps_master
        self._params = {
            name: nn.Parameter(value.detach().to("cpu", copy=True))
            for name, value in values.items()
        }
        # In the order of the optimizer's groups.
        self._names = [[name for name in group["params"] if name in values] for group in groups]
        here = [
            {**group, "params": [self._params[name] for name in names]}
            for group, names in zip(groups, self._names, strict=True)
        ]
        self._optimizer = make(here)
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise TypeError(
                "make_optimizer must return a torch optimizer, got a"
                f" {type(self._optimizer).__name__}"
            )
        taken = [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]
        if taken != [[id(p) for p in group["params"]] for group in here]:
            raise ValueError(
                "make_optimizer returned an optimizer of other parameters, perhaps the model's:"
                " use the parameters that it gets as its argument"
            )

    @property
    def weights(self) -> list[Tensor]:
        """In the order of keys."""
        return [param.detach() for param in self._params.values()]

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        """One update, with a gradient by key, cast to its parameter's dtype.

        A parameter with None is not updated, as in torch's optimizers.
        """
        for param, part in zip(self._params.values(), gradient, strict=True):
            param.grad = None if part is None else part.to(param.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but by names; groups have those of this server's parameters."""
        own = self._optimizer.state_dict()
        order = list(chain(*self._names))  # torch's numbers are places in it
        state = {order[number]: dict(values) for number, values in own["state"].items()}
        for name, param in self._params.items():
            if self._keeps_master:
                state.setdefault(name, {})["master"] = param.detach()
        for group, names in zip(own["param_groups"], self._names, strict=True):
            group["params"] = names
        used = {name: values for name, values in state.items() if values}
        return {"state": used, "param_groups": own["param_groups"]}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Loads its keys from weights and, optionally, a whole state that misfit() has accepted.

        A state's "master" comes before a weight.
        """
        given = state.get("state", {})
        for name, param in self._params.items():
            param.copy_(given.get(name, {}).get("master", weights[name]))
        if not state.get("param_groups"):
            return
        numbers = {name: number for number, name in enumerate(chain(*self._names))}
        groups = [
            {**saved, "params": [numbers[name] for name in names]}
            for saved, names in zip(state["param_groups"], self._names, strict=True)
        ]
        used: dict[int, Any] = {}
        for name, number in numbers.items():
            values = {k: v for k, v in given.get(name, {}).items() if k != "master"}
            used |= {number: values} if values else {}
        self._optimizer.load_state_dict({"state": used, "param_groups": groups})


def misfit(state: Mapping[str, Any], groups: Groups, keys: Mapping[str, Key]) -> str | None:
    """Why a whole state by names does not fit the keys; None if it does."""
    sizes = [len(group["params"]) for group in state.get("param_groups", ())]
    ours = [len(group["params"]) for group in groups]
    if sizes != ours:
        return (
            f"the state has parameter groups of {sizes} parameters, but the parameter server has"
            f" {ours}"
        )
    of_names = state.get("state", {})
    strangers = sorted(of_names.keys() - keys.keys())
    if strangers:
        return f"the state has {strangers[:3]}, which the parameter server does not train"
    for name, values in of_names.items():
        for key, value in values.items():
            shape = keys[name].shape
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                return (
                    f"{key} of {name} must have the shape of {name}, {tuple(shape)}, got"
                    f" {tuple(value.shape)}"
                )
    return None
