"""Weight updates' Triton kernels: interpreted, compiled for GPUs that are not here, and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import update_oracle as oracle
from triton_scripts import ARCHS, compiled_variants, gpu, interpreted_cases, needs_triton, run
from update_cases import NAMES, check

from ringcomm.ops.updates import arguments as update_plans
from ringcomm.ops.updates import weight_update_cuda
from ringcomm.ops.updates.arguments import rounding_key

# What multiplies 16-bit matrices, by architecture.
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}


# ---- interpreted


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return interpreted_cases("update_cases.py", NAMES)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_do_what_the_oracle_does(
    name: str, interpreted: dict[str, str]
) -> None:
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ids_out_of_range"])
def test_cpu_operators_do_what_the_kernels_do(name: str) -> None:
    check(name, torch.ops.ringcomm, "cpu")


def test_cuda_has_every_launcher() -> None:
    names = ("sgd_update_", "linear_sgd_update_", "embedding_sgd_update_", "square_sums")
    for name in (*names, "adalomo_squares", "adalomo_update_"):
        assert hasattr(weight_update_cuda, name)
        found = torch._C._dispatch_has_kernel_for_dispatch_key(f"ringcomm::{name}", "CUDA")
        assert found, name


def test_keys_are_32_bits_of_all_of_a_seed() -> None:
    keys = [rounding_key(seed) for seed in (0, 1, 1 << 32, (1 << 63) - 1)]
    assert len(set(keys)) == 4
    assert all(-(1 << 31) <= key < 1 << 31 for key in keys)
    zero = torch.zeros(1, dtype=torch.int64).numpy()
    assert (
        oracle.mix(oracle.mix(zero ^ (keys[2] & 0xFFFFFFFF)))[0] >> 16
        == (oracle.random_bits(1 << 32, zero)[0])
    )


# ---- compiled


@pytest.fixture(scope="module", params=ARCHS)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, dict[str, Any]]]:
    cache = tmp_path_factory.mktemp("triton")
    return request.param, compiled_variants("update_variants.py", request.param, cache)


@needs_triton
def test_compiled_kernels_move_vectors_and_keep_to_registers(
    compiled: tuple[int, dict[str, dict[str, Any]]],
) -> None:
    arch, variants = compiled
    for name, found in variants.items():
        assert "v4.b32" in found["loads"], (name, found)
        if "square" not in name:  # which write sums alone
            assert "v4.b32" in found["stores"], (name, found)
        # 64 x 64 on sm_100 keeps some of its epilogue's addresses there, once a tile.
        assert found["stack_bytes"] <= (24 if arch == 100 else 0), (name, found)
        if not name.startswith("linear"):  # an SM has 1024 threads of them, or more
            assert found["registers"] <= 64, (name, found)
        assert found["registers"] <= 255, (name, found)
        # Of 227 KiB on sm_90 and sm_100; the addressed kernels run on GPUs that have 99.
        limit = 227 << 10 if "described" in name else 99 << 10
        assert found["shared_bytes"] <= limit, (name, found)


@needs_triton
def test_compiled_products_use_tensor_cores_and_load_ahead(
    compiled: tuple[int, dict[str, dict[str, Any]]],
) -> None:
    arch, variants = compiled
    products = {name: found for name, found in variants.items() if name.startswith("linear")}
    assert any("described 128x256" in name for name in products) == (arch >= 90)
    for name, found in products.items():
        is_fp32 = (
            name.split()[-2] == "fp32"
            if name.endswith("stochastic")
            else (name.split()[-1] == "fp32")
        )
        counts = {kind: found[kind] for kind in TENSOR_CORES.values() if found[kind]}
        assert set(counts) == (set() if is_fp32 else {TENSOR_CORES[arch]}), (name, found)
        if "addressed" in name:  # two operands of all stages but two are on their way
            assert max(map(int, found["waits"])) >= 2 * (found["stages"] - 2), (name, found)


@needs_triton
def test_launchers_arguments_are_what_kernels_take(tmp_path: Path) -> None:
    launched = json.loads(run("update_launches.py", TRITON_CACHE_DIR=str(tmp_path)))
    assert {name for name, _, _ in launched} == {
        *("sgd_kernel", "embedding_kernel", "described_kernel", "addressed_kernel"),
        *("square_sums_kernel", "update_squares_kernel", "adalomo_kernel"),
    }
    assert all(vectors for name, width, vectors in launched if width == 4096 or name[:3] == "sgd")


def test_plans_give_most_sms_a_tile() -> None:
    machine = update_plans.Machine(True, 132)
    for size, wanted in (
        (4096, (128, 256)),
        (2048, (128, 256)),
        (1536, (128, 128)),
        (64, (64, 64)),
    ):
        plan = update_plans.linear_plan(size, size, 2, machine, True)
        assert (plan.block_out, plan.block_in) == wanted, size
    for plan in (*update_plans.ADDRESSED, *update_plans.ADDRESSED_FP32):
        assert plan in {update_plans.linear_plan(size, size, width, machine, False)
                        for size in (64, 8192) for width in (2, 4)}  # fmt: skip


# ---- on a GPU


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("name", NAMES)
    def test_kernels_do_what_the_oracle_does(self, name: str) -> None:
        check(name, torch.ops.ringcomm, "cuda")

    @pytest.mark.parametrize("rounding_seed", [-1, 7])
    def test_nothing_waits_and_a_graph_repeats_it(self, rounding_seed: int) -> None:
        """A CUDA graph's capture fails at the first wait. Results are the same bits each time."""
        ops: Any = torch.ops.ringcomm
        start = torch.randn(256, 512, device="cuda").bfloat16()
        weight, grad = start.clone(), torch.randn_like(start)
        x = torch.randn(300, 512, device="cuda").bfloat16()
        grad_out = torch.randn(300, 256, device="cuda").bfloat16()
        ids = torch.randint(256, [300], device="cuda")
        rows, cols = torch.rand(256, device="cuda"), torch.rand(512, device="cuda")
        numbers = torch.tensor([1e-2, 0.99], device="cuda")
        given = (1e-2, 0.1, 1.0, rounding_seed)

        def step() -> tuple[torch.Tensor, ...]:
            weight.copy_(start)
            ops.sgd_update_(weight, grad, *given)
            ops.linear_sgd_update_(weight, x, grad_out, *given)
            ops.linear_sgd_update_(weight, x, grad_out, *given, clip_value=1.0)
            ops.embedding_sgd_update_(weight, ids, x, *given)
            sums = ops.square_sums(grad, 1.0)
            squares = ops.adalomo_squares(weight, grad, rows, cols, 1.0)
            ops.adalomo_update_(weight, grad, rows, cols, numbers, 1.0, rounding_seed)
            return weight.clone(), *sums, squares

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
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
        torch.ops.ringcomm.linear_sgd_update_(weight, x, grad_out, 0.5, 0.0, 1.0, clip_value=1e9)
        # Tensor cores of Hopper keep some bits less than fp32 has within a block of tokens.
        assert float((weight.double() - wanted).abs().max()) <= 1e-5 * tokens**0.5 * 30

    def test_a_product_needs_no_memory_for_the_gradient(self) -> None:
        weight = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(512, 4096, device="cuda").bfloat16()
        given = (weight, x, x, 1e-2, 0.0, 1.0, 7)
        torch.ops.ringcomm.linear_sgd_update_(*given)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.ops.ringcomm.linear_sgd_update_(*given)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
