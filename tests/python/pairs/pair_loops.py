"""How a case of a table of pairs trains: in our loop, or that of Accelerate or of Trainer."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from full_states import full_weights, load_full_weights
from pair_model import (
    CLIP_NORM,
    CLIP_VALUE,
    DTYPES,
    SCALE,
    WORLD_SIZE,
    MicroBatch,
    Net,
    local_of,
    micro_batches,
)
from pair_table import Case
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.parallel import get_state_dict, set_state_dict

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
    os.environ.update(zip(names, map(str, values), strict=True))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def num_parts(case: Case, num_ranks: int) -> int:
    """Backward passes before a step, where ranks stand for those that are not there."""
    return int(case["accumulation"][0]) * WORLD_SIZE // num_ranks


def batches(case: Case, steps: range, ranks: range) -> list[MicroBatch]:
    """Of these steps, one after the other; the steps' means are over num_parts() of them."""
    return [batch for step in steps for rank in ranks for batch in micro_batches(case, step, rank)]


class AccelerateLoop:
    """The loop that Accelerate's documentation has."""

    def __init__(self, case: Case, model: nn.Module, num_ranks: int) -> None:
        from accelerate import Accelerator

        self.case, self.model = case, model
        parts = num_parts(case, num_ranks)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
        assert self.accelerator.num_processes == num_ranks

    def take(self, optimizer: Any) -> None:
        """Takes an optimizer of the model."""
        from ringcomm.integrations.accelerate import register

        register()
        if self.case["loss scale"] == "GradScaler":  # mixed_precision="fp16" makes one on a GPU
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def run(self, steps: range, ranks: range) -> None:
        """Some steps, on the micro-batches of some ranks."""
        for batch in batches(self.case, steps, ranks):
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
        """Takes an optimizer of the model."""
        from ringcomm.integrations.transformers import register

        register()
        if self.case["loss scale"] == "GradScaler":
            self.trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.trainer.optimizer = optimizer

    def run(self, steps: range, ranks: range) -> None:
        """Some steps, on the micro-batches of some ranks."""
        self.batches[:] = batches(self.case, steps, ranks)
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


class Training:
    """One case, from its start or from a checkpoint: our own loop, and states."""

    optimizer: Any

    def __init__(self, case: Case, num_ranks: int, folder: Path) -> None:
        self.case = case
        has_experts = "experts" in case.get("mesh", "")
        self.model: Any = Net(case["weights"], case["recompute"], has_experts)
        if case["dtype"].endswith("weights"):
            self.model.to(DTYPES[case["dtype"]])
        self.wrapped: Any = self.model
        self.loop: Any = loop_of(case, self.model, num_ranks, folder) or self
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def wrap(self) -> None:
        """Puts around the model and its optimizer what the case has."""
        if self.case["compile"] == "yes":
            self.model.compile(backend="aot_eager")
        if self.case["around"] == "DDP":
            self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)
        if self.loop is not self:
            self.loop.take(self.optimizer)

    def options(self) -> dict[str, Any]:
        """Of the optimizer, as all of the library call them."""
        found: dict[str, Any] = {}
        if self.case["clipping"] == "option" or self.case["clipping"].startswith("norm"):
            found["clip_grad_norm"] = CLIP_NORM
        if self.case["loss scale"] in ("fixed", "dynamic"):
            found["loss_scale"] = SCALE if self.case["loss scale"] == "fixed" else "dynamic"
        if self.case.get("reduce dtype") == "16 bits":
            found["reduce_dtype"] = DTYPES[self.case["dtype"]]
        return found

    def run(self, steps: range, ranks: range) -> None:
        """Some steps, on the micro-batches of some ranks, which this one stands for."""
        for step in steps:
            batches = [batch for rank in ranks for batch in micro_batches(self.case, step, rank)]
            for batch in batches:
                waits = "no_sync" in self.case["accumulation"] and batch is not batches[-1]
                with self.optimizer.no_sync() if waits else contextlib.nullcontext():
                    self.backward(batch, 1 / len(ranks))
            self.finish_step()

    def backward(self, batch: MicroBatch, share: float) -> None:
        loss = batch.loss(self.wrapped) * share
        if self.case["loss scale"] == "GradScaler":
            self.scaler.scale(loss).backward()
        elif self.case["clipping"] == "norm in two passes":
            self.optimizer.backward(loss)
        else:
            self.optimizer.scale(loss).backward()

    def finish_step(self) -> None:
        """Clips, and steps."""
        clipping, is_scaled = self.case["clipping"], self.case["loss scale"] == "GradScaler"
        if is_scaled and clipping in ("torch", "optimizer"):
            self.scaler.unscale_(self.optimizer)
        if clipping == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        if clipping == "optimizer":
            self.optimizer.clip_grad_norm_(CLIP_NORM)
        if is_scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[Tensor]:
        """What tells whether a weight has been written since."""
        return [local_of(p).clone() for g in self.optimizer.param_groups for p in g["params"]]

    def whole_weights(self) -> dict[str, Tensor]:
        """On every rank. Collective."""
        return full_weights(self.model)

    def saved(self) -> Any:
        """Whole weights, and the optimizer's state: by a file, or that of all ranks. Collective."""
        if self.case["resume"] == "same ranks":
            file = io.BytesIO()
            torch.save(self.optimizer.state_dict(), file)
            file.seek(0)
            return self.whole_weights(), torch.load(file, weights_only=True)
        return get_state_dict(self.model, self.optimizer, full=True)

    def load(self, saved: Any) -> None:
        """Goes on from what saved() has returned."""
        if self.case["resume"] == "same ranks":
            load_full_weights(self.model, saved[0])
            self.optimizer.load_state_dict(saved[1])
        else:
            set_state_dict(self.model, self.optimizer, *saved)
