"""deterministic="rank_order": every reduction is the left-to-right one, to the last bit."""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import ringcomm
from ringcomm import Options

ALGORITHMS = ["auto", "one_shot", "two_shot", "ring"]
STEPS: dict[str, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
# Nothing; fewer than ranks; around a slot of the ring (1 KiB, 512 or 256 or 128 elements); many.
SIZES = [0, 1, 2, 127, 129, 257, 513, 5003]


@cache
def ordered_group(algorithm: str, deterministic: str | None = "rank_order") -> Any:
    options: Any = Options(
        algorithm=algorithm,  # type: ignore[arg-type]
        deterministic=deterministic,  # type: ignore[arg-type]
        slot_bytes=1024,
    )
    return dist.new_group(backend="ringcomm", pg_options=options)


def left_to_right(inputs: list[Tensor], op: str) -> Tensor:
    """In fp32 where elements have 16 bits, and rounded once; else in the type."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = reduce(STEPS[op], [value.to(wide) for value in inputs])
    return (total / len(inputs) if op == "avg" else total).to(dtype)


def check_algorithm(rank: int, algorithm: str, dtype: torch.dtype, sizes: list[int]) -> None:
    group = ordered_group(algorithm)
    for op in STEPS:
        reduce_op = getattr(dist.ReduceOp, op.upper())
        for num_elems in sizes:
            inputs = [oracle.floats(r, num_elems, dtype) for r in range(dist.get_world_size())]
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, reduce_op, group=group)
            oracle.assert_equal(tensor, left_to_right(inputs, op))


CARRIERS = [(2, "shm"), (3, "shm"), (3, "p2p"), (4, "hosts")]


@pytest.mark.parametrize(("world_size", "carrier"), CARRIERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce(world_size: int, carrier: str, algorithm: str) -> None:
    env: Any = {"RINGCOMM_TRANSPORT": carrier}
    if carrier == "hosts":
        env = [{"RINGCOMM_HOST_ID": host} for host in "abab"]
    is_shm = carrier == "shm"
    for dtype in oracle.FLOATS if is_shm else (torch.float32, torch.bfloat16):
        sizes = SIZES if is_shm else [0, 2, 129, 5003]
        run_ranks(world_size, check_algorithm, algorithm, dtype, sizes, env=env)
    if is_shm:
        run_ranks(world_size, check_algorithm, algorithm, torch.bfloat16, [777_777], env=env)


def check_others(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    group = ordered_group("auto")
    for op in STEPS:
        reduce_op = getattr(dist.ReduceOp, op.upper())
        for num_elems in (1, 130, 300_001):
            inputs = [oracle.floats(r, world_size * num_elems, dtype) for r in range(world_size)]
            expected = left_to_right(inputs, op)
            tensor = inputs[rank].clone()
            dist.reduce(tensor, 0, reduce_op, group=group)
            oracle.assert_equal(tensor, expected if rank == 0 else inputs[rank])
            output = torch.empty(num_elems, dtype=dtype)
            dist.reduce_scatter_tensor(output, inputs[rank], reduce_op, group=group)
            oracle.assert_equal(output, expected.chunk(world_size)[rank])
            sizes = [num_elems - 1] * (world_size - 1)
            sizes.append(world_size * num_elems - sum(sizes))
            output = torch.empty(sizes[rank], dtype=dtype)
            shares = list(inputs[rank].split(sizes))
            dist.reduce_scatter(output, shares, reduce_op, group=group)
            oracle.assert_equal(output, expected.split(sizes)[rank])


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_other_reductions(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_others, dtype)


def sums_of_ring(rank: int, deterministic: str | None) -> tuple[bytes, bytes, int]:
    """The sum of this ring, what it should be, and what it sent."""
    group = ordered_group("ring", deterministic)
    world_size = dist.get_world_size()
    inputs = [oracle.floats(r, 1000, torch.float32) for r in range(world_size)]
    before = ringcomm.stats(group).get(("all_reduce", "ring"), {"sent_bytes": 0})["sent_bytes"]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, group=group)
    sent = ringcomm.stats(group)["all_reduce", "ring"]["sent_bytes"] - before
    return oracle.bits(tensor), oracle.bits(left_to_right(inputs, "sum")), sent


def test_the_order_has_its_price_and_is_another_otherwise() -> None:
    """(N-1) S bytes instead of 2(N-1)/N S; and the test would see another order."""
    for result, expected, sent in run_ranks(4, sums_of_ring, "rank_order"):
        assert result == expected
        assert sent == 3 * 4000
    plain = run_ranks(4, sums_of_ring, None)
    assert plain[0][0] != plain[0][1]
    assert [sent for _, _, sent in plain] == [6000] * 4
