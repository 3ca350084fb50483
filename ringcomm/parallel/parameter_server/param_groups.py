"""Parameter groups of keys, and the user's optimizer of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.parameter_server.keys import Key

__all__ = ["MakeOptimizer", "groups_of_keys", "optimizer_of"]

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def groups_of_keys(
    param_groups: Iterable[Any] | None, model: nn.Module, keys: Sequence[Key]
) -> list[dict[str, Any]]:
    """The groups, with indices of keys in place of parameters.

    Raises:
        ValueError: a parameter is not the model's, is frozen, or stands in no group or in two.
    """
    if param_groups is None:
        return [{"params": list(range(len(keys)))}]
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    index_of = {key.name: index for index, key in enumerate(keys)}
    given = list(param_groups)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        indices = []
        for param in (item[1] if isinstance(item, tuple) else item for item in params):
            index = index_of.get(names.get(param, ""))
            if index is None or index in seen:
                raise ValueError(
                    "param_groups have each parameter of the model that requires grad once; one of"
                    f" {tuple(param.shape)} is another's, frozen, or there twice"
                )
            seen.add(index)
            indices.append(index)
        found.append({**group, "params": indices})
    missing = [key.name for index, key in enumerate(keys) if index not in seen]
    if missing:
        raise ValueError(
            f"{missing[0]} requires grad and is in no parameter group: add it, or"
            " requires_grad_(False)"
        )
    return found


def optimizer_of(
    make: MakeOptimizer,
    groups: Sequence[Mapping[str, Any]],
    params: Mapping[int, nn.Parameter],
) -> torch.optim.Optimizer:
    """The user's, of those parameters that are here, by the indices of their keys.

    Groups stay where they are, also when none of their parameters is here.

    Raises:
        TypeError: no optimizer was made.
        ValueError: it has other parameters than it was given.
    """
    here = [
        {**group, "params": [params[index] for index in group["params"] if index in params]}
        for group in groups
    ]
    optimizer = make(here)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"make_optimizer returns a torch optimizer, got a {type(optimizer).__name__}"
        )
    given = [[id(param) for param in group["params"]] for group in here]
    taken = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    if given != taken:
        raise ValueError(
            "make_optimizer made an optimizer of other parameters than it was given, perhaps of the"
            " model's: use its argument"
        )
    return optimizer
