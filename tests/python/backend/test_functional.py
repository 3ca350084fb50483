"""Functional collectives over ringcomm, eager and as torch.compile sees them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import in_ranks, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

WORLD = 2
Program = Callable[[Tensor], Tensor]


def group() -> Any:
    return dist.group.WORLD


def largest(xs: list[Tensor]) -> Tensor:
    return torch.maximum(xs[0], xs[1])


def around(x: Tensor) -> Tensor:
    """Of one dimension: torch counts the splits in elements."""
    return funcol.permute_tensor(x.flatten(), [1, 0], group()).view_as(x)


def all_to_all(x: Tensor) -> Tensor:
    return funcol.all_to_all_single(x, None, None, group())


def all_to_all_uneven(x: Tensor) -> Tensor:
    """Each keeps 1 row of 4 and sends 3."""
    sizes = [1, 3] if dist.get_rank() == 0 else [3, 1]
    return funcol.all_to_all_single(x, sizes, sizes, group())


def coalesced(x: Tensor) -> Tensor:
    """Three calls of several tensors each; their results side by side."""
    sums = funcol.all_reduce_coalesced([x, x + 1], "sum", group())
    gathered = funcol.all_gather_into_tensor_coalesced([x[:1], x[1:]], group())
    scattered = funcol.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], group())
    return torch.cat([*sums, *gathered, *scattered])


def in_place(x: Tensor) -> Tensor:
    """torch.distributed's own calls; the compiler puts the functional ones for them."""
    total = x.clone()
    dist.all_reduce(total)
    gathered = x.new_empty(WORLD * len(x), x.shape[1])
    dist.all_gather_into_tensor(gathered, x)
    part = torch.empty_like(x[: len(x) // WORLD])
    dist.reduce_scatter_tensor(part, x)
    return torch.cat([total, gathered, part])


# What to run, and what it gives from the ranks' inputs: (results of a single process, rank).
Oracle = Callable[[list[Tensor], int], Tensor]
PROGRAMS: dict[str, tuple[Program, Oracle]] = {
    "all_reduce sum": (lambda x: funcol.all_reduce(x, "sum", group()), lambda xs, r: xs[0] + xs[1]),
    "all_reduce max": (lambda x: funcol.all_reduce(x, "max", [0, 1]), lambda xs, r: largest(xs)),
    "all_gather dim 1": (
        lambda x: funcol.all_gather_tensor(x, 1, group()),
        lambda xs, r: torch.cat(xs, 1),
    ),
    "reduce_scatter dim 0": (
        lambda x: funcol.reduce_scatter_tensor(x, "avg", 0, group()),
        lambda xs, r: (xs[0] + xs[1]).chunk(2)[r] / 2,
    ),
    "reduce_scatter dim 1": (
        lambda x: funcol.reduce_scatter_tensor(x, "max", 1, group()),
        lambda xs, r: largest(xs).chunk(2, 1)[r],
    ),
    "broadcast": (lambda x: funcol.broadcast(x, 1, group()), lambda xs, r: xs[1]),
    "coalesced": (
        coalesced,
        lambda xs, r: torch.cat(
            [xs[0] + xs[1], xs[0] + xs[1] + 2, xs[0][:1], xs[1][:1], xs[0][1:], xs[1][1:]]
            + [factor * (xs[0] + xs[1]).chunk(2)[r] for factor in (1, 2)]
        ),
    ),
    "in place": (
        in_place,
        lambda xs, r: torch.cat([xs[0] + xs[1], *xs, (xs[0] + xs[1]).chunk(2)[r]]),
    ),
    "all_to_all": (all_to_all, lambda xs, r: torch.cat([x.chunk(2)[r] for x in xs])),
    "all_to_all uneven": (
        all_to_all_uneven,
        lambda xs, r: torch.cat([xs[0].split([1, 3])[r], xs[1].split([3, 1])[r]]),
    ),
    "permute": (around, lambda xs, r: xs[1 - r]),
}


NEEDS_CXX = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor needs a C++ compiler on PATH",
)
# One rank compiles what the other waits for, some seconds on a quiet machine.
PATIENCE: dict[str, Any] = {"timeout_s": 240.0, "group_timeout_s": 120.0}


def check(rank: int, names: list[str], compiler: str | None) -> None:
    """Between two elementwise operations: a compiler may fuse, and must keep the order."""
    torch.manual_seed(3)
    inputs = [torch.randint(-9, 9, (4, 6)).float() for _ in range(WORLD)]
    for program, expected in map(PROGRAMS.__getitem__, names):

        def run(x: Tensor, program: Program = program) -> Tensor:
            return program(2 * x) + 1

        if compiler is not None:
            torch._dynamo.reset()
            run = torch.compile(run, backend=compiler, fullgraph=True)
        for turn in range(2):
            doubled = [2 * x + turn for x in inputs]
            result = run(inputs[rank] + turn / 2)
            assert torch.equal(result + 0, expected(doubled, rank) + 1)


@pytest.mark.parametrize("compiler", [None, "aot_eager"], ids=["eager", "aot_eager"])
def test_functional(compiler: str | None) -> None:
    names = list(PROGRAMS)
    if compiler is not None and not hasattr(dist, "all_gather_single"):
        names.remove("all_gather dim 1")  # torch 2.11 does not trace its own gather
    run_ranks(WORLD, check, names, compiler, **PATIENCE)


@pytest.mark.slow
@NEEDS_CXX
def test_inductor(tmp_path: Path) -> None:
    """It compiles in the ranks themselves, scalar code, and finds nothing of other runs."""
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # takes longer than these few kernels
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # tries which vector instructions compile, otherwise
    }
    run_ranks(WORLD, check, ["in place"], "inductor", env=env, **PATIENCE)


# ---- gradients


@in_ranks(WORLD)
def test_autograd_and_dtensor(rank: int) -> None:
    """Of a gathered, a scattered and an exchanged tensor; DTensor from one dimension to another."""
    x = torch.arange(12.0).view(4, 3).requires_grad_()
    weights = torch.arange(24.0).view(8, 3)
    gathered = funcol.all_gather_tensor_autograd(x, 0, group())
    (gathered * (weights + rank)).sum().backward()
    assert torch.equal(x.grad, (2 * weights + 1).chunk(2)[rank])  # type: ignore[arg-type]
    x.grad = None
    part = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group())
    (part * weights.chunk(4)[rank]).sum().backward()
    assert torch.equal(x.grad, weights[:4])  # type: ignore[arg-type]
    x.grad = None
    moved = funcol.all_to_all_single_autograd(x * (rank + 1), None, None, group())
    expected = [(r + 1) * x.detach().chunk(2)[rank] for r in range(WORLD)]
    assert torch.equal(moved.detach() + 0, torch.cat(expected))
    (moved.sum() * 2).backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0 * (rank + 1)))  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(35.0).view(7, 5)
    layout: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
    rows = DTensor.from_local(whole.chunk(2)[rank], mesh, [Shard(0)], **layout)
    columns = rows.redistribute(mesh, [Shard(1)]).to_local()
    assert torch.equal(columns, whole.chunk(2, 1)[rank])
