"""Optimizers and schedulers of the tables: those that a user gives, and those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from pair_table import Case
from torch import nn
from torch.optim import lr_scheduler
from whole_optimizers import AdaLomoOracle, Averaged, Kron, SmoothLion, SmoothMuon, by_dimensions

from ringcomm.parallel import offload
from ringcomm.parallel.optimizer_classes import optimizers_of


def groups_of(case: Case, given: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups of the weights that a user gives to an optimizer."""
    has_frozen = case.get("system", "Lomo") not in ("Lomo", "AdaLomo")
    params = [param for param in given if param.requires_grad or has_frozen]
    if case.get("groups", "one") == "one":
        return [{"params": params}]
    decayed = {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1}
    others = {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0}
    return [decayed, others] if case["groups"] == "decay first" else [others, decayed]


ADAMW = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
ADAFACTOR = partial(torch.optim.Adafactor, lr=0.05, eps=(1e-6, 1e-3))
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.02, eps=1e-3, weight_decay=0.01),
    "adamw": ADAMW,
    "AdamW": ADAMW,
    "adafactor": ADAFACTOR,
    "Adafactor": ADAFACTOR,
    "a user's class": SmoothLion,
    "muon and adamw": lambda groups: by_dimensions(groups, partial(SmoothMuon, lr=0.1), ADAMW),
    "shampoo": partial(Kron, lr=0.05),
    "schedule-free": partial(Averaged, lr=0.2),
}


def torch_optimizer(case: Case, groups: list[dict[str, Any]]) -> Any:
    return OPTIMIZERS[case.get("optimizer", "adamw")](groups)


def offloaded(given: Any, **place: Any) -> Any:
    """The library's optimizer that makes the steps of a given one, with states elsewhere."""
    made = [offload.Offloaded(each, **place) for each in optimizers_of(given)]
    return made[0] if isinstance(given, torch.optim.Optimizer) else made


def optimizers_alone(case: Case, params: Iterable[nn.Parameter]) -> list[Any]:
    """Those that make a case's steps in one process."""
    groups = groups_of(case, params)
    kinds = (case.get("system"), case.get("trained by"), case.get("optimizer"))
    if "Lomo" in kinds:
        return [torch.optim.SGD(groups, 0.2, weight_decay=0.01)]
    if "AdaLomo" in kinds:
        return [AdaLomoOracle(groups)]
    found = [*optimizers_of(torch_optimizer(case, groups))]
    for each in found:
        if hasattr(each, "train"):  # schedule-free ones step in this mode
            each.train()
    return found


# ---- schedulers


class Plateau(lr_scheduler.ReduceLROnPlateau):
    """With losses that do not fall."""

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:  # type: ignore[override]
        super().step(metrics)


def _parts(optimizer: Any) -> list[Any]:
    return [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.7)]


def _cycle(optimizer: Any, kind: Any, *shares: float, **options: Any) -> Any:
    """Between shares of the learning rate; it cycles momentum where there is one."""
    lr = float(optimizer.param_groups[0]["lr"])
    has_momentum = any(g.get("momentum") or "betas" in g for g in optimizer.param_groups)
    return kind(
        optimizer, *(share * lr for share in shares), cycle_momentum=has_momentum, **options
    )


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
    "CyclicLR": lambda o: _cycle(o, lr_scheduler.CyclicLR, 0.25, 1.0, step_size_up=2),
    "OneCycleLR": lambda o: _cycle(o, lr_scheduler.OneCycleLR, 1.0, total_steps=6),
}


def scheduler_of(case: Case, optimizer: Any) -> Any:
    """One that changes every step."""
    return SCHEDULERS[case.get("kind of scheduler", "LambdaLR")](optimizer)


def schedulers_of_torch() -> set[str]:
    return set(lr_scheduler.__all__) - {"LRScheduler"}
