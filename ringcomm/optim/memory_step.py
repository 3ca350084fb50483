"""A training step that tells where it is, on a copy of a model, with one of several optimizers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ringcomm.optim.adalomo import AdaLomo
from ringcomm.optim.in_backward import InBackwardOptimizer
from ringcomm.optim.lomo import Lomo
from ringcomm.optim.memory_parts import Mark
from ringcomm.optim.step_options import StepArguments

Step = Callable[[Any], Tensor]

_IN_BACKWARD: dict[str, Any] = {"lomo": Lomo, "adalomo": AdaLomo}
_PLAIN: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
_NO_BACKWARD = -1  # torch's id of no graph task
_MAX_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer with options; `options` are those of Lomo and AdaLomo alone."""

    optimizer: str
    clip_mode: str | None
    accumulation_steps: int
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """As tables call it."""
        return self.optimizer if self.clip_mode is None else f"{self.optimizer} {self.clip_mode}"

    @property
    def is_in_backward(self) -> bool:
        """Whether it is Lomo or AdaLomo."""
        return self.optimizer in _IN_BACKWARD

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer."""
        made: torch.optim.Optimizer
        if self.is_in_backward:
            # A copy of the model on this rank: without a group it is trained alone.
            options = {**self.options, "group": self.options.get("group") or "none"}
            made = _IN_BACKWARD[self.optimizer](model, lr=1e-4, **options)
            return made
        params = [param for param in model.parameters() if param.requires_grad]
        # As torch decides by itself, also for fake tensors, which it would take for strangers.
        foreach = params[0].device.type == "cuda"
        made = _PLAIN[self.optimizer](params, lr=1e-4, foreach=foreach)
        return made


def variants(
    optimizers: Iterable[str], clip_modes: Sequence[str | None], options: StepArguments
) -> list[Variant]:
    """Each plain optimizer once, each in the backward pass with each clip mode.

    Raises:
        ValueError: an optimizer is not known, or there is none.
    """
    num_steps = options.get("accumulation_steps", 1)
    found = []
    for optimizer in optimizers:
        if optimizer in _PLAIN:
            found.append(Variant(optimizer, None, num_steps, {}))
        elif optimizer in _IN_BACKWARD:
            for clip_mode in clip_modes:
                given: dict[str, Any] = dict(options)
                max_norm = given.pop("clip_grad_norm", None) or _MAX_NORM
                if clip_mode is not None:
                    given |= {"clip_grad_norm": max_norm, "clip_mode": clip_mode}
                found.append(Variant(optimizer, clip_mode, num_steps, given))
        else:
            known = ", ".join([*_PLAIN, *_IN_BACKWARD])
            raise ValueError(f"optimizers are some of {known}, got {optimizer!r}")
    if not found:
        raise ValueError("optimizers or clip_modes are empty: there is nothing to report")
    return found


class Observer(Protocol):
    """Who is told."""

    def mark(self, mark: Mark) -> None:
        """See memory_parts.Mark."""

    def gradient(self, grad: Tensor) -> None:
        """A parameter's gradient has come."""


def run_steps(model: nn.Module, step: Step, variant: Variant, observer: Observer) -> None:
    """Two steps of a model, which changes: in the first, states are made.

    Raises:
        ValueError: `step` has not run the model that it got.
        TypeError: it has not returned a scalar that requires grad.
    """
    calls = _Calls(observer)
    with _collected_by_hand(), calls.of(model), contextlib.ExitStack() as undo:
        for param in model.parameters():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(
                    lambda told: observer.gradient(told.grad)
                )
                undo.callback(hook.remove)
        observer.mark("begin")
        optimizer = variant.make(model)
        if isinstance(optimizer, InBackwardOptimizer):
            undo.callback(optimizer.close)
        for _ in range(2):
            gc.collect(0)
            observer.mark("step")
            for _ in range(variant.accumulation_steps):
                _run_micro_batch(model, step, optimizer, observer, calls)
            optimizer.step()
            optimizer.zero_grad()
        observer.mark("done")


@contextlib.contextmanager
def _collected_by_hand() -> Iterator[None]:
    """Has circles of references end between steps alone, wherever Python would look for them.

    All that is made meanwhile is in the youngest generation, which is quick to collect.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run_micro_batch(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer,
    observer: Observer,
    calls: _Calls,
) -> None:
    observer.mark("forward")
    loss = step(model)
    observer.mark("kept")
    if calls.num_forwards == 0:
        raise ValueError("step(m) is to run the model m that it gets, a copy; it ran none of it")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TypeError(
            "step(m) returns the loss, a tensor of one element that requires grad; got"
            f" {loss!r:.80}"
        )
    if isinstance(optimizer, InBackwardOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    del loss
    observer.mark("made")


class _Calls:
    """Forward passes of a model's modules: that there are any, and those in the backward pass."""

    def __init__(self, observer: Observer) -> None:
        self.num_forwards = 0
        self._observer = observer
        self._depth = 0

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Watches while it lasts."""
        with contextlib.ExitStack() as undo:
            for module in model.modules():
                undo.callback(module.register_forward_pre_hook(self._begin).remove)
                # A checkpoint leaves a module by an exception, once it has what it wants.
                end = module.register_forward_hook(self._end, always_call=True)
                undo.callback(end.remove)
            yield

    def _begin(self, *_: Any) -> None:
        self.num_forwards += 1
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            self._depth += 1
            if self._depth == 1:
                self._observer.mark("recompute")

    def _end(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            self._depth -= 1
            if self._depth == 0:
                self._observer.mark("recomputed")
