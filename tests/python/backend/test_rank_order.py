"""deterministic="rank_order": every reduction is the left-to-right one, to the last bit."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import oracle
import torch
import torch.distributed as dist
from ranks import in_ranks

import ringcomm
from ringcomm import Options


@cache
def group_with(algorithm: str, deterministic: str | None = "rank_order") -> Any:
    options: Any = Options(
        algorithm=algorithm,  # type: ignore[arg-type]
        deterministic=deterministic,  # type: ignore[arg-type]
    )
    return dist.new_group(backend="ringcomm", pg_options=options)


# Each letter is the host of a rank.
ENVS: dict[str, Any] = {
    "shm": None,
    "messages": {"RINGCOMM_TRANSPORT": "messages"},
    "aba": [{"RINGCOMM_HOST_ID": host} for host in "aba"],
}


@in_ranks(3, ENVS)
def test_order(rank: int) -> None:
    """Rounded once. Sizes: nothing; fewer than ranks; many; several slots of the ring."""
    calls = [("auto", op) for op in oracle.NUMBER_OPS]
    calls += [(algorithm, "sum") for algorithm in ("one_shot", "two_shot", "ring")]
    for (algorithm, op), dtype in itertools.product(calls, (torch.float32, torch.bfloat16)):
        group, reduce_op = group_with(algorithm), oracle.OPS[op]
        for num_elems in (0, 1, 2, 129, 5003, *([300_007] if algorithm == "ring" else [])):
            inputs = [oracle.floats(r, num_elems, dtype) for r in range(3)]
            expected = oracle.left_to_right(inputs, op)
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, reduce_op, group=group)
            oracle.assert_equal(tensor, expected)
            if algorithm != "auto":
                continue
            tensor = inputs[rank].clone()
            dist.reduce(tensor, 0, reduce_op, group=group)
            oracle.assert_equal(tensor, expected if rank == 0 else inputs[rank])
            sizes = [num_elems // 4, num_elems // 4, num_elems - 2 * (num_elems // 4)]
            output = torch.empty(sizes[rank], dtype=dtype)
            dist.reduce_scatter(output, list(inputs[rank].split(sizes)), reduce_op, group=group)
            oracle.assert_equal(output, expected.split(sizes)[rank])


@in_ranks(4)
def test_a_ring_has_another_order(rank: int) -> None:
    """In rank order two_shot runs instead, with the same bytes; and the test would see another."""
    inputs = [oracle.floats(r, 1000, torch.float32) for r in range(4)]
    for deterministic, algorithm in (("rank_order", "two_shot"), (None, "ring")):
        group = group_with("ring", deterministic)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, group=group)
        is_ordered = oracle.bits(tensor) == oracle.bits(oracle.left_to_right(inputs, "sum"))
        assert is_ordered == (deterministic is not None)
        assert ringcomm.stats(group)["all_reduce", algorithm]["sent_bytes"] == 6000
