"""Ranks of a mesh that use different weights, or do not use some, train as one process does.

Saving before all weights have had gradients: "saved when thawed" of test_loops.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import quick
from full_states import full_weights
from ranks import run_ranks
from steps import apply_steps
from torch import Tensor, nn

from ringcomm.parallel import ParallelDims, parallelize

WORLD, ROWS, WIDTH, STEPS = 4, 8, 8, 3


class Experts(nn.Module):
    """Weights of one size, of which each row selects one by its sign; the last is never used."""

    def __init__(self, first: Any = None) -> None:
        super().__init__()
        # No ModuleList, whose entries would be units of stage 3, which all ranks must run.
        self.choices = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
        if first is not None:
            for name in "ac":
                self.choices[name].weight = first.choices[name].weight

    def forward(self, x: Tensor) -> Tensor:
        chosen = "ab"[int(x[0, 0] > 0)]  # all rows of a data-parallel rank have one sign
        out: Tensor = x[:, :1] + self.choices[chosen](x).tanh().clone()
        return torch.cat((x[:, :1], out[:, 1:]), dim=1)


class Sometimes(nn.Linear):
    """Used by half of the data-parallel ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] <= 0:
            return x.clone()
        return torch.cat((x[:, :1], super().forward(x)[:, 1:]), dim=1)


def make(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[Any] = [Experts() for _ in range(4)]
    if kind == "sometimes":  # a stage without gradients on one rank
        blocks[1] = Sometimes(WIDTH, WIDTH)
    if kind == "tied":  # over the first and the last stage
        blocks[3] = Experts(blocks[0])
    return nn.Sequential(*blocks)


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0] * (ROWS // 2) + [-1.0] * (ROWS // 2))
    return x, y


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def train_alone(kind: str) -> dict[str, Tensor]:
    model = make(kind)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        for x, y in zip(*(t.chunk(2) for t in rows(step)), strict=True):
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        apply_steps(optimizer)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_on_mesh(rank: int, sizes: Any, options: dict[str, Any], kind: str) -> dict[str, Tensor]:
    dims = ParallelDims(**sizes)
    train = parallelize(make(kind), dims, optimizer_of, loss_fn=nn.functional.mse_loss, **options)
    batch = dims["batch"]
    for step in range(STEPS):
        x, y = (t.chunk(batch.size())[batch.get_local_rank()] for t in rows(step))
        train.step(x, y)
        apply_steps(train.optimizer)
    return full_weights(train)


MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {"zero_stage": 0}),
    "dp, micro-batches": ({"dp": 2}, {"zero_stage": 0, "num_microbatches": 2}),
    "dp, pp": ({"dp": 2, "pp": 2}, {"zero_stage": 0}),
    "fsdp": ({"dp": 1, "fsdp": 2}, {}),
    "fsdp, pp": ({"dp": 1, "fsdp": 2, "pp": 2}, {}),
    "fsdp, zero-bubble": ({"dp": 1, "fsdp": 2, "pp": 2}, {"schedule": "zero-bubble"}),
    "zero 1, zbv": ({"pp": 2}, {"zero_stage": 1, "schedule": "zbv"}),
    "zero 2, zbv": ({"pp": 2}, {"zero_stage": 2, "schedule": "zbv"}),
    "zero 2, pp": ({"pp": 2}, {"zero_stage": 2}),
    "zero 2, interleaved": ({"pp": 2}, {"zero_stage": 2, "schedule": "interleaved"}),
}


CASES = itertools.product(MESHES, ["untied", "tied", "sometimes"])
# tests/python/training has others of each mesh, stage and schedule.
QUICK = (("dp, pp", "sometimes"), ("fsdp, pp", "untied"), ("zero 2, zbv", "tied"))


@pytest.mark.parametrize(("mesh", "kind"), quick(CASES, *QUICK))
def test_ranks_that_use_different_weights(mesh: str, kind: str) -> None:
    sizes, options = MESHES[mesh]
    world = sizes["dp"] * sizes.get("fsdp", 1) * sizes.get("pp", 1) if "dp" in sizes else WORLD
    expected = train_alone(kind)
    for found in run_ranks(world, train_on_mesh, sizes, options, kind):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
