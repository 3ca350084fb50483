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

BUCKET_CAP_MIB = 0.04
ONE_SHOT_MAX_BYTES = {2: 256 << 10, 3: 48 << 10, 4: 48 << 10}


def make_model() -> nn.Module:
    """Buckets that no number of ranks divides, on both sides of where one_shot ends."""
    torch.manual_seed(0)
    layers = [nn.Linear(31, 701), nn.Tanh(), nn.Linear(701, 301), nn.Tanh(), nn.Linear(301, 40)]
    return nn.Sequential(*layers)


def chunk(num_elems: int, world_size: int, rank: int) -> int:
    begin, end = shard_range(num_elems, world_size, rank % world_size)
    return end - begin


def ring_elems(num_elems: int, world_size: int, rank: int) -> int:
    """Both halves: all chunks but one go on, this rank's own, then its neighbour's, stay."""
    stay = chunk(num_elems, world_size, rank) + chunk(num_elems, world_size, rank + 1)
    return 2 * num_elems - stay


def one_shot_elems(num_elems: int, world_size: int, rank: int) -> int:
    return (world_size - 1) * num_elems


def two_shot_elems(num_elems: int, world_size: int, rank: int) -> int:
    """What the others own goes to them, the own result to all of them; of a piece of 1 MiB."""
    return num_elems + (world_size - 2) * chunk(num_elems, world_size, rank)


FORMULAS = {"ring": ring_elems, "one_shot": one_shot_elems, "two_shot": two_shot_elems}


def count_bytes(rank: int, world_size: int) -> tuple[dict[str, int], list[int]]:
    """Sent in one step of all_reduce, by algorithm, and the elements of the buckets."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_CAP_MIB)
    torch.manual_seed(rank)

    def step() -> None:
        model(torch.randn(4, 31)).square().mean().backward()

    step()
    step()  # in the buckets that the first one's order has made
    before = ringcomm.stats()
    step()
    sent = {
        algorithm: entry["sent_bytes"]
        - before.get((name, algorithm), {"sent_bytes": 0})["sent_bytes"]
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
            chosen = "one_shot" if 4 * size <= ONE_SHOT_MAX_BYTES[world_size] else "two_shot"
            name = "ring" if algorithm == "ring" else chosen
            formula = FORMULAS[name]
            expected[name] = expected.get(name, 0) + 4 * formula(size, world_size, rank)
        assert {name: num for name, num in sent.items() if num} == expected
        assert len(expected) == (1 if algorithm == "ring" else 2)
    if algorithm == "ring":  # over the ranks exactly 2 (N - 1) / N of the gradients each
        num_params = sum(param.numel() for param in make_model().parameters())
        total = sum(sent["ring"] for sent, _ in results)
        assert total == 2 * (world_size - 1) * 4 * num_params
