"""A language model of transformers for the tables of whole loops: its parts, batches and oracle."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pair_lomo import AdaLomoOracle
from pair_table import Case
from program_model import (
    SCHEDULERS,
    WITH_FROZEN,
    change_parts,
    class_weights,
    default_dtype,
    loss_of,
    thaw,
    weight_of,
)
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
assert transformers.LlamaForCausalLM  # imported before ranks are forked

VOCABULARY, LENGTH, ROWS, STEPS = 37, 8, 4, 4
ACTION_STEP = 2  # before which something else happens
SEED_AFTER_LOADING = 99
# The adapters of a model.
ADAPTERS = {
    "all": (),
    "others on each rank": ("first", "second"),
    "one rank alone": ("first",),
    "by nobody": ("first", "unused"),
}
# Those that a batch uses: set before each forward pass, on each rank for its own rows.
USED = {"first", "second"}


class Norm(nn.Module):
    """A layer's first norm, and what else a case has: buffers, and adapters that some rows use."""

    features: Tensor

    def __init__(self, norm: Any, buffers: str, adapters: tuple[str, ...]) -> None:
        super().__init__()
        self.norm, width = norm, len(norm.weight)
        if buffers == "random":
            self.register_buffer("features", torch.randn(width, width) / 4)
        self.statistics = nn.BatchNorm1d(width) if buffers == "BatchNorm" else None
        self.adapters = nn.ModuleDict({name: nn.Linear(width, width) for name in adapters})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        if hasattr(self, "features"):
            out = out + out @ self.features
        if self.statistics is not None:
            out = out + self.statistics(out.flatten(0, 1)).view_as(out)
        for name, adapter in self.adapters.items():
            if name in USED:
                out = out + torch.tanh(adapter(out))
        return out


@default_dtype(torch.float32)
def make_model(case: Case, seed: int) -> Any:
    """A tiny Llama with a case's parts."""
    torch.manual_seed(seed)
    is_even = case.get("sizes", "even") == "even"
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16 if is_even else 18,
        intermediate_size=24 if is_even else 23,
        num_hidden_layers=3 if "mesh" in case else 2,
        num_attention_heads=4 if is_even else 3,
        num_key_value_heads=2 if is_even else 3,
        head_dim=4,
        tie_word_embeddings=case.get("tied", "no") == "yes",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    # Weights as large as those of a trained model: gradients of all of them count.
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.2)
    buffers, adapters = case.get("buffers", "none"), ADAPTERS[case.get("used", "all")]
    if buffers != "none" or adapters:
        for layer in model.model.layers:
            layer.input_layernorm = Norm(layer.input_layernorm, buffers, adapters)
    change_parts(case, model)
    return model


def use(case: Case, step: int, data_rank: int) -> None:
    """Sets what the rows of a rank use."""
    used, is_probe = case.get("used", "all"), step == ACTION_STEP
    USED.clear()
    if used == "others on each rank" and not is_probe:
        USED.add(("first", "second")[data_rank % 2])
    elif used != "one rank alone" or data_rank == 0 or is_probe:
        USED.update(("first", "second"))


