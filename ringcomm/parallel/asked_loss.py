"""Asks a loss function whether the losses of parts of a batch are those of the whole batch.

It is called with few rows and tokens of a batch, with labels that the batch has. Losses and their
gradients are compared: losses of a model that was just made are nearly equal, gradients are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.torch_names import tree_leaves, tree_map_only

_NUM_TOKENS = 16  # of a row
_TOLERANCE = 1e-3
_Part = tuple[list[int], Tensor]  # rows of a sample, and their targets


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
    """What a loss function does differently on parts of a micro-batch; "" if nothing.

    `kind` is "mean" over labels, "sum", or "num_items_in_batch": a sum that is divided by it.
    `count` returns the number of labels in targets; `ignored` does not count.

    A random loss_fn, and an output without tensors of rows or with infinite values, is not asked.
    Buffers of a loss_fn that is a module, and random numbers, are as before.
    """
    buffers = list(loss_fn.buffers()) if isinstance(loss_fn, nn.Module) else []
    values = [buffer.clone() for buffer in buffers]
    devices = [targets.device] if targets.device.type == "cuda" else []
    problem = ""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
        for num_tokens in (_NUM_TOKENS, None):  # a loss may be for rows of one length
            try:
                problem = _ask(_Sample(loss_fn, ignored, output, targets, num_tokens), kind, count)
            except Exception as error:
                problem = f"it raises {type(error).__name__} for some of the rows: {error}"
            if not problem:
                break
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
    return problem


def _ask(sample: _Sample, kind: str, count: Callable[[Tensor], float]) -> str:
    if not sample.can_be_used():
        return ""
    for parts in sample.questions():
        if kind == "num_items_in_batch":
            both = _joined(parts)
            found, wanted = sample.num_used(both), count(both[1])
            if found is not None and found != wanted:
                return f"it uses {found} of {both[1].numel()} labels, of which {wanted:g} count"
            continue
        counts = [count(targets) for _, targets in parts]
        if kind == "mean" and not all(counts):
            continue
        weights = [1.0, 1.0] if kind == "sum" else [num / sum(counts) for num in counts]
        if not sample.adds_up(parts, weights) and not sample.is_random(parts[0]):
            return (
                f"for parts of a batch with {counts[0]:g} and {counts[1]:g} labels, its loss or"
                f" gradient of the batch is not the weighted {kind} of those of the parts"
            )
    return ""


class _Sample:
    """Two rows of a micro-batch, or tokens of them, of which batches are made."""

    def __init__(
        self, loss_fn: Any, ignored: int, output: Any, targets: Tensor, num_tokens: int | None
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
            is_valid = torch.ones_like(targets) == 1
            if self._ignored is not None:
                is_valid = targets != self._ignored
            counts, valid = is_valid.reshape(num, -1).sum(1), targets[is_valid]
            fewest = counts.where(counts > 0, counts.max()).flip(0).argmin()
            chosen = [int(counts.argmax()), num - 1 - int(fewest)]
            # Labels can be anywhere if the output has their classes.
            if valid.numel() and any(_num_classes(x, targets) > int(valid.max()) for x in leaves):
                self._values = torch.stack([valid.max(), valid.min(), valid.mode().values]).unique()
        self._targets = [targets[idx : idx + 1] for idx in chosen]
        self._rows = [
            [x.narrow(0, len(x) // num * idx, len(x) // num) if by else x for idx in chosen]
            for x, by in zip(leaves, self._by_row, strict=True)
        ]
        is_tokens = [x.shape[:2] == targets.shape for x in leaves]
        if num_tokens is None or is_tokens != self._by_row:
            return
        for place, row in enumerate(self._targets):
            begin = max(0, min((self._places(row) or [0])[0] - 1, row.shape[1] - num_tokens))
            window = slice(begin, begin + num_tokens)
            self._targets[place] = row[:, window]
            for rows, by in zip(self._rows, self._by_row, strict=True):
                rows[place] = rows[place][:, window] if by else rows[place]

    def _places(self, row: Tensor) -> list[int]:
        """Where the labels are that are not those of `ignored`."""
        if self._ignored is None:
            return list(range(row.numel()))
        found: list[int] = row.flatten().ne(self._ignored).nonzero().flatten().tolist()
        return found

    def can_be_used(self) -> bool:
        """Whether there are rows, and all values are finite."""
        return any(self._by_row) and all(bool(x.isfinite().all()) for y in self._rows for x in y)

    def questions(self) -> list[list[_Part]]:
        """Pairs of batches, different in their labels and in how many of them count."""
        first, last = self._targets
        if self._values is not None and self._ignored is not None:
            first, last = (
                row.where(row != self._ignored, self._values[-1]) for row in (first, last)
            )
        size = first.numel()
        both: _Part = [1, 0], torch.cat([last, first])
        others = [both]
        if self._values is not None:
            rows = [1, 0] if size == 1 else [1]
            others = [(rows, both[1][: len(rows)] * 0 + value) for value in self._values]
        found: list[list[_Part]] = [[([0], first), other] for other in others]
        begin, end = (self._places(row) for row in self._targets)
        if self._ignored is not None and begin and end:
            fewer: _Part = [1], self._only(last, end[-1:])
            if size == 1:
                fewer = [1, 0], torch.cat([self._only(last, []), first])
            kept = [begin[0], begin[len(begin) // 2], begin[-1]]
            found.append([([0], self._only(first, kept)), fewer])
        return found

    def _only(self, row: Tensor, places: list[int]) -> Tensor:
        """A row of targets in which only these labels count."""
        made = torch.full_like(row, self._ignored or 0).flatten()
        made[places] = row.flatten()[places]
        return made.view(row.shape)

    def _run(self, part: _Part, **more: Any) -> list[Tensor]:
        """The loss of a batch, and its gradient for each tensor of the output."""
        idxs, targets = part
        leaves = [
            torch.cat([rows[idx] for idx in idxs]) if by else rows[0].clone()
            for rows, by in zip(self._rows, self._by_row, strict=True)
        ]
        trained = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        copies = iter([x.clone() for x in leaves])  # which a loss may overwrite
        output = tree_map_only(Tensor, lambda _: next(copies), self._output)
        loss = self._loss_fn(output, targets.clone(), **more)
        grads = iter(())
        if loss.requires_grad and trained:
            grads = iter(torch.autograd.grad(loss.sum(), trained, materialize_grads=True))
        found = (next(grads, None) if x.requires_grad else None for x in leaves)
        both = zip(found, leaves, strict=True)
        return [loss.detach().double(), *(torch.zeros_like(x) if g is None else g for g, x in both)]

    def adds_up(self, parts: list[_Part], weights: list[float]) -> bool:
        """Whether the loss and gradient of both parts are the weighted sums of those of each."""
        whole = self._run(_joined(parts))
        ran = [[x * w for x in self._run(part)] for part, w in zip(parts, weights, strict=True)]
        for found, one, other, by in zip(whole, *ran, [False, *self._by_row], strict=True):
            wanted = torch.cat([one, other]) if by else one + other
            bound = max(_TOLERANCE, 3 * torch.finfo(found.dtype).eps)
            scale = max(x.double().norm() for x in (found, one, other))
            if not (found - wanted).double().norm() <= bound * scale:  # NaN
                return False
        return True

    def is_random(self, part: _Part) -> bool:
        """Whether the loss of one batch is another each time."""
        return not self._run(part)[0].allclose(self._run(part)[0], 0, 0, equal_nan=True)

    def num_used(self, part: _Part) -> int | None:
        """The number of labels with a gradient; None if the output does not have their classes."""
        if self._values is None:
            return None
        idxs, targets = part
        used: list[Any] = []
        for value in self._values:  # a label that a model is sure of has no gradient
            labels = value.expand(targets.shape)
            if self._ignored is not None:
                labels = labels.where(targets != self._ignored, targets)
            for grad in self._run((idxs, labels), num_items_in_batch=1.0)[1:]:
                if _num_classes(grad, targets):
                    is_last = grad.dim() == 2 or grad.shape[:-1] == targets.shape
                    used.append(grad.ne(0).any(-1 if is_last else 1))
        return int(sum(used).ne(0).sum()) if all(found.any() for found in used) else 0


def _joined(parts: list[_Part]) -> _Part:
    """One batch of two."""
    return [idx for rows, _ in parts for idx in rows], torch.cat([y for _, y in parts])


def _num_classes(values: Tensor, targets: Tensor) -> int:
    """The number of classes in an output that has one value for each of them and each label."""
    shape = values.shape
    if shape[:-1] == targets.shape or (len(shape) == 2 and shape[0] == targets.numel()):
        return shape[-1]
    is_second = len(shape) > 2 and (shape[0], *shape[2:]) == tuple(targets.shape)
    return shape[1] if is_second else 0
