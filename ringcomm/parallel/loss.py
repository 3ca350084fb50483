"""Batches, and their loss from the losses of their parts, which differ in numbers of labels."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ringcomm.parallel.loss_check import disagreement, is_integer, is_label
from ringcomm.parallel.model.describe import unwrapped
from ringcomm.torch_names import gathered_weights, tree_leaves, tree_map_only


def check_rows(named: Sequence[tuple[str, Any]], num_parts: int) -> None:
    """Raises TypeError or ValueError if values are not tensors with equal parts of as many rows."""
    for name, value in named:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be tensors, got {type(value).__name__}")
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

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device, except tensors on the meta device."""
        return tree_map_only(Tensor, lambda x: x if x.is_meta else x.to(device), self)

    def chunk(self, num: int) -> "list[Batch]":
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
                "inputs and targets must be tensors, or one dict as a data loader returns it; got"
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


IGNORED = -100  # torch's default ignore_index
Loss = Callable[..., Tensor]
CountItems = Callable[[Tensor], Any]

_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_OF_CLASSES_TOO = (nn.functional.cross_entropy, nn.functional.nll_loss)


class LossError(ValueError):
    """A loss function does not weight parts of a batch by the labels that are counted."""


class Labels(NamedTuple):
    """The numbers of labels in parts of a batch, and which kinds of labels it has.

    Kinds are bits: 1 for labels that do not count, or NaN, 2 for negative ones that count.
    """

    counts: list[float]
    kinds: int


class PartLoss:
    """A loss function for parts of a batch, whose losses sum to the mean over all labels.

    A loss_fn with a parameter num_items_in_batch must return a sum that is divided by it, as
    transformers' losses do. Any other loss_fn is a mean over the labels of a part, or with is_sum
    a sum. It is asked whether that is so in the first step, and in a few later ones.

    Attributes:
        asking: whether loss_fn is asked in this step; answer() ends that.
        blocks: of a pipeline whose output it takes; None for a model.
        model: has the weights that loss_fn may train, if the gradients of several ranks are
            averaged.
    """

    blocks: Any = None

    def __init__(
        self,
        loss_fn: Loss,
        count_items: CountItems | None = None,
        *,
        is_sum: bool = False,
        asks: bool = True,
    ) -> None:
        self._loss_fn, self._count_items, self._is_sum = loss_fn, count_items, is_sum
        self._divides = not is_sum and "num_items_in_batch" in parameters_of(loss_fn)
        self._ignored, self._weight = _declared(loss_fn)
        self._known = 0 if asks else -1  # kinds of labels about which it need not be asked
        self._num_steps = 0
        self.asking = False
        self.model: nn.Module | None = None
        self._problem = ""

    # ---- how the model is called; a model of transformers with its own loss differs

    def checked(self, batch: Batch) -> Batch:
        """The batch with the arguments of the model, or of a pipeline's first block."""
        if self.blocks is not None and not batch.args:
            raise TypeError(
                "the first block of a pipeline takes a tensor or a tuple of tensors, got a dict"
            )
        return batch

    def labels_of(self, batch: Batch) -> Tensor:
        """The targets that labels() counts."""
        return batch.targets

    def arguments(self, targets: Tensor, num_own: float, num_items: float) -> dict[str, Any]:
        """The model's further arguments for the loss of a part with `num_own` labels."""
        return {}

    def result_of(self, output: Any) -> Any:
        """What users get of the model's output."""
        return output

    # ---- labels

    def labels(self, targets: Tensor, num_parts: int = 1) -> Labels:
        """The numbers of labels in equal parts of the targets, which weight the losses of parts.

        They are those of count_items. By default integers count, except -100 or the ignore_index
        of loss_fn, by their class weights if it has them, and targets of other dtypes by rows.
        """
        if targets.is_meta:
            return Labels([0.0] * num_parts, 0)
        parts = targets.chunk(num_parts)
        if not is_integer(targets):
            rule = self._count_items or len
            kinds = int(targets.isnan().any())
            if targets.is_floating_point():
                kinds |= 2 * int(targets.lt(0).any())
            return Labels([float(rule(part)) for part in parts], kinds)
        sums = [(self._count_items or self._counted)(part) for part in parts]
        sums += [is_label(targets, self._ignored).sum(), targets.lt(0).sum()]
        facts = [torch.as_tensor(x, dtype=torch.float64, device=targets.device) for x in sums]
        *counts, num_ignored, num_negative = torch.stack(facts).tolist()
        is_odd = num_negative > (num_ignored if self._ignored < 0 else 0)
        return Labels(counts, int(num_ignored > 0) | 2 * int(is_odd))

    def _counted(self, targets: Tensor) -> Tensor:
        counted = ~is_label(targets, self._ignored)
        if self._weight is None:
            return counted.sum()
        return (self._weight.to(targets.device)[targets.long() * counted] * counted).sum()

    def expect(self, kinds: int) -> None:
        """Asks loss_fn in this step if there are new kinds of labels, or it is the 2**nth step."""
        kinds |= 4 << self._num_steps.bit_length()
        self._num_steps += 1
        if kinds & ~self._known:
            self.asking = True
            self._known |= kinds

    def answer(self) -> LossError | None:
        """The error of this step, if loss_fn was asked and disagrees."""
        problem, self._problem = self._problem, ""
        self.asking = False
        return LossError(problem) if problem else None

    def __call__(self, output: Any, targets: Tensor, num_own: float, num_items: float) -> Tensor:
        """The loss of a part with `num_own` of `num_items` labels; 0 for a part without labels."""
        if self.asking and num_own and not self._problem:
            self._problem = self._ask(output, targets)
        if not num_own and not self._is_sum and not self._divides:
            # A mean over no labels is NaN. Gradients of 0 keep the collectives of backward passes.
            outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            zero = torch.zeros((), dtype=torch.float32, device=targets.device)
            return sum(((x * 0).nan_to_num().sum() for x in outputs), start=zero)
        more = {"num_items_in_batch": num_items} if self._divides else {}
        loss = self._loss_fn(output, targets, **more)
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
            raise ValueError(
                f"loss_fn must return a scalar tensor, got {found}: return the loss alone, and not"
                ' with reduction="none"'
            )
        return loss if self._is_sum or self._divides else loss / (num_items / num_own)

    def _ask(self, output: Any, targets: Tensor) -> str:
        """What is wrong with the loss function; "" if nothing."""
        kind = "num_items_in_batch" if self._divides else "sum" if self._is_sum else "mean"
        rule = f"integers other than {self._ignored}" if is_integer(targets) else "rows"
        rule = rule if self._count_items is None else "as count_items counts them"
        count = None if self._divides and self._count_items else lambda y: self.labels(y).counts[0]
        weights: list[Any] | None = None
        if self.model is not None:
            units = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
            gathered = [weight for unit in units for weight in gathered_weights(unit)]
            weights = [*self.model.parameters(), *gathered]
        ignored = self._ignored
        problem = disagreement(self._loss_fn, kind, count, ignored, output, targets, weights)
        what = "sum divided by num_items_in_batch" if self._divides else kind
        return problem and (
            f"loss_fn must be a {what} over the labels of its targets ({rule}), but {problem}"
        )


