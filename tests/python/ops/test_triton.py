"""The Triton kernels and their launchers: compiled for GPUs elsewhere, and on one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import cluster_cases
import loss_cases
import pytest
import torch
import torch.nn.functional as F
import update_cases
from torch.utils._python_dispatch import TorchDispatchMode
from triton_scripts import gpu, needs_triton, run

from ringcomm.ops import cross_entropy, weight_update_cuda
from ringcomm.ops.losses import cross_entropy_cuda

_ops: Any = torch.ops.ringcomm


def test_cuda_has_every_operator_that_the_cpu_has() -> None:
    for module in (cross_entropy_cuda, weight_update_cuda):
        for name in dir(module):
            if hasattr(getattr(_ops, name, None), "default"):
                for key in ("CPU", "CUDA"):
                    found = torch._C._dispatch_has_kernel_for_dispatch_key(f"ringcomm::{name}", key)
                    assert found, (name, key)


def test_a_loss_takes_operators_only_where_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; elsewhere it always does."""
    of_loss = importlib.import_module("ringcomm.ops.losses.cross_entropy")
    rows = torch.zeros(2, 4)
    assert of_loss._steps_for(rows) is _ops
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert of_loss._steps_for(rows) is cross_entropy_cuda
    assert of_loss._steps_for(torch.nn.Parameter(rows)) is _ops
    with TorchDispatchMode():
        assert of_loss._steps_for(rows) is _ops
    with torch.profiler.profile():
        assert of_loss._steps_for(rows) is _ops
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert of_loss._steps_for(rows) is _ops


ON_TOKENS = ("merge_kernel", "loss_kernel", "reduce_kernel", "moments_kernel")
ONLY_SUMS = ("stats_kernel", "square_sums_kernel", "update_squares_kernel")


def check_build(build: dict[str, Any]) -> None:
    kernel, purpose = build["kernel"], build["for"]
    is_unaligned = purpose == "update 1001" and kernel != "sgd_kernel"
    if kernel not in ON_TOKENS and not is_unaligned:
        # Where rows of logits begin and end anywhere: no stride, lead or bound has a divisor.
        assert build["loads vectors"], build
        assert build["stores vectors"] or kernel in ONLY_SUMS, build
    assert build["stack_bytes"] <= (80 if purpose.startswith("loss") else 0), build
    # An SM has 1024 threads of the elementwise updates, or more.
    is_elementwise = purpose.startswith("update") and not is_unaligned
    assert build["registers"] <= (64 if is_elementwise else 255), build
    assert build["shared_bytes"] <= 99 << 10, build


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiled_kernels_move_vectors_and_keep_to_registers(arch: int, tmp_path: Path) -> None:
    """As the launchers launch them: the kernels take their arguments."""
    builds = json.loads(run("triton_builds.py", str(arch), TRITON_CACHE_DIR=str(tmp_path)))
    for build in builds:
        check_build(build)
    wanted = {*ON_TOKENS, *ONLY_SUMS, "grad_kernel", "stats_and_grad_kernel", "scale_kernel"}
    wanted |= {"sgd_kernel", "embedding_kernel", "adalomo_kernel"}
    assert {build["kernel"] for build in builds} == wanted


@needs_triton
def test_a_launch_passes_what_triton_passes(tmp_path: Path) -> None:
    run("triton_host.py", TRITON_CACHE_DIR=str(tmp_path))


