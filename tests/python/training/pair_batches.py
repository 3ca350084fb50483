"""The batches and the losses of the tables; by step, rank and part they are always the same."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from pair_models import NUM_CLASSES, USED, VOCABULARY
from pair_table import Case
from torch import Tensor, nn

STEPS = 4
ACTION_STEP = 2  # before which something else happens
OVERFLOW_STEP = 1  # where losses are scaled dynamically
SMALL_ROWS, ROWS, LENGTH = 8, 4, 8
IGNORED = -100

# ---- of the small network


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows of one rank; `factor` makes the loss infinite where a step is to overflow."""

    ids: Tensor
    targets: Tensor
    use: tuple[bool, bool]  # of the middle block: the adapter, the block
    factor: float

    def loss(self, model: nn.Module) -> Tensor:
        logits = model(self.ids, *self.use)
        return nn.functional.cross_entropy(logits.float(), self.targets) * self.factor

    def half(self) -> MicroBatch:
        """The first half of its rows, with their share of the loss."""
        ids, targets = self.ids[: SMALL_ROWS // 2], self.targets[: SMALL_ROWS // 2]
        return dataclasses.replace(self, ids=ids, targets=targets, factor=self.factor / 2)


def micro_batches(case: Case, steps: range, ranks: range) -> list[MicroBatch]:
    """Those of some ranks. A case that `loses` rows lacks rank 0's first one, or half of one."""
    num_parts, scaling = int(case["accumulation"][0]), case["loss scale"]
    found = []
    for step in steps:
        for rank in ranks:
            overflows = scaling not in ("none", "fixed") and step == OVERFLOW_STEP and rank == 1
            for part in range(num_parts):
                generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                ids = torch.randint(VOCABULARY, (SMALL_ROWS,), generator=generator)
                targets = torch.randint(VOCABULARY, (SMALL_ROWS,), generator=generator)
                use = _use(case.get("gradients", "all"), step, rank, part)
                factor = torch.inf if overflows and part == num_parts - 1 else 1.0
                batch = MicroBatch(ids, targets, use, factor)
                is_lost = "loses" in case and rank == part == 0
                if not (is_lost and num_parts > 1):
                    found.append(batch.half() if is_lost else batch)
    return found


def _use(gradients: str, step: int, rank: int, part: int) -> tuple[bool, bool]:
    is_used = rank == 0 or step == 2
    adapter = {
        "none on rank 1": is_used,
        "none on any rank": step == 2,
        "none in the first micro-batch": part > 0,
    }
    return adapter.get(gradients, True), is_used or gradients != "layer skipped on rank 1"


# ---- of the Llama


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one rank: (ROWS, LENGTH) int64."""

    case: Case
    ids: Tensor
    labels: Tensor
    total: float = 1.0  # what divides the sum of losses

    @property
    def weight(self) -> float:
        """How many tokens are predicted, or the sum of their weights."""
        counted = self.labels[:, 1:][self.labels[:, 1:] != IGNORED]
        if self.case.get("loss") == "class weights":
            return float(class_weights(torch.zeros((), dtype=torch.float64))[counted].sum())
        return counted.numel()

    @property
    def targets(self) -> Tensor:
        """What the user's data loader gives: labels as they are, or of the next token."""
        kind = self.case.get("loss", "the model's")
        if kind in ("the model's", "shifts labels"):
            return self.labels
        after = torch.cat([self.labels[:, 1:], torch.full_like(self.labels[:, :1], IGNORED)], 1)
        return after.masked_fill(after == IGNORED, -1) if kind == "ignore_index=-1" else after

    def loss(self, model: Any) -> Tensor:
        """As a user weights it by hand: the share of the mean whose weights sum to `total`."""
        loss_fn = loss_fn_of(self.case)
        if loss_fn is None:
            options = {"labels": self.targets, "num_items_in_batch": self.total}
            loss: Tensor = model(input_ids=self.ids, **options).loss
            return loss
        output = model(input_ids=self.ids)
        if "num_items_in_batch" in inspect.signature(loss_fn).parameters:
            return loss_fn(output, self.targets, num_items_in_batch=self.total)
        return loss_fn(output, self.targets) * (self.weight / self.total)


def rows_of(case: Case, step: int, data_rank: int, num_data: int) -> Rows:
    """A rank's rows of a step; sets what these use."""
    use(case, step, data_rank)
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    ids = torch.randint(NUM_CLASSES, (ROWS, LENGTH), generator=generator)
    labels, kind = ids.clone(), case.get("labels", "padded" if "loss" in case else "full")
    if kind == "padded":  # rows of a rank, and ranks, have different numbers of labels
        for row in range(ROWS):
            labels[row, LENGTH - (row + 3 * data_rank) % (LENGTH - 1) :] = IGNORED
    if kind == "none on a rank":
        if num_data == 1:
            labels[: ROWS // 2] = IGNORED
        elif data_rank == num_data - 1:
            labels[:] = IGNORED
    return Rows(case, ids, labels)


def use(case: Case, step: int, data_rank: int) -> None:
    """Sets what the rows of a rank use."""
    used, is_probe = case.get("used", "all"), step == ACTION_STEP
    USED.clear()
    if used == "others on each rank" and not is_probe:
        USED.add(("first", "second")[data_rank % 2])
    elif used != "one rank alone" or data_rank == 0 or is_probe:
        USED.update(("first", "second"))


def probe(case: Case) -> Rows:
    """Rows that say nothing of training: all ranks have the same. Sets what these use."""
    use(case, ACTION_STEP, 0)
    ids = torch.arange(3 * LENGTH).view(3, LENGTH)[:2] % NUM_CLASSES
    rows = Rows(case, ids, ids)
    return dataclasses.replace(rows, total=rows.weight)


def class_weights(like: Tensor) -> Tensor:
    return torch.linspace(0.2, 3.0, NUM_CLASSES, dtype=torch.float64).to(like.dtype)


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


def count_items_of(case: Case) -> Callable[[Tensor], Any] | None:
    """What counts the labels in the user's mean."""
    kind = case.get("loss", "the model's")

    def count(targets: Tensor) -> Any:
        if kind == "shifts labels":
            targets = targets[:, 1:]
        counted = targets[(targets != IGNORED) & (targets != -1)]
        one = torch.zeros((), dtype=torch.float64)
        return class_weights(one)[counted].sum() if kind == "class weights" else counted.numel()

    return None if kind in ("the model's", "sum / num_items") else count
