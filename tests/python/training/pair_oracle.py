"""The steps of a case in one process: what ranks must come to."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator

import torch
from pair_batches import STEPS, class_weights, micro_batches, rows_of
from pair_engines import Engine
from pair_models import CLIP_NORM, CLIP_VALUE, DTYPES, SCALE, is_small, make_model, unwrapped
from pair_optimizers import optimizers_alone, scheduler_of
from pair_table import Case
from torch import Tensor, nn
from update_oracle import memory_order, rounded
from whole_optimizers import AdaLomoOracle

from ringcomm.parallel.optimizer_classes import params_in

# Of the change of all weights, as a share of its norm; and of what a lost micro-batch changes.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
LOST_SHARE = 1 / 3


def initial(case: Case) -> dict[str, Tensor]:
    """The weights before the first step, as all ranks have them."""
    model = make_model(case, 0)
    if is_small(case) and case["dtype"].endswith("weights"):
        model.to(DTYPES[case["dtype"]])
    return unwrapped(model.named_parameters())


def train_alone(given: Case, num_ranks: int) -> dict[str, Tensor]:
    """The steps of the small network, with float32 masters unless torch trains 16-bit weights."""
    case = {**given, "recompute": "no"}
    dtype, masters = DTYPES[case["dtype"]], make_model(case, 0)
    if case["dtype"].endswith("weights"):
        masters.to(dtype)
        if case.get("trained by") not in ("optimizer", "DDP", "fully_shard"):
            masters.float()
    optimizers = optimizers_alone(case, masters.parameters())
    scale = {"none": 1.0, "dynamic": 2.0**16}.get(case["loss scale"], SCALE)
    num_good_steps = 0
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for batch in micro_batches(case, range(step, step + 1), range(num_ranks)):
            model = make_model(case, 0).to(dtype)
            model.load_state_dict(masters.state_dict())
            (batch.loss(model) * scale).backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    grad = param.grad.float() / (scale * num_ranks)
                    sums[name] = sums.get(name, torch.zeros_like(grad)) + grad
        is_good = all(bool(total.isfinite().all()) for total in sums.values())
        if not is_good and case["loss scale"] == "dynamic":
            scale /= 2
        for name, param in masters.named_parameters():
            param.grad = sums[name].to(param.dtype) if is_good and name in sums else None
        trained = [param for param in masters.parameters() if param.grad is not None]
        if trained and case["clipping"] == "value":
            nn.utils.clip_grad_value_(trained, CLIP_VALUE)
        elif trained and case["clipping"] != "none":
            nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        for each in optimizers if is_good else ():
            each.step()
        if is_good and case["dtype"] == "bfloat16 weights" and _is_lomo(case):
            for number, param in enumerate(params_in(optimizers[0].param_groups)):
                _round(case, param, number, num_good_steps)
        num_good_steps += is_good
    return {name: param.detach().float() for name, param in masters.named_parameters()}


def _is_lomo(case: Case) -> bool:
    return "weights in" in case or case.get("trained by") == "Lomo"


def _round(case: Case, weight: nn.Parameter, number: int, step: int) -> None:
    """To 16 bits, as a step of Lomo does: by the same random bits."""
    seed = -1
    if case.get("rounding") == "split":
        return
    if case.get("rounding") == "stochastic":
        digest = hashlib.blake2b(f"0 {number} {step}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
    values, _ = rounded(memory_order(weight).numpy(), torch.bfloat16, seed=seed)
    weight.data.copy_(values.view(weight.shape))


class Alone(Engine):
    """One process with all rows of the Llama, float64."""

    def __init__(self, case: Case, num_data: int, num_parts: int) -> None:
        self.case, self.num_data, self.num_parts = case, num_data, num_parts
        self.model = make_model(case, 0).double()
        (self.optimizer,) = optimizers_alone(case, self.model.parameters())
        self.scheduler = scheduler_of(case, self.optimizer)
        self.losses: list[float] = []
        # Statistics of each rank's rows.
        self._buffers = [copy.deepcopy(dict(self.model.named_buffers())) for _ in range(num_data)]

    @contextlib.contextmanager
    def as_rank(self, data_rank: int) -> Iterator[None]:
        """With a rank's buffers, which may change."""
        own, buffers = self._buffers[data_rank], dict(self.model.named_buffers())
        for name, value in buffers.items():
            value.copy_(own[name])
        try:
            yield
        finally:
            self._buffers[data_rank] = {name: value.clone() for name, value in buffers.items()}

    def run(self, steps: range) -> None:
        """One step of all ranks; what a rank raises, after all have run."""
        (step,) = steps
        all_rows = [rows_of(self.case, step, r, self.num_data) for r in range(self.num_data)]
        total = sum(rows.weight for rows in all_rows)
        raised: Exception | None = None
        loss = 0.0
        for rank in range(self.num_data):
            with self.as_rank(rank):
                rows = rows_of(self.case, step, rank, self.num_data)
                try:
                    loss += self._backward(rows.ids, rows.labels, total)
                except ValueError as error:
                    raised = error
        if raised is not None:
            # LOMO has updated what the pass has gone through, in a step that does not count.
            if self.case.get("system") in ("Lomo", "AdaLomo"):
                self.optimizer.step()
            if isinstance(self.optimizer, AdaLomoOracle):
                self.optimizer.num_steps -= 1
            self.optimizer.zero_grad()
            raise raised
        self.losses.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def _backward(self, ids: Tensor, labels: Tensor, total: float) -> float:
        summed = 0.0
        for x, y in zip(ids.chunk(self.num_parts), labels.chunk(self.num_parts), strict=True):
            logits = self.model(input_ids=x).logits[:, :-1].flatten(0, 1)
            weights = class_weights(logits) if self.case.get("loss") == "class weights" else None
            loss = nn.functional.cross_entropy(logits, y[:, 1:].flatten(), weights, reduction="sum")
            (loss / total).backward()
            summed += loss.item() / total
        return summed

    def reloaded(self) -> Alone:
        """What goes on from a checkpoint: statistics are those of rank 0."""
        self._buffers = [copy.deepcopy(self._buffers[0]) for _ in self._buffers]
        return self
