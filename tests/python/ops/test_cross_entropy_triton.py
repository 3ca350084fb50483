"""Cross-entropy's Triton kernels: interpreted, compiled for GPUs that are not here, and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from triton_cases import NAMES, check
from triton_scripts import ARCHS, compiled_variants, gpu, interpreted_cases, needs_triton, run

import ringcomm
from ringcomm.ops import triton_kernels as triton_plans
from ringcomm.ops.losses import cross_entropy_cuda, token_losses_cuda

# ---- interpreted


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return interpreted_cases("triton_cases.py", NAMES)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_do_what_the_cpu_does(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


def _merged_by_both(rank: int) -> bool:
    """Through the group's own backend, here Gloo, and then the kernel."""
    torch.manual_seed(rank)
    logits, target = torch.randn(5, 7 + rank), torch.tensor([0, 6, 8, -100, 14])
    own = torch.ops.ringcomm.softmax_stats(
        logits, target, None, 7 * rank, -1, -100, 1.0, 0.0, True, True
    )
    group = dist.distributed_c10d._get_default_group().group_name
    wanted = torch.ops.ringcomm.merge_softmax_stats(own, group)
    found = token_losses_cuda.merge_softmax_stats(own, group)
    torch.testing.assert_close(found[:, :5], wanted[:, :5], rtol=1e-6, atol=1e-6)
    return torch.equal(*(stats[:, 5].contiguous().view(torch.int32) for stats in (found, wanted)))


@needs_triton
def test_stats_merge_over_a_group(interpreted: dict[str, str]) -> None:
    assert (
        run_ranks(2, _merged_by_both, backend="gloo", env={"TRITON_INTERPRET": "1"}) == [True] * 2
    )


def test_cuda_has_every_operator_that_the_cpu_has() -> None:
    for name in dir(cross_entropy_cuda):
        if hasattr(getattr(torch.ops.ringcomm, name, None), "default"):
            for key in ("CPU", "CUDA"):
                found = torch._C._dispatch_has_kernel_for_dispatch_key(f"ringcomm::{name}", key)
                assert found, (name, key)


# ---- compiled


@pytest.fixture(scope="module", params=ARCHS)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    cache = tmp_path_factory.mktemp("triton")
    return compiled_variants("triton_variants.py", request.param, cache)


@needs_triton
def test_compiled_kernels_move_vectors_and_spill_little(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """Where rows begin and end anywhere: no stride, lead or bound has a divisor."""
    for name, found in compiled.items():
        rows = not name.startswith(("merge", "loss", "count", "reduce"))
        if rows:
            assert "v4.b32" in found["loads"], (name, found)
        if rows and not name.startswith("stats") and "unaligned" not in name:
            assert "v4.b32" in found["stores"], (name, found)
        assert found["stack_bytes"] <= 80, (name, found)
        # One block of threads fits at least.
        assert found["registers"] <= 255, (name, found)
    assert "v4.b32" not in compiled["grad_kernel unaligned"]["stores"]  # of single elements


@needs_triton
def test_launchers_arguments_are_what_kernels_take(tmp_path: Path) -> None:
    launched = json.loads(run("triton_launches.py", TRITON_CACHE_DIR=str(tmp_path)))
    names = {name for name, _, _ in launched}
    assert names == {
        *("stats_kernel", "grad_kernel", "stats_and_grad_kernel", "scale_kernel"),
        *("merge_kernel", "loss_kernel", "count_kernel", "reduce_kernel"),
    }
    rows = ("stats_kernel", "grad_kernel", "stats_and_grad_kernel", "scale_kernel")
    assert all(vectors for name, vocab, vectors in launched if name in rows and vocab > 1)


def test_plans_cover_a_row_with_as_many_threads_as_there_may_be() -> None:
    for width in (0, 1, 31, 33, 4000, 16384, 32000, 32768, 32769, 50257, 128256):
        for num_options in range(4):
            held = triton_plans.held_plan(width, num_options)
            assert (held is None) == (width > max(8, 32 >> num_options) * 1024)
            assert held is None or held.block >= width
        for element_bytes in (2, 4):
            for plan in (
                triton_plans.stats_plan(width),
                triton_plans.grad_plan(width, element_bytes),
                triton_plans.twice_plan(element_bytes),
            ):
                assert plan.block.bit_count() == plan.num_warps.bit_count() == 1
                assert 1 <= plan.num_warps <= 32 <= plan.block


# ---- without triton


def test_triton_is_imported_by_the_first_launch_and_asked_for_by_name() -> None:
    script = """
import sys, torch, ringcomm
assert "triton" not in sys.modules
sys.modules["triton"] = None
from ringcomm.ops.losses import cross_entropy_cuda
try:
    cross_entropy_cuda.scale_(torch.ones(2, 2), torch.ones([]))
except ImportError as error:
    print(error)
"""
    assert "pip install triton" in run("-c", script)


# ---- on a GPU


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("name", NAMES)
    def test_kernels_do_what_the_cpu_does(self, name: str) -> None:
        check(name, torch.ops.ringcomm, "cuda")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("offset", "spread"), [(0.0, 3.0), (1e4, 1.0), (0.0, 1e4)])
    def test_errors_are_at_most_those_of_torch(
        self, dtype: torch.dtype, offset: float, spread: float
    ) -> None:
        torch.manual_seed(3)
        logits = (torch.randn(64, 32001, device="cuda") * spread + offset).to(dtype)
        target = torch.randint(32001, [64], device="cuda")

        def both(loss_of: Any, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = values.clone().requires_grad_()
            loss = loss_of(rows, target, reduction="none")
            loss.sum().backward()
            assert rows.grad is not None
            return loss.detach().double(), rows.grad.double()

        exact = both(F.cross_entropy, logits.double())
        theirs = both(F.cross_entropy, logits)
        ours = both(ringcomm.ops.cross_entropy, logits)
        lse = float(logits.double().logsumexp(1).abs().max().clamp(min=1))
        for mine, other, wanted, size in zip(ours, theirs, exact, (lse, 1.0), strict=True):
            allowed = 1.5 * float((other - wanted).abs().max()) + 2 * 2**-23 * size
            assert float((mine - wanted).abs().max()) <= allowed

    @pytest.mark.parametrize("inplace", [False, True])
    def test_nothing_waits_and_a_graph_repeats_it(self, inplace: bool) -> None:
        """A CUDA graph's capture fails at the first wait. Results are the same bits each time."""
        static = torch.randn(300, 1001, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(1001, [300], device="cuda")
        rows = torch.empty_like(static)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            logits = rows.copy_(static).detach().requires_grad_()
            given = logits * 1 if inplace else logits
            loss = ringcomm.ops.cross_entropy(given, target, inplace=inplace, z_loss=1e-4)
            (grad,) = torch.autograd.grad(loss, logits)
            return loss, grad

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for _ in range(2):
            static.copy_(torch.randn_like(static))
            graph.replay()
            for a, b in zip(found, step(), strict=True):
                assert torch.equal(a, b)

    def test_in_place_needs_no_memory_for_the_gradient(self) -> None:
        leaf = torch.randn(1024, 50257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        logits = leaf * 1
        target = torch.randint(50257, [1024], device="cuda")
        ringcomm.ops.cross_entropy(leaf[:2].detach() * 1, target[:2], inplace=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ringcomm.ops.cross_entropy(logits, target, inplace=True)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
