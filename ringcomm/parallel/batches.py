"""Batches of a training step, and losses of parts with different numbers of labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcomm.torch_names import tree_leaves

__all__ = ["Batch", "PartLoss", "count_items", "make_batch", "parameters_of"]

IGNORED = -100  # torch's default ignore_index


def count_items(targets: Tensor, num_parts: int = 1) -> list[int]:
    """The numbers of labels in equal parts of the targets, which weight the losses of parts.

    Integers other than -100 count as labels. Targets of other dtypes count by rows.
    """
    kind = targets.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool or targets.is_meta:
        return [0 if targets.is_meta else len(part) for part in targets.chunk(num_parts)]
    parts = [part.ne(IGNORED).sum() for part in targets.chunk(num_parts)]
    counts: list[int] = torch.stack(parts).tolist()
    return counts


class PartLoss:
    """A loss function for parts of a batch, whose losses sum to the mean over all labels.

    A loss_fn with a parameter num_items_in_batch must return a sum that is divided by it, as
    transformers' losses do. Any other loss_fn is a mean over the labels of a part.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self._loss_fn = loss_fn
        self.takes_num_items = "num_items_in_batch" in parameters_of(loss_fn)

    def __call__(
        self, output: Any, targets: Tensor, num_own: int, num_items: float, *, as_mean: bool = False
    ) -> Tensor:
        """The loss of a part with `num_own` of `num_items` labels; 0 for a part without labels.

        With as_mean, num_items_in_batch is not passed.
        """
        if self.takes_num_items and not as_mean:
            return self._loss_fn(output, targets, num_items_in_batch=num_items)
        if num_own:
            return self._loss_fn(output, targets) / (num_items / num_own)
        # A mean over no labels is NaN. Gradients of 0 keep the collectives of backward passes.
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        return sum((x.sum() * 0 for x in outputs), start=torch.zeros((), device=targets.device))


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The parameters of a function, by name."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


class Batch(NamedTuple):
    """The arguments of a model for rows of a batch, and the targets of the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any

    def chunk(self, num: int) -> list[Batch]:
        """Equal parts of the rows."""
        if num == 1:
            return [self]
        args = [arg.chunk(num) for arg in self.args]
        kwargs = {name: value.chunk(num) for name, value in self.kwargs.items()}
        return [
            Batch(tuple(a[i] for a in args), {n: v[i] for n, v in kwargs.items()}, targets)
            for i, targets in enumerate(self.targets.chunk(num))
        ]


def make_batch(
    inputs: Any,
    targets: Tensor | None,
    num_parts: int,
    device: torch.device,
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
        args = inputs if isinstance(inputs, tuple) else (inputs,)
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

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value

    kwargs = {name: moved(value) for name, value in kwargs.items()}
    return Batch(tuple(map(moved, args)), kwargs, moved(targets) if has_targets else None)
