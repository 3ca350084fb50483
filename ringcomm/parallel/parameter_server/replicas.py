"""The models of one worker, on one device or several, as one set of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Replicas"]


class Replicas:
    """Modules of one architecture whose gradients are summed and whose weights are the same.

    Raises:
        ValueError: they do not have the same parameters, or one cannot travel.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self._params = [_trainable(module) for module in self.modules]
        first = self._params[0]
        for place, params in enumerate(self._params):
            _check(params)
            for name in first.keys() | params.keys():
                ours, theirs = (table.get(name) for table in (first, params))
                if ours is None or theirs is None or _kind(ours) != _kind(theirs):
                    raise ValueError(
                        f"replicas are copies of one model, but {name} of replica {place} is"
                        f" {_described(theirs)}, and of replica 0 {_described(ours)}"
                    )

    @property
    def params(self) -> list[nn.Parameter]:
        """Of the first replica, in the order of keys."""
        return list(self._params[0].values())

    def check_unchanged(self) -> None:
        """Raises ValueError where a model has other parameters than it had."""
        for module, known in zip(self.modules, self._params, strict=True):
            found = _trainable(module)
            for name in known.keys() | found.keys():
                if found.get(name) is not known.get(name):
                    raise ValueError(
                        f"{name} was added, replaced, frozen or thawed after the ParameterServer"
                        " was made: close() it, and make another one of the changed model"
                    )

    def gradients(self) -> dict[str, Tensor | None]:
        """By name, summed over the replicas on the device of the first; None where none has any."""
        sums: dict[str, Tensor | None] = {}
        for name in self._params[0]:
            parts = [params[name].grad for params in self._params]
            present = [part for part in parts if part is not None]
            if any(part.is_sparse for part in present):
                raise ValueError(
                    f"the gradient of {name} is sparse, and a parameter server sends dense"
                    " ones: give the embedding sparse=False"
                )
            total = present[0] if present else None
            if total is not None and len(present) > 1:
                total = total.clone()
                for part in present[1:]:
                    total += part.to(total.device)
            sums[name] = total
        return sums

    def clear_gradients(self) -> None:
        """None, in every replica."""
        for params in self._params:
            for param in params.values():
                param.grad = None

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Weights by name, into every replica."""
        for params in self._params:
            for name, value in values.items():
                params[name].copy_(value)

    def step(self, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor]) -> None:
        """One update with these gradients; those that are being accumulated stay."""
        first = self._params[0]
        accumulated = {name: param.grad for name, param in first.items()}
        for name, param in first.items():
            gradient = gradients.get(name)
            param.grad = None if gradient is None else gradient.to(param.device, param.dtype)
        optimizer.step()
        for name, param in first.items():
            param.grad = accumulated[name]
        if len(self._params) > 1:
            self.write({name: param.detach() for name, param in first.items()})


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _check(params: Mapping[str, nn.Parameter]) -> None:
    if not params:
        raise ValueError("no parameter requires grad: there is nothing to serve")
    for name, param in params.items():
        if isinstance(param, nn.UninitializedParameter) or type(param.data) is not Tensor:
            raise ValueError(
                f"parameters are plain tensors, but {name} is a {type(param).__name__}"
            )
        if param.layout != torch.strided or param.is_meta:
            raise ValueError(f"parameters are dense and have values, but {name} does not")


def _kind(param: nn.Parameter) -> tuple[torch.Size, torch.dtype]:
    return param.shape, param.dtype


def _described(param: nn.Parameter | None) -> str:
    return "missing or frozen" if param is None else f"{tuple(param.shape)} of {param.dtype}"
