"""What a person's program has, for the tables of whole loops: losses, wrappers, layouts, dtypes."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from pair_table import Case
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

NUM_CLASSES = 37
IGNORED = -100
# The prefixes that wrappers put into names.
PREFIXES = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|base_model\.|inner\.")
# Systems whose user gives a weight that is frozen to the optimizer, too.
WITH_FROZEN = (
    *("data", "tensor", "pipeline", "mesh"),
    *("zero 1", "zero 2", "zero 3", "infinity"),
)

# ---- losses


def class_weights(like: Tensor) -> Tensor:
    """Weights of the classes in a dtype."""
    return torch.linspace(0.2, 3.0, NUM_CLASSES, dtype=torch.float64).to(like.dtype)


def weight_of(case: Case, labels: Tensor) -> float:
    """What divides the sum of losses: how many tokens are predicted, or their weights."""
    counted = labels[:, 1:][labels[:, 1:] != IGNORED]
    if case.get("loss") == "class weights":
        return float(class_weights(torch.zeros((), dtype=torch.float64))[counted].sum())
    return counted.numel()


def targets_of(case: Case, labels: Tensor) -> Tensor:
    """What the user's data loader gives: labels as they are, or of the next token."""
    kind = case.get("loss", "the model's")
    if kind in ("the model's", "shifts labels"):
        return labels
    after = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    return after.masked_fill(after == IGNORED, -1) if kind == "ignore_index=-1" else after


def loss_fn_of(case: Case) -> Callable[..., Tensor] | None:
    """The user's loss of a model's output and targets; None for the model's own."""

    kind = case.get("loss", "the model's")
    options: dict[str, Any] = {"ignore_index": -1} if kind == "ignore_index=-1" else {}

    def mean(output: Any, targets: Tensor) -> Tensor:
        logits = getattr(output, "logits", output)
        if kind == "shifts labels":
            logits, targets = logits[:, :-1], targets[:, 1:]
        if kind == "class weights":
            options["weight"] = class_weights(logits)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)

    def divided(output: Any, targets: Tensor, num_items_in_batch: float) -> Tensor:
        options["reduction"] = "sum"
        return mean(output, targets) / num_items_in_batch

    return {"the model's": None, "sum / num_items": divided}.get(kind, mean)


def loss_of(case: Case, model: Any, ids: Tensor, labels: Tensor, total: float) -> Tensor:
    """A part's share of the mean over all parts, whose weights sum to `total`; by hand."""
    targets, loss_fn = targets_of(case, labels), loss_fn_of(case)
    if loss_fn is None:
        loss: Tensor = model(input_ids=ids, labels=targets, num_items_in_batch=total).loss
        return loss
    output = model(input_ids=ids)
    if "num_items_in_batch" in inspect.signature(loss_fn).parameters:
        return loss_fn(output, targets, num_items_in_batch=total)
    return loss_fn(output, targets) * (weight_of(case, labels) / total)


# ---- models


class Adapted(nn.Module):
    """A linear layer with an adapter, as of PEFT."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 3, bias=False)
        self.up = nn.Linear(3, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.up(self.down(x))
        return out


class WithAdapters(nn.Module):
    """PEFT's module around a model: it has all attributes of the model, and hides its arguments."""

    active_peft_config = SimpleNamespace(is_prompt_learning=False)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> Any:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


class Around(nn.Module):
    """A module of the user's around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return self.inner(input_ids=input_ids, **kwargs)


class Convolution(nn.Module):
    """Over the tokens of rows, with a weight in channels_last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, (3, 1), padding=(1, 0), bias=False)
        nn.init.normal_(self.conv.weight, std=0.1)
        weight = self.conv.weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.transpose(1, 2)[..., None])
        return x + out[..., 0].transpose(1, 2)


def change_parts(case: Case, model: Any) -> None:
    """Gives a model the parts of a case: adapters, layouts of weights, frozen weights."""
    layers = model.model.layers
    if case.get("wrapper") == "adapters":
        model.requires_grad_(False)
        for layer in layers:
            for name in ("q_proj", "v_proj"):
                made = Adapted(getattr(layer.self_attn, name))
                nn.init.normal_(made.up.weight, std=0.2)
                setattr(layer.self_attn, name, made)
    if case.get("memory format") == "transposed":
        weight = layers[-1].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
    if case.get("memory format") == "channels_last":
        convolution = Convolution(model.config.hidden_size)
        layers[-1].input_layernorm = nn.Sequential(layers[-1].input_layernorm, convolution)
    if case.get("trained", "always") != "always":
        layers[0].requires_grad_(False)


def thaw(model: Any) -> None:
    """Makes the weights trained that change_parts() froze."""
    model.model.layers[0].requires_grad_(True)


def wrapped(case: Case, model: Any) -> Any:
    """A model in what a user has put around it, or in a layer of it."""
    match case.get("wrapper"):
        case "DDP":
            return DistributedDataParallel(model)
        case "torch.compile":
            # That the model is compiled is seen in other tables, and takes seconds.
            torch.compiler.set_stance("force_eager")
            return torch.compile(model, backend="eager")
        case "checkpoint_wrapper":
            model.model.layers[-1] = checkpoint_wrapper(model.model.layers[-1])
        case "adapters":
            return WithAdapters(model)
        case "a user's module":
            return Around(model)
    return model


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """With torch.set_default_dtype()."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- schedulers


class Plateau(lr_scheduler.ReduceLROnPlateau):
    """With losses that do not fall."""

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:  # type: ignore[override]
        super().step(metrics)


def _parts(optimizer: Any) -> list[Any]:
    return [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.7)]


def _cycles_momentum(optimizer: Any) -> bool:
    return any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)


def _lr(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


# By the name of torch's class.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 1 - step / 10),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, _parts(o), [2]),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(_parts(o)),
    "ReduceLROnPlateau": lambda o: Plateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, _lr(o) / 4, _lr(o), 2, cycle_momentum=_cycles_momentum(o)
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, _lr(o), total_steps=6, cycle_momentum=_cycles_momentum(o)
    ),
}


def schedulers_of_torch() -> set[str]:
    """The names of the schedulers of the torch that is installed."""
    return {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind)
        and issubclass(kind, lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and kind is not lr_scheduler.LRScheduler
    }
