"""Batches, and their loss from the losses of their parts, which differ in numbers of labels."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.parallel.flat_collectives import current_stream_of, side_stream
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


def check_values(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ValueError for tensors on the meta device."""
    for name, value in named:
        if value.is_meta:
            raise ValueError(
                f"{name} is on the meta device, but this rank's stages need its values"
            )


class Batch(NamedTuple):
    """The arguments of a model for rows of a batch, and the targets of the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Batch":
        """The batch on a device, except tensors on the meta device."""
        move = lambda x: x if x.is_meta else x.to(device, non_blocking=non_blocking)  # noqa: E731
        return tree_map_only(Tensor, move, self)

    def sent_to(self, device: torch.device) -> "tuple[Batch, torch.Event | None]":
        """As to(), without a wait; and the event after which pinned memory may be written."""
        if device.type == "cpu":
            return self.to(device), None
        if not any(isinstance(x, Tensor) and x.is_pinned() for x in tree_leaves(self)):
            return self.to(device, non_blocking=True), None
        # On a stream of its own: a wait for the event is none for the steps before.
        current, stream = torch.accelerator.current_stream(device), side_stream(device, "batches")
        with current_stream_of(device, stream):
            moved = self.to(device, non_blocking=True)
        current.wait_stream(stream)
        tree_map_only(Tensor, lambda x: None if x.is_meta else x.record_stream(current), moved)
        return moved, stream.record_event()

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

_OF_CLASSES = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    functional.cross_entropy,
    functional.nll_loss,
    cross_entropy,
)
_OF_VALUES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    functional.mse_loss,
    functional.l1_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
# With these a loss of the lists is no mean over labels or values.
_OTHERS = ("num_items", "size_average", "reduce")


class PartLoss:
    """A loss function for parts of a batch, whose losses sum to the mean over all labels.

    Attributes:
        blocks: of a pipeline whose output it takes; None for a model.
        model: has the weights that loss_fn may train, if the gradients of several ranks are
            averaged.
        shown: what the loss is, for messages and comparison of ranks.
        problem: why the losses of parts cannot be weighted, or "".
    """

    blocks: Any = None
    model: nn.Module | None = None

    def __init__(
        self,
        loss_fn: Loss,
        count_items: CountItems | None = None,
        *,
        is_sum: bool = False,
        is_whole: bool = False,
    ) -> None:
        """`is_sum`: losses of parts are added up. `is_whole`: there is only one part."""
        self._loss_fn, self._is_sum = loss_fn, is_sum
        self._divides = not is_sum and "num_items_in_batch" in parameters_of(loss_fn)
        known = _known(loss_fn)
        self._count: CountItems = count_items or (len if known is None else known.count)
        function = getattr(loss_fn, "func", loss_fn)
        name = getattr(function, "__qualname__", type(function).__name__)
        self.shown = f"{name} with count_items" if count_items else name
        self.problem = ""
        if self._divides:
            self._count = count_items or _count_of_next(loss_fn)
        elif known is not None:
            self.shown = f"{self.shown}({known.shown})"
            if known.reduction != (wanted := "sum" if is_sum else "mean") and not is_whole:
                self.problem = f"loss_fn must have reduction={wanted!r}, got {known.reduction!r}"
        elif not (is_sum or is_whole or count_items):
            self.problem = f"loss_fn {name} does not say which labels its mean is over: {SAY}"

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

    def labels(self, targets: Tensor, num_parts: int = 1) -> list[float]:
        """The numbers of labels in equal parts of the targets, which weight the losses of parts."""
        if targets.is_meta:
            return [0.0] * num_parts
        found = [self._count(part) for part in targets.chunk(num_parts)]
        device = next((x.device for x in found if isinstance(x, Tensor)), "cpu")
        sums = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in found]
        counts: list[float] = torch.stack(sums).tolist()
        if not all(0 <= count < math.inf for count in counts):
            raise ValueError(f"count_items must return a number of labels, got {counts}")
        return counts

    def __call__(self, output: Any, targets: Tensor, num_own: float, num_items: float) -> Tensor:
        """The loss of a part with `num_own` of `num_items` labels; 0 for a part without labels."""
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
        if self.model is not None and loss.requires_grad:
            _check_trained(loss, output, self.model)
            self.model = None  # once
        return loss if self._is_sum or self._divides else loss / (num_items / num_own)


def _check_trained(loss: Tensor, output: Any, model: nn.Module) -> None:
    """Raises TypeError if a loss of a model's output has a gradient for a weight of its own."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    weights = [*model.parameters(), *(own for unit in units for own in gathered_weights(unit))]
    known = {id(weight) for weight in weights}
    seen = {x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)}
    waiting = [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise TypeError(
                f"loss_fn trains a tensor of shape {tuple(leaf.shape)} that is not in the model, of"
                " which each rank has its own gradient: make it a part of the model, or detach() it"
            )
        waiting += [before for before, _ in node.next_functions]


SAY = (
    "pass count_items=, such as count_items=lambda labels: labels.ne(-100).sum() for a mean over"
    " the labels other than -100 or count_items=len for one over rows. Or give it a parameter"
    " num_items_in_batch, and return a sum divided by it"
)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The parameters of a function, or of a module's forward, by name."""
    function = unwrapped(getattr(function, "func", function))  # of a partial
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


class _Known(NamedTuple):
    """What a loss of torch or ringcomm says of itself."""

    count: CountItems  # of the labels or values in its mean
    reduction: str
    shown: str


def _known(loss_fn: Loss) -> _Known | None:
    """What a loss of torch or ringcomm was given, or a partial of one; None for another one."""
    from ringcomm.nn import CrossEntropyLoss  # which imports ringcomm.parallel

    given: dict[str, Any] = {}
    function = loss_fn
    if isinstance(loss_fn, partial):
        function, given = loss_fn.func, loss_fn.keywords
        if loss_fn.args or any(given.get(name) is not None for name in _OTHERS):
            return None
    kind = function = unwrapped(function)
    if isinstance(function, nn.Module):
        kind = next(base for base in type(function).__mro__ if "forward" in vars(base))
        given = {**vars(function), "weight": getattr(function, "weight", None)}
        given |= getattr(function, "options", {})
    of_classes = any(kind is own for own in (*_OF_CLASSES, CrossEntropyLoss))
    if not of_classes and not any(kind is own for own in _OF_VALUES):
        return None
    weight = given.get("weight")
    if kind in (functional.mse_loss, functional.l1_loss) and weight is not None:
        return None  # a mean by weights of one shape with the whole output
    names = ("ignore_index", "label_smoothing", "reduction")
    shown = [f"{name}={given[name]!r}" for name in names if name in given]
    shown += [] if weight is None else [f"weight of sum {float(weight.sum()):.9g}"]
    count: CountItems = Tensor.numel
    if of_classes:
        count = partial(_count_labels, ignored=given.get("ignore_index", IGNORED), weight=weight)
    return _Known(count, given.get("reduction", "mean"), ", ".join(shown))


def _count_labels(targets: Tensor, ignored: int, weight: Tensor | None) -> Any:
    """Labels by their class weights, as torch's denominator; of probabilities their number."""
    if not is_integer(targets):
        return targets.numel()
    counted = targets.long() != ignored
    if weight is None:
        return counted.sum()
    return (weight.to(targets.device)[targets.long() * counted] * counted).sum()


def count_of_mean(targets: Tensor, ignored: int = IGNORED) -> Any:
    """The labels other than -100, or the rows of targets that are no labels."""
    return _count_labels(targets, ignored, None) if is_integer(targets) else len(targets)


def _count_of_next(loss_fn: Loss) -> CountItems:
    """What num_items_in_batch counts for a loss; transformers' shifts labels itself."""
    options = {name: param.default for name, param in parameters_of(loss_fn).items()}
    ignored = {**options, **getattr(loss_fn, "keywords", {})}.get("ignore_index")
    name = getattr(getattr(loss_fn, "func", loss_fn), "__name__", "")
    begin = 1 if name in ("ForCausalLMLoss", "causal_lm_loss") else 0
    number = ignored if isinstance(ignored, int) else IGNORED
    return lambda y: count_of_mean(y[..., begin:] if begin else y, number)


def is_integer(targets: Tensor) -> bool:
    """Whether targets are labels, and not values."""
    kind = targets.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