def batch_of(case: Case, step: int, data_rank: int, num_data: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of a rank: (ROWS, LENGTH) int64."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels, kind = ids.clone(), case.get("labels", "padded" if "loss" in case else "full")
    if kind == "padded":  # rows of a rank, and ranks, have different numbers of labels
        for row in range(ROWS):
            labels[row, LENGTH - (row + 3 * data_rank) % (LENGTH - 1) :] = -100
    if kind == "none on a rank":
        if num_data == 1:
            labels[: ROWS // 2] = -100
        elif data_rank == num_data - 1:
            labels[:] = -100
    return ids, labels


def probe() -> Tensor:
    """Ids that say nothing of training: all ranks have the same."""
    return torch.arange(3 * LENGTH).view(3, LENGTH)[:2] % VOCABULARY


def probed_loss(case: Case, model: Any) -> float:
    """The loss of the probe, without gradients."""
    use(case, ACTION_STEP, 0)
    with torch.no_grad():
        return float(loss_of(case, model, probe(), probe(), weight_of(case, probe())))


class SmoothLion(torch.optim.Optimizer):
    """A user's optimizer: Lion with x / (|x| + eps) for the sign, which rounding cannot flip."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            fast, slow = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                average = state["exp_avg"]
                update = average.lerp(param.grad, 1 - fast)
                average.lerp_(param.grad, 1 - slow)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * update / (update.abs() + 1e-2))


def given_params(case: Case, params: Any) -> list[nn.Parameter]:
    """The weights that a user gives to an optimizer."""
    return [p for p in params if p.requires_grad or case.get("system") in WITH_FROZEN]


def optimizer_of(case: Case, params: Any) -> torch.optim.Optimizer:
    """What makes a case's steps in one process."""
    system, params = case.get("system"), given_params(case, params)
    if system == "Lomo":
        return torch.optim.SGD(params, 0.2, weight_decay=0.01)
    if system == "AdaLomo":
        return AdaLomoOracle(params)
    return torch_optimizer(case, params)


def torch_optimizer(case: Case, params: Any) -> torch.optim.Optimizer:
    """The optimizer that a user gives."""
    match case.get("optimizer"):
        case "SGD":
            return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)
        case "Adam":
            return torch.optim.Adam(params, 0.02, eps=1e-3, weight_decay=0.01)
        case "a user's class":
            return SmoothLion(params)
        case "Adafactor":
            return torch.optim.Adafactor(params, 0.05, eps=(1e-6, 1e-3))
    return torch.optim.AdamW(params, 0.02, eps=1e-3)


def scheduler_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    """One that changes every step."""
    return SCHEDULERS[case.get("kind of scheduler", "LambdaLR")](optimizer)


class Alone:
    """One process with all rows, float64: the same methods as the engines of between_engines.py."""

    is_whole = True

    def __init__(self, case: Case, num_data: int, num_parts: int) -> None:
        self.case, self.num_data, self.num_parts = case, num_data, num_parts
        self.model: Any = make_model(case, 0).double()
        self.optimizer = optimizer_of(case, self.model.parameters())
        self.scheduler = scheduler_of(case, self.optimizer)
        self.losses: list[float] = []
        # Statistics of each rank's rows.
        own = {name: value.clone() for name, value in self.model.named_buffers()}
        self._buffers = [copy.deepcopy(own) for _ in range(num_data)]

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

    def step(self, step: int) -> None:
        """One step of all ranks; what a rank raises, after all have run."""
        batches = [batch_of(self.case, step, r, self.num_data) for r in range(self.num_data)]
        total = sum(weight_of(self.case, labels) for _, labels in batches)
        raised: Exception | None = None
        loss = 0.0
        for rank, (ids, labels) in enumerate(batches):
            use(self.case, step, rank)
            with self.as_rank(rank):
                try:
                    loss += self._backward(ids, labels, total)
                except ValueError as error:
                    raised = error
        if raised is not None:
            if self.case.get("system") in ("Lomo", "AdaLomo"):  # what the pass has gone through
                self._step_unfinished()
            self.optimizer.zero_grad()
            raise raised
        self.losses.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def _step_unfinished(self) -> None:
        """Updates the weights that have gradients, in a step that does not count."""
        self.optimizer.step()
        if isinstance(self.optimizer, AdaLomoOracle):
            self.optimizer.num_steps -= 1

    def _backward(self, ids: Tensor, labels: Tensor, total: float) -> float:
        """The rank's share of the loss."""
        summed = 0.0
        for x, y in zip(ids.chunk(self.num_parts), labels.chunk(self.num_parts), strict=True):
            logits = self.model(input_ids=x).logits[:, :-1].flatten(0, 1)
            weights = class_weights(logits) if self.case.get("loss") == "class weights" else None
            loss = nn.functional.cross_entropy(logits, y[:, 1:].flatten(), weights, reduction="sum")
            (loss / total).backward()
            summed += loss.item() / total
        return summed

    def evaluate(self) -> float:
        return probed_loss(self.case, self.model)

    def thaw(self) -> None:
        thaw(self.model)

    def hooked(self) -> list[nn.Module]:
        """The first and the last layer."""
        return [self.model.model.layers[0], self.model.model.layers[-1]]

    def reloaded(self) -> Alone:
        """What goes on from a checkpoint: statistics are those of rank 0."""
        self._buffers = [copy.deepcopy(self._buffers[0]) for _ in self._buffers]
        return self
