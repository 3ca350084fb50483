"""Where the memory of a training step goes, by part, predicted and measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from ringcomm.optim.managed import ModelWeights
from ringcomm.optim.memory_measurement import measure
from ringcomm.optim.memory_parts import PARTS, Parts
from ringcomm.optim.memory_prediction import predict
from ringcomm.optim.memory_step import Step, Variant, variants
from ringcomm.optim.step_options import StepArguments

FLOOR_BYTES = 64 << 10
"""Differences of parts up to this count as none: sums, scalars, what operators round up."""

_COLUMNS = (*PARTS, "peak")


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory of a step with one optimizer.

    Attributes:
        name: the optimizer, and its clip mode.
        predicted: by shapes.
        measured: by the allocator; None where that was not wanted. Of operators that work in
            several threads it has what the calling one allocates.
        rss_bytes: by how much the process's resident memory was larger at the ends of passes; it
            depends on what the process had before, and says little of small models.
    """

    name: str
    predicted: Parts
    measured: Parts | None
    rss_bytes: int | None

    def differences(
        self, tolerance: float = 0.05, floor_bytes: int = FLOOR_BYTES
    ) -> Iterator[tuple[str, int, int]]:
        """(part, predicted, measured) where the two differ by more than both allow."""
        for part in _COLUMNS if self.measured is not None else ():
            predicted, measured = getattr(self.predicted, part), getattr(self.measured, part)
            if abs(predicted - measured) > max(floor_bytes, tolerance * measured):
                yield part, predicted, measured


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What memory_report found; print it, or see as_dict()."""

    steps: list[StepMemory]

    def __getitem__(self, name: str) -> StepMemory:
        """The step of that name, such as "lomo deferred"."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("step", *_COLUMNS, "RSS")]
        for step in self.steps:
            rows.append((step.name, *_row(step.predicted, None)))
            if step.measured is not None:
                rows.append(("", *_row(step.measured, step.rss_bytes)))
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in rows
        ]
        lines.insert(1, "-" * len(lines[0]))
        lines.append(
            "MiB, predicted; measured below. Parts at their largest, which is not the same moment,"
            " so that a peak is less than their sum."
        )
        return "\n".join(lines)


def _row(parts: Parts, rss_bytes: int | None) -> list[str]:
    numbers = [getattr(parts, column) for column in _COLUMNS]
    cells = [f"{number / (1 << 20):,.2f}" for number in numbers]
    return [*cells, "" if rss_bytes is None else f"{rss_bytes / (1 << 20):,.0f}"]


def memory_report(
    model: nn.Module,
    step: Step,
    *,
    optimizers: Sequence[str] = ("sgd", "adamw", "lomo", "adalomo"),
    clip_modes: Sequence[str | None] = (None,),
    measure_too: bool = True,
    **options: Unpack[StepArguments],
) -> MemoryReport:
    """The memory of a training step with each optimizer, by part: predicted and measured.

        report = memory_report(model, lambda m: m(input_ids=ids, labels=ids).loss)
        print(report)

    A prediction takes no memory for tensors and computes none: a copy of the model without elements
    (FakeTensorMode) makes the step, and every storage is followed from its making to its end.
    A measurement makes two real steps with a real copy, so that it takes the model's memory once
    more, and reads the second one from the allocator. The model and its gradients are left as they
    are, to the last bit; so are torch's random numbers.

    Args:
        model: on one device, CPU or CUDA. It has no optimizer in its backward pass.
        step: takes the model (a copy) and returns the loss of a micro-batch, a scalar.
        optimizers: some of "sgd" (no momentum), "adamw", "lomo", "adalomo".
        clip_modes: of Lomo and AdaLomo, each with each: None, "deferred", "two_pass". Those that
            are not None clip by norm, at clip_grad_norm or 1.
        measure_too: whether to measure; with `group`, that is collective.
        options: of Lomo and AdaLomo; `accumulation_steps` counts for all.

    Returns:
        A step for each variant, in the order of the arguments.

    Raises:
        ValueError: an optimizer is not known, options exclude each other, the model has no
            parameters to train or an optimizer in its backward pass, or `step` did not use the
            model that it got.
        TypeError: `step` returned no loss.
        RuntimeError: an operator of the model has no fake: what it makes cannot be predicted.
    """
    wanted = variants(optimizers, clip_modes, options)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("the model has no parameter that requires grad")
    weights = ModelWeights(model)
    for name, param in model.named_parameters():
        if param.requires_grad:
            weights.check(param, name)
    device = next(model.parameters()).device
    steps = []
    for variant in wanted:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            steps.append(_of_variant(model, step, variant, measure_too))
    return MemoryReport(steps)


def _of_variant(model: nn.Module, step: Step, variant: Variant, measure_too: bool) -> StepMemory:
    predicted = predict(model, step, variant)
    measured, rss_bytes = measure(model, step, variant) if measure_too else (None, None)
    return StepMemory(variant.name, predicted, measured, rss_bytes)
