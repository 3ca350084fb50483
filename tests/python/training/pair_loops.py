"""The loops of Accelerate and of transformers' Trainer around a case of the small network."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pair_batches import MicroBatch, micro_batches
from pair_models import CLIP_NORM, CLIP_VALUE
from pair_table import Case
from torch import Tensor, nn

LOOPS = ("Accelerate", "Trainer")


@contextlib.contextmanager
def launched(case: Case, rank: int, num_ranks: int) -> Iterator[None]:
    """What torchrun tells Accelerate; what an Accelerator before has kept is forgotten."""
    if case.get("around") not in LOOPS:
        yield
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = (rank, rank, num_ranks, num_ranks) if num_ranks > 1 else (0, -1, 1, 1)
    with mock.patch.dict(os.environ, zip(names, map(str, values), strict=True)):
        yield


def num_parts(case: Case, num_ranks: int) -> int:
    """Backward passes before a step, where ranks stand for those that are not there."""
    return int(case["accumulation"][0]) * 2 // num_ranks


class AccelerateLoop:
    """The loop that Accelerate's documentation has."""

    def __init__(self, case: Case, model: nn.Module, num_ranks: int) -> None:
        from accelerate import Accelerator

        self.case, self.model = case, model
        parts = num_parts(case, num_ranks)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
        assert self.accelerator.num_processes == num_ranks

    def take(self, optimizer: Any) -> None:
        from ringcomm.integrations.accelerate import register

        register()
        if self.case["loss scale"] == "GradScaler":  # mixed_precision="fp16" makes one on a GPU
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def run(self, steps: range, ranks: range) -> None:
        for batch in micro_batches(self.case, steps, ranks):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(_loss(self.case, batch, self.model))
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def _clip(self) -> None:
        if _clips_in_loop(self.case):
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        if self.case["clipping"] == "value":
            self.accelerator.clip_grad_value_(self.model.parameters(), CLIP_VALUE)
        if self.case["clipping"] == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)


class TrainerLoop:
    """transformers' Trainer, on batches and a loss of our own."""

    def __init__(self, case: Case, model: nn.Module, num_ranks: int, folder: Path) -> None:
        import transformers

        self.case = case
        self.batches: list[MicroBatch] = []
        loop = self

        class Trainer(transformers.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
                return _loss(case, loop.batches[int(inputs["idx"])], model)

            def get_train_dataloader(self) -> Any:
                return [{"idx": idx} for idx in range(len(loop.batches))]

        class Clip(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)

        args = transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_grad_norm=CLIP_NORM if _clips_in_loop(case) else 0.0,
            gradient_accumulation_steps=num_parts(case, num_ranks),
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        assert args.world_size == num_ranks
        clip: list[Any] = [Clip()] if case["clipping"] == "torch" else []
        self.trainer = Trainer(model, args, callbacks=clip)  # which moves the model
        self.trainer.remove_callback(transformers.PrinterCallback)

    def take(self, optimizer: Any) -> None:
        from ringcomm.integrations.transformers import register

        register()
        if self.case["loss scale"] == "GradScaler":
            self.trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.trainer.optimizer = optimizer

    def run(self, steps: range, ranks: range) -> None:
        self.batches[:] = micro_batches(self.case, steps, ranks)
        self.trainer.args.max_steps = len(steps)
        self.trainer.train()


def loop_of(case: Case, model: nn.Module, num_ranks: int, folder: Path) -> Any:
    """What goes around a case's model, which take()s the optimizer; None for our own loop."""
    match case.get("around"):
        case "Accelerate":
            return AccelerateLoop(case, model, num_ranks)
        case "Trainer":
            return TrainerLoop(case, model, num_ranks, folder)
    return None


def _loss(case: Case, batch: MicroBatch, model: nn.Module) -> Tensor:
    """What a loop takes the mean over micro-batches of, where the tables have the sum."""
    return batch.loss(model) * int(case["accumulation"][0])


def _clips_in_loop(case: Case) -> bool:
    return case["clipping"] in ("optimizer", "norm", "norm in two passes")
