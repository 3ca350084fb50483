"""zero.shard(): the steps of one process, whatever each rank holds of the optimizer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from zero_models import (
    BUCKET_BYTES,
    STEPS,
    Net,
    batch,
    loss_of,
    make_optimizer,
    train_alone,
    weights,
)

from ringcomm.parallel import zero

# How much sums of three or four ranks' gradients may differ from one sum; AdamW amplifies it.
ATOL = {"sgd": 1e-6, "momentum": 1e-6, "adamw": 2e-5}


def train(
    rank: int,
    world_size: int,
    stage: int,
    kind: str,
    options: dict[str, Any],
    model_options: dict[str, Any],
    num_micro_batches: int,
) -> dict[str, Tensor]:
    model = Net(**model_options)
    if rank != 0:
        torch.nn.init.zeros_(model.last.weight)  # rank 0's count
    optimizer = zero.shard(
        model, make_optimizer(model, kind), stage, **{"bucket_bytes": BUCKET_BYTES, **options}
    )
    for step in range(STEPS):
        for part in range(num_micro_batches):
            rows = batch(num_micro_batches * step + part, rank, world_size)
            optimizer.scale(loss_of(model, *rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "plain": ({}, {}, 1),
    "clipped": ({"clip_grad_norm": 0.1}, {}, 1),
    "scaled": ({"loss_scale": 1024.0}, {}, 1),
    "one_bucket": ({"bucket_bytes": 1 << 20}, {}, 1),
    "tied": ({}, {"is_tied": True}, 1),
    "frozen": ({}, {"is_frozen": True}, 1),
    "accumulated": ({}, {}, 2),
}


WORLDS = [(1, "ringcomm"), (2, "ringcomm"), (3, "ringcomm"), (4, "ringcomm"), (2, "gloo")]
KINDS = ["momentum", "adamw"]


def every_pair() -> list[tuple[int, str, int, str, str]]:
    """Any two of world, stage, optimizer and case are together somewhere."""
    found = []
    for i, case in enumerate(CASES):
        for j, (world_size, backend) in enumerate(WORLDS):
            kind = KINDS[(i + j + j // 3) % 2]
            found.append((world_size, backend, 1 + (i + j) % 3, kind, case))
    return found


def test_every_pair_is_there() -> None:
    rows = [((w, b), s, k, c) for w, b, s, k, c in every_pair()]
    values = [WORLDS, [1, 2, 3], KINDS, list(CASES)]
    for i, j in itertools.combinations(range(4), 2):
        found = {(row[i], row[j]) for row in rows}
        assert found == set(itertools.product(values[i], values[j]))  # type: ignore[call-overload]


@pytest.mark.parametrize(("world_size", "backend", "stage", "kind", "case"), every_pair())
def test_steps_are_those_of_one_process(
    world_size: int, backend: str, stage: int, kind: str, case: str
) -> None:
    options, model_options, num_micro_batches = CASES[case]
    results = run_ranks(
        world_size,
        train,
        *(world_size, stage, kind, options, model_options, num_micro_batches),
        backend=backend,
    )
    clip = options.get("clip_grad_norm")
    expected = train_alone(kind, clip, num_micro_batches, **model_options)
    for found in results:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=ATOL[kind])
            assert torch.equal(found[name], results[0][name])
