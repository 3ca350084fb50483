"""Batches of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcomm.torch_names import tree_map_only


def check_rows(named: Sequence[tuple[str, Any]], num_parts: int) -> None:
    """Raises TypeError or ValueError if values are not tensors with equal parts of as many rows."""
    for name, value in named:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be tensors, got a {type(value).__name__}")
        num_rows = value.shape[0] if value.dim() else 0
        if num_rows == 0 or num_rows % num_parts:
            below = num_rows - num_rows % num_parts
            fit = f"{below} or {below + num_parts}" if below else f"{num_parts}"
            raise ValueError(
                f"{num_rows} rows of {name} do not divide into {num_parts} micro-batches: use {fit}"
                " rows, or another num_microbatches"
            )
        if num_rows != (first := named[0][1].shape[0]):
            raise ValueError(f"the {name} have {num_rows} rows, but the inputs {first}")


class Batch(NamedTuple):
    """The arguments of a model for rows of a batch, and the targets of the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, except tensors on the meta device."""
        return tree_map_only(Tensor, lambda x: x if x.is_meta else x.to(device), self)

    def chunk(self, num: int) -> list[Batch]:
        """Equal parts of the rows."""
        cut = [lambda x, idx=idx: x.chunk(num)[idx] for idx in range(num)]
        return [self] if num == 1 else [tree_map_only(Tensor, part, self) for part in cut]


def make_batch(
    inputs: Any,
    targets: Tensor | None,
    num_parts: int,
    *,
    has_targets: bool = True,
) -> Batch:
    """A batch from what a data loader gives: tensors, or a dict with "labels".

    Without has_targets labels are dropped, and the batch has no targets.

    Raises:
        TypeError: the inputs are of another type.
        ValueError: there are no labels, or rows do not divide into equal parts.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = {name: value for name, value in inputs.items() if value is not None}
        labels = kwargs.pop("labels", None)
        if has_targets and labels is None and targets is None:
            raise ValueError(
                f'the batch has no "labels", only {", ".join(kwargs)}: add them, or pass targets'
            )
        if labels is not None and targets is not None:
            raise ValueError('the batch has "labels": do not pass targets as well')
        targets = labels if targets is None else targets
    else:
        # A TensorDataset's batches are lists.
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        if has_targets and targets is None:
            raise ValueError('inputs that are tensors need targets; a dict may have "labels"')
    tensors = [*args, *([targets] if has_targets else [])]
    for value in tensors:
        if not isinstance(value, Tensor):
            raise TypeError(
                "inputs and targets must be tensors, or one dict as a data loader returns it; got a"
                f" {type(value).__name__}"
            )
    named = [*(("inputs", arg) for arg in args), *kwargs.items()]
    first = targets if has_targets else next((v for _, v in named if isinstance(v, Tensor)), None)
    num_rows = 0 if first is None else len(first)
    if num_rows == 0 or num_rows % num_parts:
        raise ValueError(f"{num_rows} rows do not divide into {num_parts} equal micro-batches")
    for name, value in named:
        rows = len(value) if isinstance(value, Tensor) and value.dim() else 0
        if name == "position_ids" and rows == 1:
            kwargs[name] = value.expand(num_rows, *value.shape[1:])
        elif rows != num_rows and (num_parts > 1 or name in ("inputs", "input_ids")):
            raise ValueError(f"{name} must be a tensor with {num_rows} rows, got {rows} rows")

    return Batch(args, kwargs, targets if has_targets else None)
