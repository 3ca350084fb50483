"""Small models with everything that a weight can go through, for the tests of LOMO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from steps import apply_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.optim import InBackwardOptimizer

VOCAB = 37
LR = 0.3


class Net(nn.Module):
    """A byte model with an embedding, norms, biases, a convolution, and a block that runs twice."""

    def __init__(self, *, tied: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16, padding_idx=3)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16, bias=False)
        self.head = nn.Linear(16, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        y = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.nn.functional.gelu(self.up(y)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(2):
            if self.reentrant is None or not torch.is_grad_enabled():
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        logits = self.head(x).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LowRank(nn.Module):
    """A frozen layer with a low-rank one beside it, in the manner of LoRA, and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16).requires_grad_(False)
        self.base = nn.Linear(16, 24).requires_grad_(False)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 24, bias=False)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits = self.head(self.base(x) + self.b(self.a(x))).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Bypass(nn.Module):
    """A table whose weight is also used as it is, behind its layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.up = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.embed(ids)))
        logits = nn.functional.linear(x, self.embed.weight).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class EarlyBypass(nn.Module):
    """A linear layer whose weight is looked up before the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.up(nn.functional.embedding(ids, self.head.weight)))
        logits = self.head(x).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def numbers(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of six, with a gradient."""
    return (ids[:, :6] / VOCAB).to(weight.dtype).requires_grad_()


class WeightIsInput(nn.Module):
    """Layers whose input is a weight, or a part of one, that is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.first, self.second = nn.Linear(6, 50), nn.Linear(6, 50)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.first(self.table.weight[2:8]) + self.second(self.table.weight).mean(0)
        return torch.tanh(numbers(ids, rows) @ rows).square().mean()


class Gated(nn.Module):
    """A segment that reads the last layer's weight without a gradient, or only what it is like."""

    def __init__(self, how: str, *, is_reentrant: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how, self.is_reentrant = how, is_reentrant

    def segment(self, x: Tensor) -> Tensor:
        weight: Any = self.head.weight
        if self.how == "layer":
            with torch.no_grad():
                gate = torch.sigmoid(self.head(x))
        elif self.how == "detached":
            gate = nn.functional.linear(x.detach(), weight.detach())
        elif self.how == "data":
            gate = weight.data.norm()
        elif self.how == "number":
            gate = torch.tensor(weight.tolist()).norm()
        else:
            assert weight.is_contiguous()
            assert (weight.numel(), weight.size(0)) == (36, 6)
            gate = torch.ones(weight.shape, dtype=weight.dtype, device=weight.device).mean()
        return torch.tanh(self.body(x)) * gate

    def forward(self, ids: Tensor) -> Any:
        x = checkpoint(
            self.segment, numbers(ids, self.head.weight), use_reentrant=self.is_reentrant
        )
        return self.head(x).square().mean()


class Reused(nn.Module):
    """Weights in reentrant segments, and beside them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 6)
        self.table: Any = nn.Embedding(6, 6) if how == "tied" else None

    def segment(self, x: Tensor) -> Tensor:
        if self.how == "tied":
            return torch.tanh(self.layer(x)) @ self.table.weight.t()
        if self.how == "functional":
            return nn.functional.linear(torch.tanh(self.layer(x)), self.layer.weight)
        return torch.tanh(self.layer(x))

    def forward(self, ids: Tensor) -> Any:
        x = numbers(ids, self.layer.weight)
        if self.how == "tied":
            x = x + self.table(ids[:, 0] % 6)
        elif self.how == "before":
            x = self.layer(x)
        elif self.how == "eval":
            self.eval()
        x = checkpoint(self.segment, x, use_reentrant=True)
        if self.how == "nested":
            x = checkpoint(
                lambda y: checkpoint(self.segment, y, use_reentrant=True), x, use_reentrant=True
            )
        elif self.how in ("eval", "twice"):
            x = checkpoint(self.segment, x, use_reentrant=True)
        elif self.how in ("after", "functional"):
            x = self.layer(x)
        return x.square().mean()


class Nested(nn.Module):
    """Segments in segments, with dropout."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(inplace=True)) for _ in range(4)
        )

    def run_two(self, x: Tensor, begin: int) -> Any:
        for block in self.blocks[begin : begin + 2]:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x

    def forward(self, ids: Tensor) -> Any:
        torch.manual_seed(5)
        x = numbers(ids, next(self.parameters()))
        for begin in (0, 2):
            x = checkpoint(self.run_two, x, begin, use_reentrant=self.is_reentrant)
        return x.square().mean()


REUSED = {
    f"reused {how}": partial(Reused, how)
    for how in ("tied", "functional", "before", "after", "eval", "nested", "twice")
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "tied": lambda: Net(tied=True),
    "checkpoint": lambda: Net(reentrant=False),
    "reentrant": lambda: Net(tied=True, reentrant=True),
    "low_rank": LowRank,
    "bypass": Bypass,
    "early_bypass": EarlyBypass,
    # https://github.com/zyushun/Adam-mini/issues/11: tables that are used in several ways.
    "weight is input": WeightIsInput,
    # https://github.com/deepspeedai/DeepSpeed/issues/988
    **REUSED,
    # A use that is seen: the update waits for the segment.
    "gated": partial(Gated, "layer", is_reentrant=True),
    # As models of transformers do: https://github.com/huggingface/transformers/pull/41535.
    "reads shape": partial(Gated, "shape", is_reentrant=False),
    "reads shape, reentrant": partial(Gated, "shape", is_reentrant=True),
    # https://github.com/LoganBooker/prodigy-plus-schedule-free/issues/7
    "nested": partial(Nested, is_reentrant=False),
    "nested, reentrant": partial(Nested, is_reentrant=True),
}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def batches(count: int, seed: int = 1, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (rows, 9), generator=generator) for _ in range(count)]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_sgd(
    model: nn.Module,
    data: list[Tensor],
    lr: float,
    *,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    micro_batches: int = 1,
) -> list[float]:
    """torch's SGD with decoupled decay, the oracle; returns the norms that were clipped."""
    params = [param for param in model.parameters() if param.requires_grad]
    sgd = torch.optim.SGD(params, lr=lr)
    norms = []
    for begin in range(0, len(data), micro_batches):
        for ids in data[begin : begin + micro_batches]:
            model(ids).backward()
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(params, clip_norm)))
        if clip_value is not None:
            nn.utils.clip_grad_value_(params, clip_value)
        with torch.no_grad():
            for param in params:
                param.mul_(1 - lr * weight_decay)
        apply_steps(sgd)
    return norms


