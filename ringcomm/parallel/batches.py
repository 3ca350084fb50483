"""Batches of a training step, and losses of parts with different numbers of labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcomm.torch_names import tree_leaves, tree_map_only

IGNORED = -100  # torch's default ignore_index


def count_items(targets: Tensor, num_parts: int = 1) -> list[int]:
    """The numbers of labels in equal parts of the targets, which weight the losses of parts.

    Integers other than -100 count as labels. Targets of other dtypes count by rows.
    """
    kind = targets.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool or targets.is_meta:
        return [0 if targets.is_meta else len(part) for part in targets.chunk(num_parts)]
    parts = [part.ne(IGNORED).sum() for part in targets.chunk(num_parts)]
    return torch.stack(parts).tolist()


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
        zero = torch.zeros((), dtype=torch.float32, device=targets.device)
        return sum((x.sum() * 0 for x in outputs), start=zero)


class StepLoss:
    """The losses of a step's parts, one after the other.

    Attributes:
        scale: a factor of the losses for the gradients.
        parts: the losses so far, detached and without `scale`.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], reduction: str) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", got {reduction!r}')
        self._is_sum = reduction == "sum"
        self._part_loss = PartLoss(loss_fn)
        self.scale = 1.0
        self.parts: list[Tensor] = []

    def begin(self, targets: tuple[Tensor, ...], num_parts: int, num_items: float | None) -> None:
        """Counts the labels of one tensor of targets, if losses are to be computed."""
        self.parts = []
        self._as_mean = self._is_sum or num_items is None
        counts = [1] * num_parts  # of a sum
        if targets and not self._is_sum:
            counts = count_items(targets[0], num_parts)
            if num_items is None and not sum(counts):
                raise ValueError("no label in the target counts: all are -100")
            if num_items is None and self._part_loss.takes_num_items and len(set(counts)) > 1:
                raise ValueError(
                    f"micro-batches have {counts} labels, and loss_fn has a parameter"
                    " num_items_in_batch: pass num_items=, the number of labels that it counts"
                )
        self._num_own = counts
        self._num_items = 1 if self._is_sum else sum(counts) if num_items is None else num_items

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of the next part."""
        num_own = self._num_own[len(self.parts)]
        loss = self._part_loss(output, target, num_own, self._num_items, as_mean=self._as_mean)
        if loss.dim() != 0:
            raise ValueError(
                f"loss_fn must return a scalar, got shape {tuple(loss.shape)}: does it have "
                'reduction="none"?'
            )
        self.parts.append(loss.detach())
        return loss * self.scale


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The parameters of a function, by name."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


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

    def chunk(self, num: int) -> list[Batch]:
        """Equal parts of the rows."""
        if num == 1:
            return [self]

        def part(idx: int) -> Batch:
            return tree_map_only(Tensor, lambda x: x.chunk(num)[idx], self)

        return [part(idx) for idx in range(num)]


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

    batch = Batch(args, kwargs, targets if has_targets else None)
    return tree_map_only(Tensor, lambda x: x if x.is_meta else x.to(device), batch)
