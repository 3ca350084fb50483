"""Keys of a parameter server: one per trainable parameter; their servers, packing and groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Key",
    "MakeOptimizer",
    "Packing",
    "assign",
    "groups_of_keys",
    "keys_of",
    "optimizer_of",
    "trainable",
]

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Key:
    """One trainable parameter.

    Attributes:
        wire_dtype: what its gradients and values are cast to when they travel.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    wire_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return math.prod(self.shape) * self.wire_dtype.itemsize


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name the parameters that require grad, in the model's order."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def keys_of(model: nn.Module, wire_dtype: torch.dtype | None) -> list[Key]:
    """One for each parameter that requires grad, in the model's order.

    A parameter no wider than wire_dtype is sent in its own dtype.

    Raises:
        ValueError: there is none, or one is no dense tensor with values.
    """
    keys = []
    for name, param in trainable(model).items():
        if isinstance(param, nn.UninitializedParameter) or type(param.data) is not Tensor:
            raise ValueError(
                f"parameters are plain tensors, but {name} is a {type(param).__name__}"
            )
        if param.layout != torch.strided or param.is_meta:
            raise ValueError(f"parameters are dense and have values, but {name} does not")
        sent_as = param.dtype
        if wire_dtype is not None and param.is_floating_point():
            sent_as = min(sent_as, wire_dtype, key=lambda dtype: dtype.itemsize)
        keys.append(Key(name, param.shape, param.dtype, sent_as))
    if not keys:
        raise ValueError("no parameter requires grad: there is nothing to serve")
    return keys


def assign(sizes: Sequence[int], num_bins: int) -> list[int]:
    """The bin of each size: the largest first, each to the bin that has least so far.

    Every rank finds the same. The fullest bin has at most 4/3 of the best possible (Graham 1969).
    """
    loads = [0] * num_bins
    bins = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        bins[index] = min(range(num_bins), key=loads.__getitem__)
        loads[bins[index]] += sizes[index]
    return bins


class Packing:
    """Tensors one behind the other in a buffer of bytes, without padding.

    Wide dtypes stand first, so that every one is aligned.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> None:
        self._shapes, self._dtypes = list(shapes), list(dtypes)
        self._begins = [0] * len(self._shapes)
        self.num_bytes = 0
        for index in sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize):
            self._begins[index] = self.num_bytes
            self.num_bytes += math.prod(self._shapes[index]) * self._dtypes[index].itemsize

    @classmethod
    def of_keys(cls, keys: Iterable[Key]) -> Packing:
        """How gradients and values of the keys travel."""
        keys = list(keys)
        return cls([key.shape for key in keys], [key.wire_dtype for key in keys])

    def new_buffer(self) -> Tensor:
        """For one set of tensors: uint8 [num_bytes] on the CPU."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, in the order of their shapes; they share its memory."""
        found = []
        for begin, shape, dtype in zip(self._begins, self._shapes, self._dtypes, strict=True):
            num_bytes = math.prod(shape) * dtype.itemsize
            found.append(buffer[begin : begin + num_bytes].view(dtype).view(shape))
        return found

    def pack(self, tensors: Sequence[Tensor | None], buffer: Tensor | None = None) -> Tensor:
        """Copies tensors of any device into a buffer, cast; zeros for None."""
        buffer = self.new_buffer() if buffer is None else buffer
        with torch.no_grad():
            for view, tensor in zip(self.views(buffer), tensors, strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor)
        return buffer


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
