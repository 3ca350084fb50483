"""deterministic="rank_order": every reduction is the left-to-right one, to the last bit."""

from __future__ import annotations

import itertools
from functools import cache, reduce
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks
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


@in_ranks((2, 3))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce(rank: int, algorithm: str) -> None:
    check_all_reduce(rank, algorithm, oracle.FLOATS, SIZES)
    check_all_reduce(rank, algorithm, [torch.bfloat16], [777_777])


# Each letter is the host of its rank.
@pytest.mark.parametrize("hosts", ["p2p", "abab"])
def test_all_reduce_over_messages(hosts: str) -> None:
    env: Any = {"RINGCOMM_TRANSPORT": "p2p"}
    if hosts != "p2p":
        env = [{"RINGCOMM_HOST_ID": host} for host in hosts]
    dtypes, sizes = [torch.float32, torch.bfloat16], [0, 2, 129, 5003]
    for algorithm in ALGORITHMS:
        run_ranks(len(hosts), check_all_reduce, algorithm, dtypes, sizes, env=env)


def check_all_reduce(
    rank: int, algorithm: str, dtypes: list[torch.dtype], sizes: list[int]
) -> None:
    group = ordered_group(algorithm)
    for dtype, op, num_elems in itertools.product(dtypes, STEPS, sizes):
        inputs = [oracle.floats(r, num_elems, dtype) for r in range(dist.get_world_size())]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=group)
        oracle.assert_equal(tensor, left_to_right(inputs, op))


@in_ranks((2, 4))
def test_other_reductions(rank: int) -> None:
    world_size = dist.get_world_size()
    group, dtype = ordered_group("auto"), torch.float32 if world_size == 2 else torch.bfloat16
    for op, num_elems in itertools.product(STEPS, (1, 130, 300_001)):
        reduce_op = getattr(dist.ReduceOp, op.upper())
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
        dist.reduce_scatter(output, list(inputs[rank].split(sizes)), reduce_op, group=group)
        oracle.assert_equal(output, expected.split(sizes)[rank])


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