class StepLoss:
    """The losses of a pipeline's micro-batches, one after the other.

    Attributes:
        part_loss: the loss of one of them.
        scale: a factor of the losses for the gradients.
        parts: the losses so far, detached and without `scale`.
    """

    def __init__(
        self, loss_fn: Loss | PartLoss, reduction: str, count_items: CountItems | None
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", got {reduction!r}')
        self._is_sum = reduction == "sum"
        self._is_given = isinstance(loss_fn, PartLoss)  # then its owner says when it is asked
        self.part_loss = (
            loss_fn
            if isinstance(loss_fn, PartLoss)
            else PartLoss(loss_fn, count_items, is_sum=self._is_sum)
        )
        self.scale = 1.0
        self.parts: list[Tensor] = []

    def begin(self, targets: tuple[Tensor, ...], num_parts: int, num_items: float | None) -> None:
        """Counts the labels of one tensor of targets, if losses are to be computed."""
        self.parts = []
        self._num_own, self._num_items = [1.0] * num_parts, 1.0 if num_items is None else num_items
        if not targets:
            return
        labels = self.part_loss.labels(targets[0], num_parts)
        if not self._is_sum:
            self._num_own = labels.counts
            if num_items is None:
                self._num_items = sum(labels.counts)
            if not self._num_items:
                raise ValueError("no label in the target counts: all are -100")
        if not self._is_given and (num_parts > 1 or num_items is not None):
            self.part_loss.expect(labels.kinds)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss of the next part."""
        num_own = self._num_own[len(self.parts)]
        loss = self.part_loss(output, target, num_own, self._num_items)
        self.parts.append(loss.detach())
        return loss * self.scale


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The parameters of a function, or of a module's forward, by name."""
    function = unwrapped(getattr(function, "func", function))  # of a partial
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _declared(loss_fn: Loss) -> tuple[int, Tensor | None]:
    """The ignore_index of a loss function, and its class weights, where it has them by name."""
    given = getattr(loss_fn, "keywords", {})  # of a partial
    defaults = {name: param.default for name, param in parameters_of(loss_fn).items()}
    function = unwrapped(getattr(loss_fn, "func", loss_fn))

    def named(name: str) -> Any:
        return given.get(name, getattr(function, name, defaults.get(name)))

    is_of_classes = isinstance(function, _OF_CLASSES) or function in _OF_CLASSES_TOO
    ignored, weight = named("ignore_index"), named("weight") if is_of_classes else None
    return ignored if isinstance(ignored, int) else IGNORED, weight