def captured(step: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a step and its results. A capture fails at the first wait for the device."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def added_bytes(call: Any) -> int:
    """What a call takes at most besides what is there."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


class TestLossOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("name", loss_cases.BESIDES)
    def test_kernels_do_what_the_cpu_does(self, name: str) -> None:
        loss_cases.BESIDES[name](_ops, "cuda")

    @pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
        reason="no clusters with room for a row: a GPU of sm_90 or sm_100",
    )
    @pytest.mark.parametrize("name", cluster_cases.SERVED)
    def test_clusters_do_what_the_cpu_does(self, name: str) -> None:
        cluster_cases.check_served(name, "cuda")

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
            (grad,) = torch.autograd.grad(loss.sum(), rows)
            return loss.detach().double(), grad.double()

        exact = both(F.cross_entropy, logits.double())
        theirs, ours = both(F.cross_entropy, logits), both(cross_entropy, logits)
        lse = float(logits.double().logsumexp(1).abs().max().clamp(min=1))
        for mine, other, wanted, size in zip(ours, theirs, exact, (lse, 1.0), strict=True):
            allowed = 1.5 * float((other - wanted).abs().max()) + 2 * 2**-23 * size
            assert float((mine - wanted).abs().max()) <= allowed

    @pytest.mark.parametrize("vocab", [1001, 50257])
    @pytest.mark.parametrize("inplace", [False, True, "forward"])
    def test_nothing_waits_and_a_graph_repeats_it(self, inplace: Any, vocab: int) -> None:
        static = torch.randn(300, vocab, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(vocab, [300], device="cuda")
        rows = torch.empty_like(static)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            logits = rows.copy_(static).detach().requires_grad_()
            given = logits * 1 if inplace else logits
            loss = cross_entropy(given, target, inplace=inplace, z_loss=1e-4)
            return loss, torch.autograd.grad(loss, logits)[0]

        graph, found = captured(step)
        for _ in range(2):
            static.copy_(torch.randn_like(static))
            graph.replay()
            for a, b in zip(found, step(), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("inplace", [True, "forward"])
    def test_in_place_needs_no_memory_for_the_gradient(self, inplace: Any) -> None:
        leaf = torch.randn(1024, 50257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        rows, target = [leaf * 1, leaf * 1], torch.randint(50257, [1024], device="cuda")

        def step() -> Any:
            logits = rows.pop()
            return torch.autograd.grad(cross_entropy(logits, target, inplace=inplace), logits)

        assert added_bytes(step) < 1 << 20


class TestUpdatesOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("name", update_cases.NAMES)
    def test_kernels_do_what_the_oracle_does(self, name: str) -> None:
        update_cases.check(name, _ops, "cuda")

    @pytest.mark.parametrize("rounding_seed", [-1, 7])
    def test_nothing_waits_and_a_graph_repeats_it(self, rounding_seed: int) -> None:
        start = torch.randn(256, 512, device="cuda").bfloat16()
        weight, grad = start.clone(), torch.randn_like(start)
        x = torch.randn(300, 512, device="cuda").bfloat16()
        grad_out = torch.randn(300, 256, device="cuda").bfloat16()
        ids = torch.randint(256, [300], device="cuda")
        rows, cols = torch.rand(256, device="cuda"), torch.rand(512, device="cuda")
        given = (1e-2, 0.1, 1.0, rounding_seed)

        def step() -> tuple[torch.Tensor, ...]:
            weight.copy_(start)
            rows.fill_(1)
            cols.fill_(1)
            _ops.sgd_update_(weight, grad, *given)
            _ops.linear_sgd_update_(weight, x, grad_out, *given)
            _ops.linear_sgd_update_(weight, x, grad_out, *given, clip_value=1.0)
            _ops.embedding_sgd_update_(weight, ids, x, *given)
            sums = _ops.square_sums(grad, 1.0)
            factored = grad, rows, *_ops.adalomo_moments_(rows, cols, *sums, 0.5, 1e-30)
            squares = _ops.adalomo_squares(weight, *factored, 1.0)
            numbers = (squares, weight.numel(), *given[:2], 1e-3, 1.0, *given[2:])
            _ops.adalomo_update_(weight, *factored, *numbers)
            return weight.clone(), *sums, squares

        graph, found = captured(step)
        for _ in range(2):
            grad.copy_(torch.randn_like(grad))
            graph.replay()
            replayed = [result.clone() for result in found]
            for a, b in zip(replayed, step(), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("shape", [(8192, 4096, 4096), (1000, 1032, 776), (77, 1001, 333)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_a_product_is_as_exact_as_its_sum_in_fp32(
        self, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        tokens, num_out, num_in = shape
        torch.manual_seed(1)
        x = torch.randn(tokens, num_in, device="cuda").to(dtype)
        grad_out = torch.randn(tokens, num_out, device="cuda").to(dtype)
        weight = torch.randn(num_out, num_in, device="cuda")
        wanted = weight.double() - 0.5 * (grad_out.double().t() @ x.double())
        _ops.linear_sgd_update_(weight, x, grad_out, 0.5, 0.0, 1.0, clip_value=1e9)
        # Tensor cores of Hopper keep some bits less than fp32 has within a block of tokens.
        assert float((weight.double() - wanted).abs().max()) <= 1e-5 * tokens**0.5 * 30

    def test_a_product_takes_the_gradient_or_a_quarter_in_fp32(self) -> None:
        weight = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(512, 4096, device="cuda").bfloat16()
        given = (weight, x, x, 1e-2, 0.0, 1.0)
        assert added_bytes(lambda: _ops.linear_sgd_update_(*given)) < 1 << 20
        assert added_bytes(lambda: _ops.linear_sgd_update_(*given, 7)) < 33 << 20
        assert added_bytes(lambda: _ops.linear_sgd_update_(*given, clip_value=1.0)) < 17 << 20
