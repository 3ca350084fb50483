"""Asks a loss function whether the losses of parts of a batch are those of the whole batch.

It is called with few rows and tokens of a batch, with labels that the batch has. Losses and their
gradients are compared: losses of a model that was just made are nearly equal, gradients are not.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.torch_names import tree_leaves, tree_map_only
from ringcomm.trace.program import unrecorded

_ADVICE = (
    ". Pass count_items=, a function of targets that returns the number of labels in loss_fn's"
    " mean. If loss_fn is no such mean, give it a parameter num_items_in_batch, and return a sum"
    " divided by it"
)
_NUM_ROWS, _NUM_TOKENS = 8, 16  # of a batch, and of a row
_TOLERANCE = 1e-3
_Part = tuple[list[int], Tensor]  # rows of a sample by their numbers, and their targets


def is_integer(targets: Tensor) -> bool:
    """Whether targets are labels, and not values."""
    kind = targets.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def is_label(targets: Tensor, label: int) -> Tensor:
    """Where targets have a label, which their dtype need not have."""
    return targets.long() == label


def disagreement(
    loss_fn: Callable[..., Tensor],
    kind: str,
    count: Callable[[Tensor], float] | None,
    ignored: int,
    output: Any,
    targets: Tensor,
    weights: Collection[Tensor] | None,
) -> str:
    """What a loss function does differently on parts of a micro-batch; "" if nothing.

    `kind` is "mean" over labels, "sum", or "num_items_in_batch": a sum that is divided by it.
    `count` returns the number of labels in targets; `ignored` does not count. Without it a sum is
    asked only whether it is divided. `weights` are those whose gradients the ranks average, if any.

    A random loss_fn, and an output without tensors of rows or with infinite values, is not asked.
    What a loss_fn keeps between its calls, and random numbers, are as before.
    """
    devices = [targets.device] if targets.device.type == "cuda" else []
    problem = ""
    with (
        _unchanged(loss_fn),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices),
        unrecorded(),
    ):
        for num_tokens in (_NUM_TOKENS, None):  # a loss may be for rows of one length
            try:
                sample = _Sample(loss_fn, ignored, output, targets, num_tokens)
                problem = _ask(sample, kind, count, weights)
            except Exception as error:
                problem = f"it raises {type(error).__name__} for some of the rows: {error}{_ADVICE}"
            if not problem:
                break
    return problem


def _ask(
    sample: "_Sample",
    kind: str,
    count: Callable[[Tensor], float] | None,
    weights: Collection[Tensor] | None,
) -> str:
    if not sample.can_be_used():
        return ""
    num = {"num_items_in_batch": 1.0} if kind == "num_items_in_batch" else {}
    if weights is not None and (shape := sample.trained_beside(weights, **num)) is not None:
        return (
            f"it trains a tensor of shape {shape} that is not in the model, of which each rank has"
            " its own gradient: make it a part of the model, or detach() it"
        )
    if num and not sample.is_divided():
        return "for twice the num_items_in_batch its loss is not half as large" + _ADVICE
    if count is None:
        return ""
    for parts in sample.questions():
        if num:
            both = _joined(parts)
            found, wanted = sample.num_used(both), count(both[1])
            if found is not None and found != wanted:
                num_labels = both[1].numel()
                return (
                    f"it uses {found} of {num_labels} labels, but num_items_in_batch counts"
                    f" {wanted:g}{_ADVICE}"
                )
            continue
        used = [part for part in parts if kind == "sum" or count(part[1])]
        counts = [count(targets) for _, targets in used]
        shares = [1.0 if kind == "sum" else own / sum(counts) for own in counts]
        if len(used) > 1 and not sample.adds_up(used, shares) and not sample.is_random(used[0]):
            return _not_weighted(kind, " and ".join(f"{own:g}" for own in counts))
    if num:
        return ""
    for row, other in sample.changed_values():
        with suppress(Exception):  # a value may be none that the loss knows
            counts = [count(row[1]), count(other[1])]
            shares = [1.0 if kind == "sum" else own / sum(counts) for own in counts]
            is_right = not all(counts) or sample.adds_up([row, other], shares, infinite=True)
            if not is_right and not sample.is_random(row):
                return _not_weighted(kind, f"{counts[0]:g} and, with other values, {counts[1]:g}")
    return ""


def _not_weighted(kind: str, counts: str) -> str:
    return (
        f"for parts of a batch with {counts} labels, its loss or gradient of the batch is not the"
        f" weighted {kind} of those of the parts{_ADVICE}"
    )


@contextmanager
def _unchanged(loss_fn: Any) -> Iterator[None]:
    """Restores what calls of a loss function change: attributes, buffers, variables of functions.

    That is of itself, of what it wraps, and of modules and objects to which it refers by name.
    """
    seen: dict[int, Any] = {}
    undo: list[Callable[[], Any]] = []
    waiting = [loss_fn]
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen or isinstance(holder, type | ModuleType | Tensor):
            continue
        seen[id(holder)] = holder
        table = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        undo.append(partial(_refill, table, table.copy()))
        for value in table.values():
            if isinstance(value, dict | list):
                waiting.append(value)
            elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                # By data: autograd may have saved it, and would see a write.
                undo.append(partial(value.data.copy_, value.data.clone()))
        if isinstance(holder, list):
            undo.append(partial(holder.__setitem__, slice(None), holder[:]))
        elif isinstance(holder, nn.Module):
            waiting += holder.children()
        elif isinstance(holder, MethodType):
            waiting += [holder.__self__, holder.__func__]
        elif isinstance(holder, partial):
            waiting += [holder.func, *holder.args, *holder.keywords.values()]
        elif isinstance(holder, FunctionType):
            waiting.append(getattr(holder, "__wrapped__", None))
            if holder.__globals__["__name__"].startswith("torch"):
                continue
            with suppress(ValueError):  # of a variable that is not set yet
                used = inspect.getclosurevars(holder)
                undo.append(partial(holder.__globals__.update, used.globals))
                for cell in holder.__closure__ or ():
                    undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                waiting += [*used.nonlocals.values(), *used.globals.values()]
    yield
    for restore in undo:
        restore()


def _refill(table: dict[Any, Any], kept: dict[Any, Any]) -> None:
    for name in table.keys() - kept.keys():
        del table[name]
    table.update(kept)


class _Sample:
    """Rows of a micro-batch, or tokens of them, of which batches are made.

    The first two differ most in how many labels count.
    """

    def __init__(
        self, loss_fn: Any, ignored: int, output: Any, targets: Tensor, num_tokens: int | None
    ) -> None:
        self._loss_fn, self._output = loss_fn, output
        targets, num = targets.detach().clone(), len(targets)
        leaves = [x.detach() for x in tree_leaves(output) if isinstance(x, Tensor)]
        self._by_row = [x.dim() > 0 and len(x) > 0 and len(x) % num == 0 for x in leaves]
        self._ignored = self._values = None
        totals = (targets.isnan(), targets.nan_to_num())
        by_sum, by_nan = (x.double().reshape(num, -1).sum(1) for x in reversed(totals))
        order = by_sum.argsort(stable=True)
        order = order[by_nan[order].argsort(stable=True)]
        spread = _spread(num)
        chosen = [int(order[0]), int(order[-1])]
        if is_integer(targets):
            if is_label(targets, ignored).any():
                self._ignored = ignored
            elif targets.lt(0).any():
                self._ignored = int(targets.min())
            is_valid = torch.ones_like(targets) == 1
            if self._ignored is not None:
                is_valid = ~is_label(targets, self._ignored)
            counts, valid = is_valid.reshape(num, -1).sum(1), targets[is_valid]
            fewest = counts.where(counts > 0, counts.max()).flip(0).argmin()
            chosen = [int(counts.argmax()), num - 1 - int(fewest)]
            # Labels can be anywhere if the output has their classes.
            if valid.numel() and any(_num_classes(x, targets) > int(valid.max()) for x in leaves):
                runs = [y[1:][y.diff() == 0] for y in targets.reshape(num, -1).long()]
                again = torch.cat([*runs, valid[:1].long()])  # such as ids of padding
                again = (
                    again[~is_label(again, self._ignored)] if self._ignored is not None else again
                )
                known = [valid.max(), valid.min(), valid.mode().values, again.mode().values]
                self._values = torch.stack([x.to(valid.dtype) for x in known]).unique()
        chosen += order[spread.to(order.device)].tolist()
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
        is_other = ~is_label(row.flatten(), self._ignored)
        return [int(place) for place in is_other.nonzero()]

    def can_be_used(self) -> bool:
        """Whether there are rows, and all values are finite."""
        return any(self._by_row) and all(bool(x.isfinite().all()) for y in self._rows for x in y)

    def questions(self) -> list[list[_Part]]:
        """Pairs of batches, different in their labels and in how many of them count."""
        first, last, *spread = self._targets
        if self._values is not None and self._ignored is not None:
            first, last = (
                row.where(~is_label(row, self._ignored), self._values[-1]) for row in (first, last)
            )
        size = first.numel()
        both: _Part = [1, 0], torch.cat([last, first])
        others = [both]
        if self._values is not None:
            rows = [1, 0] if size == 1 else [1]
            others = [(rows, both[1][: len(rows)] * 0 + value) for value in self._values]
        found: list[list[_Part]] = [[([0], first), other] for other in others]
        begin, end = (self._places(row) for row in self._targets[:2])
        if self._ignored is not None and begin and end:
            fewer: _Part = [1], self._only(last, end[-1:])
            if size == 1:
                fewer = [1, 0], torch.cat([self._only(last, []), first])
            kept = [begin[0], begin[len(begin) // 2], begin[-1]]
            found.append([([0], self._only(first, kept)), fewer])
        if len(spread) > 1:
            found.append([([idx + 2], targets) for idx, targets in enumerate(spread)])
        return found

    def changed_values(self) -> Iterator[tuple[_Part, _Part]]:
        """A row of values, and one with other values where it has most alike, or in one place."""
        row = self._targets[0].flatten()
        if not row.is_floating_point():
            return
        alike = row.isnan() if row.isnan().any() else row == row.mode().values
        each = torch.eye(len(row), dtype=torch.bool, device="cpu")
        for where in (alike, *each[_spread(len(row))]):
            # 0 and 1 are classes, probabilities and weights of any loss.
            other = row.where(~where.to(row.device), (row != 1).to(row.dtype))
            yield ([0], self._targets[0]), ([1], other.view_as(self._targets[0]))

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
        self._root, self._leaves = loss.grad_fn, trained
        grads: Any = [None] * len(trained)
        if loss.requires_grad and trained:
            grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
        by_leaf = iter(grads)
        found = [next(by_leaf) if x.requires_grad else None for x in leaves]
        zeros = [torch.zeros_like(x) for x in leaves]
        both = zip(found, zeros, strict=True)
        return [loss.detach(), *(zero if grad is None else grad for grad, zero in both)]

    def adds_up(self, parts: list[_Part], weights: list[float], *, infinite: bool = False) -> bool:
        """Whether the loss and gradient of all parts are the weighted sums of those of each.

        `infinite`: the answer where one of them is infinite or NaN.
        """
        whole = self._run(_joined(parts))
        ran = [[x * w for x in self._run(part)] for part, w in zip(parts, weights, strict=True)]
        for found, *own, by in zip(whole, *ran, [False, *self._by_row], strict=True):
            if not all(x.isfinite().all() for x in (found, *own)):
                return infinite
            if not _is_near(found, torch.cat(own) if by else sum(own), own):
                return False
        return True

    def is_divided(self) -> bool:
        """Whether the loss of a row is divided by num_items_in_batch."""
        row = [0], self._targets[0]
        once, twice = (self._run(row, num_items_in_batch=num) for num in (1.0, 2.0))
        both = zip(once, twice, strict=True)
        return self.is_random(row, num_items_in_batch=1.0) or all(
            _is_near(one, 2 * half, [one]) for one, half in both
        )

    def trained_beside(self, weights: Collection[Tensor], **more: Any) -> tuple[int, ...] | None:
        """The shape of a leaf that the loss has a gradient for, beside outputs and weights."""
        self._run(([0], self._targets[0]), **more)
        known = {id(x) for x in (*weights, *self._leaves)}
        seen, waiting = set(), [self._root]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                return tuple(leaf.shape)
            waiting += [before for before, _ in node.next_functions]
        return None

    def is_random(self, part: _Part, **more: Any) -> bool:
        """Whether the loss of one batch is another each time."""
        one, other = (self._run(part, **more)[0] for _ in range(2))
        return not one.allclose(other, 0, 0, equal_nan=True)

    def num_used(self, part: _Part) -> int | None:
        """The number of labels with a gradient; None if the output does not have their classes."""
        if self._values is None:
            return None
        idxs, targets = part
        used: list[Any] = []
        for value in self._values:  # a label that a model is sure of has no gradient
            labels = value.expand(targets.shape)
            if self._ignored is not None:
                labels = labels.where(~is_label(targets, self._ignored), targets)
            for grad in self._run((idxs, labels), num_items_in_batch=1.0)[1:]:
                if _num_classes(grad, targets):
                    is_last = grad.dim() == 2 or grad.shape[:-1] == targets.shape
                    used.append(grad.ne(0).any(-1 if is_last else 1))
        return int(sum(used).ne(0).sum()) if all(found.any() for found in used) else 0


def _is_near(found: Tensor, wanted: Any, parts: list[Tensor]) -> bool:
    bound = max(_TOLERANCE, 3 * torch.finfo(found.dtype).eps)
    scale = max(x.double().norm() for x in (found, *parts))
    return bool((found - wanted).double().norm() <= bound * scale)  # False for NaN


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


def _spread(num: int) -> Tensor:
    """Some of `num` indices, from the first to the last."""
    at = torch.linspace(0, num - 1, min(num, _NUM_ROWS), dtype=torch.float64, device="cpu")
    return at.round().long()
