#!/usr/bin/env python3
"""Times weight updates and the linear cross-entropy on one device, compared with torch.

    python benchmarks/device_kernels.py --device cuda --only linear,sgd

    linear       linear_sgd_update_ by addmm, and by rows: stochastic, split, clipped; beside the
                 product alone, and beside product and sgd_update_
    embedding    embedding_sgd_update_ with the ids of a text, with and without decay
    sgd          sgd_update_ beside torch's add_, and a copy of the weights as a floor
    linear_loss  linear_cross_entropy beside torch's, forward and backward, and beside its three
                 products alone

The ways take turns in short blocks; times are between events on a device. Memory is the peak of a
call beyond the memory in use before and what it returns, such as gradients.
Results are not verified here: the tests of the operators do that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
from harness import Bench, Options, flag
from torch import Tensor
from torch.nn import functional

from _ringcomm.values import words
from ringcomm import ops

LR = 1e-4
STEP = (LR, 0.0, 1.0)  # and no weight decay, and no scale
_ops: Any = torch.ops.ringcomm
Ways = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """Tokens, columns of the input, rows of the weight; sizes of Llama's layers."""

    tokens: int
    columns: int
    rows: int

    def scaled(self, factor: int) -> Shape:
        """Scales all sizes down, for machines that are slower than a GPU."""
        return Shape(*(max(1, n // factor) for n in (self.tokens, self.columns, self.rows)))

    def text(self) -> str:
        """As a record has it."""
        return f"{self.tokens}x{self.columns}x{self.rows}"


def _linear(shape: Shape, device: torch.device) -> Ways:
    x = torch.randn(shape.tokens, shape.columns, device=device, dtype=torch.bfloat16)
    grad = torch.randn(shape.tokens, shape.rows, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.rows, shape.columns, device=device, dtype=torch.bfloat16)
    high, low = weight.clone(), torch.zeros_like(weight, dtype=torch.int16)
    update = partial(_ops.linear_sgd_update_, weight, x, grad, *STEP)
    return {
        "by addmm": update,
        "stochastic": partial(update, 1),
        "split": partial(_ops.linear_sgd_update_, high, x, grad, *STEP, low=low),
        "clipped": partial(update, clip_value=1.0),
        "product": lambda: grad.t() @ x,
        "product, sgd_update_": lambda: _ops.sgd_update_(weight, grad.t() @ x, *STEP),
    }


def _embedding(shape: Shape, device: torch.device) -> Ways:
    # Distributed as in a text: the most frequent id occurs hundreds of times.
    ranks = torch.arange(1, shape.rows + 1, dtype=torch.float64)
    ids = torch.multinomial(1 / ranks, shape.tokens, replacement=True).to(device)
    weight = torch.randn(shape.rows, shape.columns, device=device, dtype=torch.bfloat16)
    grad = torch.randn(shape.tokens, shape.columns, device=device, dtype=torch.bfloat16)
    update = partial(_ops.embedding_sgd_update_, weight, ids, grad)
    added = grad.float()

    def dense() -> None:
        total = torch.zeros(shape.rows, shape.columns, device=device)
        total.index_add_(0, ids, added)
        weight.sub_(total, alpha=LR)

    ways: Ways = {"no decay": partial(update, *STEP), "decay": partial(update, LR, 0.01, 1.0)}
    return {**ways, "torch, dense": dense}


def _sgd(shape: Shape, device: torch.device) -> Ways:
    weight = torch.randn(shape.rows, shape.columns, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(weight)
    other = torch.empty_like(weight)
    return {
        "sgd_update_": partial(_ops.sgd_update_, weight, grad, *STEP),
        "stochastic": partial(_ops.sgd_update_, weight, grad, *STEP, 1),
        "torch, add_": lambda: weight.add_(grad, alpha=-LR),
        "copy": lambda: other.copy_(weight),
    }


def _linear_loss(shape: Shape, device: torch.device) -> Ways:
    hidden = torch.randn(shape.tokens, shape.columns, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.rows, shape.columns, device=device, dtype=torch.bfloat16) / 50
    target = torch.randint(shape.rows, (shape.tokens,), device=device)

    def backward(loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
        leaves = [value.detach().requires_grad_() for value in (hidden, weight)]
        loss(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    def torchs(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ weight.t()).float(), target)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        loss: Tensor = ops.linear_cross_entropy(hidden, weight, target)
        return loss

    def products() -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.t()
        return logits @ weight, logits.t() @ hidden

    ways: Ways = {"ringcomm": partial(backward, ours), "torch": partial(backward, torchs)}
    return {**ways, "products": products}


CASES: dict[str, tuple[Callable[[Shape, torch.device], Ways], tuple[Shape, ...]]] = {
    "linear": (_linear, (Shape(8192, 4096, 4096), Shape(8192, 4096, 14336))),
    "embedding": (_embedding, (Shape(8192, 4096, 128256),)),
    "sgd": (_sgd, (Shape(1, 4096, 14336),)),
    "linear_loss": (_linear_loss, (Shape(8192, 4096, 128256), Shape(16384, 2048, 32000))),
}


def extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The peak GPU memory of a call beyond what it returns; None on other devices."""
    call()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = call()
    left = torch.cuda.memory_allocated(device)
    del results
    return torch.cuda.max_memory_allocated(device) - left


def run_rank(bench: Bench, options: Options) -> None:
    """The one rank: every case in turn."""
    for name in options.only:
        make, shapes = CASES[name]
        for shape in (shape.scaled(options.scale) for shape in shapes):
            ways = make(shape, bench.device)
            memory = {way: extra_bytes(call, bench.device) for way, call in ways.items()}
            records = bench.race(ways, next(iter(ways)), case=name, shape=shape.text())
            bench.report([{**r, "extra_bytes": memory[r["way"]]} for r in records])
            del ways


def more_mib(record: dict[str, Any]) -> str:
    """The memory of a call."""
    extra = record["extra_bytes"]
    return "?" if extra is None else f"{extra / 2**20:,.0f}"


PROGRAM = harness.Program(
    doc=__doc__,
    kind="device_kernels",
    rank=run_rank,
    device="cuda",
    flags=[
        flag("--only", words, ",".join(CASES), "of the cases", known=CASES),
        flag("--seconds", float, 2.0, "per case and shape, for all ways"),
        flag("--scale", int, 1, "divides all sizes"),
    ],
    facts=lambda options: {"dtype": "bfloat16"},
    columns=[
        *("case", "shape", "way", "p50 µs", "p99 µs"),
        ("MiB more", more_mib),
        "time / the first's",
    ],
    section=("case", "shape"),
    title=lambda options: f"bfloat16, {options.device}",
)

if __name__ == "__main__":
    PROGRAM.run_script()
