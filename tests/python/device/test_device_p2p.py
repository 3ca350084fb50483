"""Collectives of tensors of GPUs over another backend's sends and receives, on emulated GPUs.

Results against numpy; what works and streams do stands in test_device_works.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import emulated_gpu
import oracle
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus
from test_collectives import OPS
from torch import Tensor

from ringcomm import Options, stats

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
POISON = {"RINGCOMM_EMULATOR_POISON": "1"}
DTYPES = [*oracle.FLOATS, *oracle.INTS, torch.bool]
WORLDS = [2, 3, 4]


def reductions_of(dtype: torch.dtype) -> list[str]:
    if dtype in oracle.FLOATS:
        return oracle.NUMBER_OPS
    ops = [*oracle.NUMBER_OPS, *oracle.BIT_OPS]
    return [op for op in ops if op != "avg"] if dtype == torch.bool else ops


@cache
def group_with(**options: Any) -> Any:
    """A group of all ranks with these options; made once in each pool."""
    return dist.new_group(backend="cpu:ringcomm,emugpu:ringcomm", pg_options=Options(**options))


def inputs_of(num_elems: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [oracle.integers(r, num_elems, dtype, seed) for r in range(dist.get_world_size())]


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.to(GPU)


def run(world_size: int, fn: Any, *args: Any) -> list[Any]:
    return run_on_gpus(world_size, fn, *args, env=POISON)


# ---- reductions


def check_types(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for op in reductions_of(dtype):
        inputs = inputs_of(67, dtype)
        expected = oracle.reduced(inputs, op)
        for algorithm in ("one_shot", "two_shot", "ring"):
            group = group_with(algorithm=algorithm, slot_bytes=64)
            tensor = on_gpu(inputs[rank])
            dist.all_reduce(tensor, OPS[op], group=group)
            oracle.assert_equal(tensor.cpu(), expected)
        tensor = on_gpu(inputs[rank])
        dist.reduce(tensor, world_size - 1, OPS[op])
        if rank == world_size - 1:
            oracle.assert_equal(tensor.cpu(), expected)
        wide = inputs_of(5 * world_size, dtype, seed=1)
        scattered = torch.empty(5, dtype=dtype, device=GPU)
        dist.reduce_scatter_tensor(scattered, on_gpu(wide[rank]), OPS[op])
        own = oracle.reduced(wide, op)[5 * rank : 5 * rank + 5]
        oracle.assert_equal(scattered.cpu(), own)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_reductions(dtype: torch.dtype) -> None:
    run(3, check_types, dtype)


def check_sizes(rank: int, algorithm: str, deterministic: str | None) -> None:
    world_size = dist.get_world_size()
    group = group_with(algorithm=algorithm, deterministic=deterministic, slot_bytes=256)
    sizes = [
        *(0, 1),  # nothing; less than one element per rank
        *(world_size - 1, world_size, world_size + 1),  # chunks of one element, some empty
        64 * world_size + 1,  # a slot of the ring for each chunk, and an element
        1001,  # several pieces, several groups of slices, chunks of different sizes
    ]
    for num_elems in sizes:
        inputs = inputs_of(num_elems, torch.float32)
        tensor = on_gpu(inputs[rank])
        dist.all_reduce(tensor, group=group)
        oracle.assert_equal(tensor.cpu(), oracle.reduced(inputs, "sum"))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", ["auto", "one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("deterministic", [None, "rank_order"])
def test_sizes(world_size: int, algorithm: str, deterministic: str | None) -> None:
    run(world_size, check_sizes, algorithm, deterministic)


def random_result(rank: int, dtype: torch.dtype, algorithm: str, ordered: bool) -> bytes:
    inputs = [oracle.floats(r, 1001, dtype) for r in range(dist.get_world_size())]
    options = {"deterministic": "rank_order"} if ordered else {}
    tensor = on_gpu(inputs[rank])
    dist.all_reduce(tensor, group=group_with(algorithm=algorithm, slot_bytes=256, **options))
    if ordered:  # from left to right, in fp32 where the type is shorter, rounded once
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        total = inputs[0].to(wide)
        for other in inputs[1:]:
            total = total + other.to(wide)
        oracle.assert_equal(tensor.cpu(), total.to(dtype))
    return oracle.bits(tensor.cpu())


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_all_ranks_get_the_same_bits(dtype: torch.dtype) -> None:
    for algorithm in ("one_shot", "two_shot", "ring"):
        assert len(set(run(3, random_result, dtype, algorithm, False))) == 1
        assert len(set(run(3, random_result, dtype, algorithm, True))) == 1


# ---- what is moved, and large calls


def check_large(rank: int) -> None:
    """Rings and chains, which take calls of 1 MiB and more."""
    world_size = dist.get_world_size()
    num_elems = (1 << 18) + 7
    inputs = inputs_of(num_elems, torch.float32)
    expected = oracle.reduced(inputs, "avg")
    before = stats()
    tensor = on_gpu(inputs[rank])
    dist.reduce(tensor, 1, dist.ReduceOp.AVG)
    if rank == 1:
        oracle.assert_equal(tensor.cpu(), expected)
    tensor = on_gpu(inputs[rank])
    dist.broadcast(tensor, 1)
    oracle.assert_equal(tensor.cpu(), inputs[1])
    gathered = [torch.empty(num_elems, device=GPU) for _ in range(world_size)]
    dist.all_gather(gathered, on_gpu(inputs[rank]))
    for output, value in zip(gathered, inputs, strict=True):
        oracle.assert_equal(output.cpu(), value)
    scattered = torch.empty(num_elems, device=GPU)
    dist.reduce_scatter(scattered, [on_gpu(inputs[rank])] * world_size)
    oracle.assert_equal(scattered.cpu(), oracle.reduced(inputs, "sum"))
    ring = "ring" if world_size > 2 else "direct"
    after = stats()
    num_bytes = 4 * num_elems
    for op, algorithm, sent_bytes in (
        ("reduce", "ring", 0 if rank == 1 else num_bytes),
        ("broadcast", ring, 0 if rank == 0 else num_bytes),  # from 1 by way of 2, where there is
        ("all_gather", ring, (world_size - 1) * num_bytes),
        ("reduce_scatter", "ring", (world_size - 1) * num_bytes),
    ):
        count = before.get((op, algorithm), {}).get("sent_bytes", 0)
        assert after[op, algorithm]["sent_bytes"] - count == sent_bytes, op


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_calls(world_size: int) -> None:
    run(world_size, check_large)


def check_moves(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for num_elems in (0, 1, 33):
        values = [oracle.integers(r, num_elems, torch.uint8).to(dtype) for r in range(world_size)]
        for root in range(world_size):
            tensor = on_gpu(values[rank])
            dist.broadcast(tensor, root)
            oracle.assert_equal(tensor.cpu(), values[root])
            outputs = [on_gpu(torch.zeros_like(value)) for value in values]
            dist.gather(on_gpu(values[rank]), outputs if rank == root else None, root)
            if rank == root:
                for output, value in zip(outputs, values, strict=True):
                    oracle.assert_equal(output.cpu(), value)
            output = on_gpu(torch.zeros_like(values[rank]))
            dist.scatter(output, outputs if rank == root else None, root)
            oracle.assert_equal(output.cpu(), values[rank])
        joined = torch.empty(world_size * num_elems, dtype=dtype, device=GPU)
        dist.all_gather_into_tensor(joined, on_gpu(values[rank]))
        oracle.assert_equal(joined.cpu(), torch.cat(values))
        outputs = [on_gpu(torch.zeros_like(value)) for value in values]
        dist.all_to_all(outputs, [on_gpu(values[rank])] * world_size)
        for output, value in zip(outputs, values, strict=True):
            oracle.assert_equal(output.cpu(), value)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e5m2])
def test_moves(world_size: int, dtype: torch.dtype) -> None:
    run(world_size, check_moves, dtype)


def check_uneven(rank: int) -> None:
    world_size = dist.get_world_size()

    def value(source: int, to: int) -> Tensor:
        return torch.full((source * to, 3), 10 * source + to, dtype=torch.int16)

    mine = torch.cat([value(rank, peer) for peer in range(world_size)])
    output = torch.empty(rank * sum(range(world_size)), 3, dtype=torch.int16, device=GPU)
    splits = [rank * peer for peer in range(world_size)]
    dist.all_to_all_single(output, on_gpu(mine), splits, splits)
    expected = torch.cat([value(peer, rank) for peer in range(world_size)])
    oracle.assert_equal(output.cpu(), expected)
    both = torch.arange(world_size) + 10 * rank
    tensor = on_gpu(both)
    dist.all_to_all_single(tensor, tensor)  # in place
    oracle.assert_equal(tensor.cpu(), torch.arange(world_size) * 10 + rank)
    outputs = [torch.empty(peer, device=GPU) for peer in range(world_size)]
    dist.all_gather(outputs, torch.full((rank,), float(rank), device=GPU))
    for peer, gathered in enumerate(outputs):
        assert (gathered.cpu() == peer).all()


@pytest.mark.parametrize("world_size", WORLDS)
def test_uneven_shares(world_size: int) -> None:
    run(world_size, check_uneven)


def check_layouts(rank: int) -> None:
    """Outputs that are not contiguous are written where their elements are, and nowhere else."""
    world_size = dist.get_world_size()
    for is_async in (False, True):
        base = torch.full((20, 4), 7.0, device=GPU)
        work = dist.all_reduce(base[:, 1], async_op=is_async)
        _ = work.wait() if work is not None else None
        assert (base.cpu()[:, 1] == 7.0 * world_size).all()
        assert (base.cpu()[:, [0, 2, 3]] == 7.0).all()
        column = torch.zeros(20, 4, device=GPU)
        work = dist.broadcast(column[:, 2] if rank else base[:, 1], 0, async_op=is_async)
        _ = work.wait() if work is not None else None
        assert rank == 0 or (column.cpu()[:, 2] == 7.0 * world_size).all()
        scaled = torch.ones(5, dtype=torch.complex64, device=GPU)
        work = dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), async_op=is_async)
        _ = work.wait() if work is not None else None
        assert (scaled.cpu() == 0.5 * world_size).all()


def test_layouts() -> None:
    run(3, check_layouts)
