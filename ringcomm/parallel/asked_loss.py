"""Asks a loss function whether the losses of parts of a batch are those of the whole batch.

It is called with few rows and tokens of a batch, with labels that the batch has. Losses and their
gradients are compared: losses of a model that was just made are nearly equal, gradients are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringcomm.torch_names import tree_leaves, tree_map_only

_NUM_TOKENS = 16  # of a row
_TOLERANCE = 1e-3


class _Part(NamedTuple):
    """A batch: rows of a sample, and their targets."""

    rows: list[int]
    targets: Tensor


def is_integer(targets: Tensor) -> bool:
    """Whether targets are labels, and not values."""
    kind = targets.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def disagreement(
    loss_fn: Callable[..., Tensor],
    kind: str,
    count: Callable[[Tensor], float],
    ignored: int,
    output: Any,
    targets: Tensor,
) -> str:
    """What a loss function does differently on parts of a batch; "" if nothing.

    `kind` is "mean" over labels, "sum", or "num_items_in_batch": a sum that is divided by it.
    `count` returns the number of labels in targets; `ignored` does not count. Output and targets
    are those of a micro-batch.

    A random loss_fn, and an output without tensors of rows or with infinite values, is not asked.
    Buffers of a loss_fn that is a module, and random numbers, are as before.
    """
    buffers = list(loss_fn.buffers()) if isinstance(loss_fn, nn.Module) else []
    values = [buffer.clone() for buffer in buffers]
    devices = [targets.device] if targets.device.type == "cuda" else []
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
            problem = ""
            for num_tokens in (_NUM_TOKENS, None):  # a loss may be for rows of one length
                try:
                    sample = _Sample(loss_fn, ignored, output, targets, num_tokens)
                    problem = _ask(sample, kind, count) if sample.can_be_used() else ""
                except Exception as error:
                    problem = f"it raises {type(error).__name__} for some of the rows: {error}"
                if not problem:
                    break
            return problem
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)


def _ask(sample: _Sample, kind: str, count: Callable[[Tensor], float]) -> str:
    for parts in sample.questions():
        if kind == "num_items_in_batch":
            both = sample.joined(parts)
            found, wanted = sample.num_used(both), count(both.targets)
            if found is not None and found != wanted:
                return (
                    f"it uses {found} of {both.targets.numel()} labels, of which {wanted:g} are"
                    " counted"
                )
            continue
        counts = [count(part.targets) for part in parts]
        if kind == "mean" and not all(counts):
            continue
        weights = [1.0, 1.0] if kind == "sum" else [num / sum(counts) for num in counts]
        if not sample.adds_up(parts, weights) and not sample.is_random(parts[0]):
            labels = " and ".join(f"{num:g}" for num in counts)
            combined = "sum" if kind == "sum" else "weighted mean"
            return (
                f"for parts of a batch with {labels} labels, its loss or gradient of the batch is"
                f" not the {combined} of those of the parts"
            )
    return ""


class _Sample:
    """Two rows of a micro-batch, of which batches are made."""

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        ignored: int,
        output: Any,
        targets: Tensor,
        num_tokens: int | None,
    ) -> None:
        self._loss_fn, self._output = loss_fn, output
        targets, num = targets.detach().clone(), len(targets)
        leaves = [x.detach() for x in tree_leaves(output) if isinstance(x, Tensor)]
        self._by_row = [x.dim() > 0 and len(x) > 0 and len(x) % num == 0 for x in leaves]
        self._ignored = self._values = None
        chosen = [0, num - 1]
        if is_integer(targets):
            if targets.eq(ignored).any():
                self._ignored = ignored
            elif targets.lt(0).any():
                self._ignored = int(targets.min())
            valid = targets.flatten()
            if self._ignored is not None:
                valid = valid[valid != self._ignored]
                counts = targets.ne(self._ignored).reshape(num, -1).sum(1)
                chosen = [
                    int(counts.argmax()),
                    int(counts.masked_fill(counts == 0, counts.max() + 1).argmin()),
                ]
            # Labels can be anywhere if the output has their classes.
            if valid.numel() and any(_num_classes(x, targets) > int(valid.max()) for x in leaves):
                self._values = [int(f) for f in (valid.max(), valid.min(), valid.mode().values)]
        rows = [
            [x.chunk(num)[idx] if by else x for idx in chosen] for x, by in self._leaves(leaves)
        ]
        self._targets = [targets[idx : idx + 1] for idx in chosen]
        has_tokens = targets.dim() == 2 and all(
            x.shape[:2] == targets.shape for x, by in self._leaves(leaves) if by
        )
        if num_tokens is not None and has_tokens:
            for place, row in enumerate(self._targets):
                begin = min(max(0, self._valid(row)[0] - 1), max(0, row.shape[1] - num_tokens))
                window = slice(begin, begin + num_tokens)
                self._targets[place] = row[:, window]
                for (_, by), both in zip(self._leaves(leaves), rows, strict=True):
                    if by:
                        both[place] = both[place][:, window]
        self._rows = rows

    def _leaves(self, leaves: Sequence[Any]) -> Any:
        return zip(leaves, self._by_row, strict=True)

    def can_be_used(self) -> bool:
        """Whether there are rows, and all values are finite."""
        rows = [row for both in self._rows for row in both]
        return any(self._by_row) and all(bool(row.isfinite().all()) for row in rows)

    def _valid(self, row: Tensor) -> list[int]:
        """The places of labels in a row that are not those of `ignored`; [0] if there are none."""
        if self._ignored is None:
            return list(range(row.numel()))
        return row.flatten().ne(self._ignored).nonzero().flatten().tolist() or [0]

    def questions(self) -> list[list[_Part]]:
        """Pairs of batches, different in their labels and in how many of them count."""
        first, last = self._targets
        if self._values is not None and self._ignored is not None:
            first, last = (
                row.masked_fill(row == self._ignored, self._values[2]) for row in self._targets
            )
        is_single = first.numel() == 1
        others = _Part([1, 0], torch.cat([last, first]))
        if self._values is not None:
            rows = [1, 0] if is_single else [1]
            shape = len(rows), *first.shape[1:]
            num = len(rows) * first.numel()
            labels = list(itertools.islice(itertools.cycle(self._values), num))
            others = _Part(rows, first.new_tensor(labels).view(shape))
        found = [[_Part([0], first), others]]
        if self._ignored is not None:
            begin, end = self._valid(self._targets[0]), self._valid(self._targets[1])
            kept = self._only(first, [begin[0], begin[len(begin) // 2], begin[-1]])
            fewer = _Part([1], self._only(last, [end[-1]]))
            if is_single:
                fewer = _Part([1, 0], torch.cat([self._only(last, []), first]))
            found.append([_Part([0], kept), fewer])
        return found

    def _only(self, row: Tensor, places: list[int]) -> Tensor:
        """A row of targets in which only these labels count."""
        made = torch.full_like(row, self._ignored).flatten()  # type: ignore[arg-type]
        made[places] = row.flatten()[places]
        return made.view(row.shape)

    def joined(self, parts: list[_Part]) -> _Part:
        """One batch of two."""
        return _Part([*parts[0].rows, *parts[1].rows], torch.cat([part.targets for part in parts]))

    def _run(self, part: _Part, **more: Any) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch, and its gradient for each tensor of the output."""
        values = [
            torch.cat([both[idx] for idx in part.rows]) if by else both[0].clone()
            for both, by in self._leaves(self._rows)
        ]
        leaves = [x.requires_grad_(x.is_floating_point() or x.is_complex()) for x in values]
        copies = iter([x.clone() for x in leaves])  # which a loss may overwrite
        output = tree_map_only(Tensor, lambda _: next(copies), self._output)
        loss = self._loss_fn(output, part.targets.clone(), **more)
        trained = [x for x in leaves if x.requires_grad]
        grads: Any = [None] * len(trained)
        if loss.requires_grad and trained:
            grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        by_leaf = iter(grads)
        found = [next(by_leaf) if x.requires_grad else None for x in leaves]
        zeros = (
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
        )
        return loss.detach().double(), list(zeros)

    def adds_up(self, parts: list[_Part], weights: list[float]) -> bool:
        """Whether the loss and gradient of both parts are the weighted sums of those of each."""
        loss, grads = self._run(self.joined(parts))
        ran = [self._run(part) for part in parts]
        losses = torch.stack([own * w for (own, _), w in zip(ran, weights, strict=True)])
        if not _is_near(loss, losses.sum(), torch.cat([losses, loss[None]])):
            return False
        for idx, (grad, by) in enumerate(self._leaves(grads)):
            own = [g[idx] * w for (_, g), w in zip(ran, weights, strict=True)]
            wanted = torch.cat(own) if by else own[0] + own[1]
            if not _is_near(grad, wanted, torch.cat([grad.flatten(), wanted.flatten()])):
                return False
        return True

    def is_random(self, part: _Part) -> bool:
        """Whether the loss of one batch is another each time."""
        return not self._run(part)[0].allclose(self._run(part)[0], 0, 0, equal_nan=True)

    def num_used(self, part: _Part) -> int | None:
        """The number of labels with a gradient; None if the output does not have their classes."""
        for grad in self._run(part, num_items_in_batch=1)[1]:
            if _num_classes(grad, part.targets):
                used = grad.ne(0)
                axis = -1 if grad.shape[:-1] == part.targets.shape or grad.dim() == 2 else 1
                return int(used.any(axis).sum())
        return None


def _num_classes(values: Tensor, targets: Tensor) -> int:
    """The number of classes in an output that has one value for each of them and each label."""
    shape = values.shape
    if values.dim() == 0:
        return 0
    if shape[:-1] == targets.shape or (values.dim() == 2 and shape[0] == targets.numel()):
        return shape[-1]
    if values.dim() > 2 and (shape[0], *shape[2:]) == tuple(targets.shape):
        return shape[1]
    return 0


def _is_near(found: Tensor, wanted: Tensor, scale: Tensor) -> bool:
    """Whether values are equal but for rounding; NaN is not."""
    if not found.numel():
        return True
    eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    bound = max(_TOLERANCE, 3 * eps) * scale.abs().max()
    return bool((found - wanted).abs().max() <= bound)
