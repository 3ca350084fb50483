"""Small models with everything that a weight can go through, for the tests of LOMO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "tied": lambda: Net(tied=True),
    "checkpoint": lambda: Net(reentrant=False),
    "reentrant": lambda: Net(tied=True, reentrant=True),
    "low_rank": LowRank,
    "bypass": Bypass,
    "early_bypass": EarlyBypass,
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
