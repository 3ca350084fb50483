"""What DistributedDataParallel puts on the wire: the formulas of the algorithms, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from ringcomm.ops import shard_range

ONE_SHOT_MAX_BYTES = {2: 256 << 10, 3: 48 << 10}


def chunk(num_elems: int, world_size: int, rank: int) -> int:
    begin, end = shard_range(num_elems, world_size, rank % world_size)
    return end - begin


def expected_elems(algorithm: str, num_elems: int, world_size: int, rank: int) -> tuple[str, int]:
    """The algorithm that a bucket takes, and what this rank sends of it."""
    own = chunk(num_elems, world_size, rank)
    if algorithm == "ring":  # all chunks but this rank's own, then all but its neighbour's
        return algorithm, 2 * num_elems - own - chunk(num_elems, world_size, rank + 1)
    if 4 * num_elems <= ONE_SHOT_MAX_BYTES[world_size]:
        return "one_shot", (world_size - 1) * num_elems
    # What the others own goes to them, the own result to all of them.
    return "two_shot", num_elems + (world_size - 2) * own


def count_bytes(rank: int, world_size: int) -> tuple[dict[str, int], list[int]]:
    """Sent in one step of all_reduce, by algorithm, and the elements of the buckets.

    No number of ranks divides these, on both sides of where one_shot ends.
    """
    layers = [nn.Linear(31, 701), nn.Tanh(), nn.Linear(701, 301), nn.Tanh(), nn.Linear(301, 40)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.04)
    for _ in range(3):  # the second in the buckets that the first one's order has made
        before = ringcomm.stats()
        model(torch.randn(4, 31)).square().mean().backward()
    sent = {
        algorithm: entry["sent_bytes"] - before.get((name, algorithm), {}).get("sent_bytes", 0)
        for (name, algorithm), entry in ringcomm.stats().items()
        if name == "all_reduce"
    }
    logged = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return sent, [int(size) // 4 for size in logged.split(",")]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_sent_bytes(world_size: int, algorithm: Any) -> None:
    """The ring sends two shares of every bucket; auto what the ones that it chooses do."""
    options = ringcomm.Options(algorithm=algorithm)
    results = run_ranks(world_size, count_bytes, world_size, pg_options=options)
    for rank, (sent, buckets) in enumerate(results):
        assert len(buckets) == 3
        expected: dict[str, int] = {}
        for size in buckets:
            name, num_elems = expected_elems(algorithm, size, world_size, rank)
            expected[name] = expected.get(name, 0) + 4 * num_elems
        assert {name: num for name, num in sent.items() if num} == expected
        assert len(expected) == (1 if algorithm == "ring" else 2)
    if algorithm == "ring":  # over the ranks exactly 2 (N - 1) / N of the gradients each
        total = sum(sent["ring"] for sent, _ in results)
        assert total == 2 * (world_size - 1) * 4 * sum(results[0][1])