def distance(model: nn.Module, expected: nn.Module) -> float:
    """The largest difference of two models' weights."""
    return max(
        float((a.detach().double() - b.detach().double()).abs().max())
        for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )


def train(opt: InBackwardOptimizer, model: Any, data: list[Tensor]) -> list[float]:
    """The ordinary loop; returns the norms that were clipped."""
    norms = []
    for begin in range(0, len(data), opt.options.accumulation_steps):
        for ids in data[begin : begin + opt.options.accumulation_steps]:
            opt.backward(model(ids))
        apply_steps(opt)
        if opt.grad_norm is not None:
            norms.append(opt.grad_norm)
    return norms


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """The names of weights that are not what they were."""
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def fail_once(model: Any) -> Any:
    """Makes a backward pass raise between the two uses of the block; returns what undoes it."""
    hooks: list[Any] = []

    def of_first_use(_module: Any, _args: Any, out: Tensor) -> None:
        if not hooks:
            hooks.append(out.register_hook(lambda _: 1 / 0))

    return model.norm.register_forward_hook(of_first_use)


def gradients_of(model: nn.Module, data: list[Tensor], *, fails: bool) -> dict[str, Any]:
    """By name the sum of torch's gradients, or None, and how many have arrived."""
    twin, counts = make("plain"), Counter[str]()
    twin.load_state_dict(model.state_dict())
    for name, param in twin.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    for ids in data[:-1]:
        twin(ids).backward()
    if fails:
        fail_once(twin)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        twin(data[-1]).backward()
    return {name: (param.grad, counts[name]) for name, param in twin.named_parameters()}


def step_by_hand(opt: Any, model: nn.Module, grads: dict[str, Any], at_least: int = 0) -> None:
    """A step by the gradients that have arrived so often."""
    for name, param in model.named_parameters():
        grad, count = grads[name]
        param.grad = grad if count >= at_least else None
    opt.step()


def fail_last(model: Any, opt: Any, parts: list[Tensor]) -> Any:
    for ids in parts[:-1]:
        opt.backward(model(ids))
    hook = fail_once(model)
    with pytest.raises(ZeroDivisionError):
        opt.backward(model(parts[-1]))
    return hook
