#!/usr/bin/env python3
"""Measures tensor-parallel inference on two ranks: one fused call, and decoding.

    python benchmarks/inference.py [--deepspeed FILE] [--vllm FILE]

First all_reduce_add_rms_norm_ against its parts: an all_reduce, and then torch's add_ and rms_norm,
or a second call that fuses these two. Then tokens per second of examples/decode.py with each way to
make the two sums of a layer: ringcomm's, Gloo's, those of other projects, and none. FILE is a
project's shared-memory operators, compiled alone: DeepSpeed's `deepspeed_shm_comm` extension, or a
library that registers vLLM's `torch.ops._C.shm_allreduce` and `fused_add_rms_norm`. Embedding and
logits go over ringcomm in all ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from decode import AddNorm, Decoder, make_model
from harness import Bench, Options, flag
from libraries import FLAGS, open_operators
from torch import Tensor
from torch.nn import functional as F

from ringcomm import ops
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import open_default_group

WORLD_SIZE = 2
EPS = 1e-5
SIZES_BYTES = tuple(1 << power for power in range(11, 17))  # of a call's input, 2 to 64 KiB
FEATURES = 1024
CONTEXT = 64  # tokens after which decoding starts again
FUSED, NONE = "ringcomm, fused", "nothing sent"


def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """By torch: residual += x, and x becomes its norm."""
    residual.add_(x)
    x.copy_(F.rms_norm(residual, weight.shape, weight, eps))


def in_two(reduce: Callable[[Tensor], object], add_norm: AddNorm = add_and_norm) -> AddNorm:
    """A way to sum in place and then to norm."""

    def call(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        reduce(x)
        add_norm(x, residual, weight, eps)

    return call


def own_ways(alone: dist.ProcessGroup) -> dict[str, AddNorm]:
    """ringcomm's; `alone` is a group of this rank."""

    def fused_alone(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> object:
        return ops.all_reduce_add_rms_norm_(x, residual, weight, eps, alone)

    def reduce(x: Tensor) -> object:
        return ops.all_reduce(x, out=x)

    return {
        FUSED: ops.all_reduce_add_rms_norm_,
        "ops.all_reduce, fused norm": in_two(reduce, fused_alone),
        "ops.all_reduce, torch": in_two(reduce),
        "dist.all_reduce, torch": in_two(dist.all_reduce),
    }


def peers_of(team: Team, options: Options) -> dict[str, AddNorm]:
    """The ways of other projects, of those that are given; vLLM's with its own fused norm."""
    return {
        name: in_two(reduce, torch.ops._C.fused_add_rms_norm) if name == "vLLM" else in_two(reduce)
        for name, reduce in open_operators(team, options).items()
    }


def check_call(team: Team, add_norm: AddNorm, dtype: torch.dtype) -> int:
    """How many elements of a call's results are wrong, on all ranks. Collective."""
    parts = [torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    x, residual = parts[team.rank].to(dtype, copy=True), torch.ones(4, FEATURES, dtype=dtype)
    weight = torch.linspace(0.5, 2, FEATURES).to(dtype)
    add_norm(x, residual, weight, EPS)
    total = 1 + torch.stack([part.to(dtype).float() for part in parts]).sum(0)
    normed = F.rms_norm(total, (FEATURES,), weight.float(), EPS)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    num_wrong: int = sum(
        int(((found.float() - wanted).abs() > limit * (1 + wanted.abs())).sum())
        for found, wanted in ((x, normed), (residual, total))
    )
    return sum(team.share(num_wrong))


def measure_calls(bench: Bench, ways: dict[str, AddNorm], options: Options) -> None:
    """Each size in turn; rank 0 reports."""
    dtype = getattr(torch, options.dtype)
    wrong = {name: check_call(bench.team, way, dtype) for name, way in ways.items()}
    weight = torch.ones(FEATURES, dtype=dtype)
    for size in SIZES_BYTES:
        shape = (max(1, size // dtype.itemsize // FEATURES), min(FEATURES, size // dtype.itemsize))

        def call(way: AddNorm, shape: tuple[int, int] = shape) -> Callable[[], object]:
            x, residual = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
            return partial(way, x, residual, weight[: shape[1]], EPS)

        calls = {name: call(way) for name, way in ways.items()}
        bench.report(bench.race(calls, FUSED, wrong, what="call", size_bytes=size))


def decoding(add_norm: AddNorm, options: Options) -> Callable[[], int]:
    """A call that decodes one token."""
    model = make_model(options.hidden, options.layers, getattr(torch, options.dtype))
    decoder = Decoder(model, add_norm)
    start = torch.tensor([[1]])
    texts = (itertools.islice(decoder.tokens(start), CONTEXT) for _ in itertools.count())
    return itertools.chain.from_iterable(texts).__next__


def measure_decoding(bench: Bench, ways: dict[str, AddNorm], options: Options) -> None:
    """All ways in turn; rank 0 reports. Tokens must be those of the first."""
    calls = {name: decoding(way, options) for name, way in ways.items()}
    written = {name: [call() for _ in range(CONTEXT)] for name, call in calls.items()}
    wrong = {
        name: sum(bench.team.share(name != NONE and tokens != written[FUSED]))
        for name, tokens in written.items()
    }
    facts: dict[str, Any] = {"what": "token", "size_bytes": None}
    records = bench.race(calls, FUSED, wrong, seconds=options.decode_seconds, **facts)
    bench.report([record | {"tokens_per_s": 1e6 / record["p50_us"]} for record in records])


def run_rank(bench: Bench, options: Options) -> None:
    """Both parts, in one set of processes."""
    open_default_group(bench.team, "ringcomm")
    alone, _ = dist.new_subgroups(1)
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    ways = own_ways(alone)
    peers = peers_of(bench.team, options)
    with torch.inference_mode():
        measure_calls(bench, {**ways, **peers}, options)
    ways |= {"Gloo": in_two(lambda x: dist.all_reduce(x, group=gloo)), **peers}
    measure_decoding(bench, {**ways, NONE: in_two(lambda x: x)}, options)


PROGRAM = harness.Program(
    doc=__doc__,
    kind="inference",
    rank=run_rank,
    world=WORLD_SIZE,
    seconds=4.0,
    per="size",
    flags=[
        flag("--decode-seconds", float, 40.0, "of decoding, all ways together"),
        flag("--dtype", str, "bfloat16", choices=("float32", "bfloat16")),
        flag("--hidden", int, 512, "of the decoder"),
        flag("--layers", int, 4, "of the decoder"),
        *FLAGS,
    ],
    file=lambda options: f"inference-w{WORLD_SIZE}",
    named=("dtype", "hidden", "layers"),
)

if __name__ == "__main__":
    PROGRAM.run_script()
