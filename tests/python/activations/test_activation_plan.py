"""activations.auto(): partitioned where checkpoints have no room, alike on all ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.parallel import activations

ROWS, WIDTH, NUM_BLOCKS = 5, 12, 4
PLAN = NUM_BLOCKS * ROWS * WIDTH * 4


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def make() -> nn.ModuleList:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS))
    return nn.ModuleList(blocks)


def run(blocks: nn.ModuleList) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True).mul(1)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def gradients(blocks: nn.ModuleList) -> list[Tensor]:
    found = [param.grad.clone() for param in blocks.parameters() if param.grad is not None]
    blocks.zero_grad()
    return found


def sent(name: str) -> int:
    return sum(entry["sent_bytes"] for key, entry in ringcomm.stats().items() if key[0] == name)


def shard_bytes() -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    begin, end = ringcomm.ops.shard_range(ROWS * WIDTH, size, rank)
    return 4 * NUM_BLOCKS * (end - begin)


def check_steps(
    rank: int, limits: list[int], plan: int | None, choice: str, first: tuple[int, int] | None
) -> tuple[list[str], list[int]]:
    """Three steps; what was said, and sent in each by gathers."""
    records = Records()
    log = logging.getLogger("ringcomm")
    log.addHandler(records)
    blocks = make()
    run(blocks).square().sum().backward()
    expected = gradients(blocks)
    auto = activations.auto(limit_bytes=limits[rank], saved_bytes=plan, min_elems=0)
    assert auto.limit_bytes == min(limits)
    assert auto.choice == (None if plan is None else choice)
    gathered = []
    for step in range(3):
        before = sent("all_gather")
        with auto as held:
            out = run(blocks)
        assert (auto.choice, auto.saved_bytes) == (choice, PLAN)
        if step == 0 and first is not None:
            # Whole while they have room; shards of the others in host memory.
            assert held.num_saved == first[0]
            assert held.host_bytes * NUM_BLOCKS == shard_bytes() * first[0]
            assert held.saved_bytes == 0
        elif choice == "whole":
            assert held.num_saved == held.saved_bytes == held.host_bytes == 0
        elif choice == "partition":
            assert (held.saved_bytes, held.host_bytes) == (shard_bytes(), 0)
        else:
            assert (held.saved_bytes, held.host_bytes) == (0, shard_bytes())
        out.square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
        gathered.append(sent("all_gather") - before)
    log.removeHandler(records)
    return records.messages, gathered


CASES = [
    (PLAN, "whole"),  # as much as there is room for
    (PLAN - 1, "partition"),
    (-(-PLAN // 2), "partition"),
    (100, "partition+cpu"),
]


@pytest.mark.parametrize(("limit", "choice"), CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_given_plan(world_size: int, limit: int, choice: str) -> None:
    by_rank = run_ranks(world_size, check_steps, [limit] * world_size, PLAN, choice, None)
    said = by_rank[0][0]
    assert all(messages == [] for messages, _ in by_rank[1:])
    per_step = 0 if choice == "whole" else (world_size - 1) * PLAN
    for step in range(3):
        assert sum(gathered[step] for _, gathered in by_rank) == per_step
    if choice == "whole":
        assert said == []
        return
    (message,) = said  # once, with the numbers
    shard = -(-PLAN // world_size)
    assert message.startswith(f"checkpoints of {PLAN} bytes have no room in {limit}: ")
    assert f"keeps 1/{world_size} of them on each rank, {shard} bytes" in message
    assert message.endswith(", in host memory") == (choice == "partition+cpu")


@pytest.mark.parametrize(("limit", "choice"), CASES)
def test_a_measured_plan(limit: int, choice: str) -> None:
    # Those of the first forward pass that have no room.
    num_host = NUM_BLOCKS - limit * NUM_BLOCKS // PLAN
    by_rank = run_ranks(2, check_steps, [limit] * 2, None, choice, (num_host, 0))
    assert [len(messages) for messages, _ in by_rank] == [int(choice != "whole"), 0]
    whole = PLAN // NUM_BLOCKS
    later = 0 if choice == "whole" else PLAN
    for step, expected in enumerate((num_host * whole, later, later)):
        assert sum(gathered[step] for _, gathered in by_rank) == expected


@pytest.mark.parametrize("plan", [PLAN, None])
def test_ranks_with_different_limits_decide_alike(plan: int | None) -> None:
    limits = [10 * PLAN, PLAN // 2, PLAN]
    by_rank = run_ranks(3, check_steps, limits, plan, "partition", (2, 0) if plan is None else None)
    assert [len(messages) for messages, _ in by_rank] == [1, 0, 0]


def check_plans(rank: int) -> str | None:
    auto = activations.auto(limit_bytes=1000, saved_bytes=[500, 1500][rank], min_elems=0)
    assert auto.saved_bytes == 1500
    auto = activations.auto(limit_bytes=1000, saved_bytes=[None, 1500][rank], min_elems=0)
    return auto.choice


def test_the_highest_plan_counts() -> None:
    assert run_ranks(2, check_plans) == ["partition"] * 2


def check_measured_differently(rank: int) -> str | None:
    auto = activations.auto(limit_bytes=1000, min_elems=0)
    x = torch.ones(200 + 100 * rank, requires_grad=True).mul(1)
    with auto:
        x.sin()  # no backward pass: it is not replicated
    assert auto.saved_bytes == 1200
    return auto.choice


def test_the_highest_measured_plan_counts() -> None:
    assert run_ranks(2, check_measured_differently) == ["partition"] * 2


def check_one_rank(rank: int) -> None:
    blocks = make()
    run(blocks).sum().backward()
    expected = gradients(blocks)
    auto = activations.auto(limit_bytes=PLAN // 2, saved_bytes=PLAN, min_elems=0)
    with auto as held:
        out = run(blocks)
    assert (auto.choice, held.host_bytes) == ("partition+cpu", PLAN)
    out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))


def test_one_rank_has_host_memory() -> None:
    run_ranks(1, check_one_rank)


def check_together(rank: int, limit: int) -> None:
    """Autocast, an arena for shards, two micro-batches a step and a sharp look at their sum."""
    blocks = make()
    arena = activations.arena(1 << 12)
    auto = activations.auto(limit_bytes=limit, min_elems=0, arena=arena)

    def accumulate(context: Any) -> list[Tensor]:
        for _ in range(2):
            with context, torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(blocks).float().square().mean() * 2.0**10
            loss.backward()
        return gradients(blocks)

    expected = accumulate(torch.enable_grad())
    for _ in range(2):
        found = accumulate(auto)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert auto.choice == ("partition" if limit > 100 else "partition+cpu")
    assert (arena.num_blocks, arena.used_bytes) == (1, 0)


@pytest.mark.parametrize("limit", [10, 600])
def test_together_with_others(limit: int) -> None:
    run_ranks(2, check_together, limit)


def check_errors(rank: int) -> None:
    blocks = make()
    with pytest.raises(ValueError, match="limit_bytes has no default for cpu"):
        activations.auto()
    with pytest.raises(ValueError, match="min_elems is 0 or more"):
        activations.auto(limit_bytes=1, min_elems=-1)
    # A rank alone: the others are told.
    own, others = "saved_bytes is 0 or more, got -1", "another rank has no valid limit_bytes"
    with pytest.raises(ValueError, match=others if rank else own):
        activations.auto(limit_bytes=1, saved_bytes=rank - 1)
    auto = activations.auto(limit_bytes=PLAN, min_elems=0)
    with pytest.raises(KeyError), auto:  # measures nothing
        raise KeyError
    assert auto.choice is None
    with auto:
        run(blocks)
    assert auto.choice == "whole"


def test_errors() -> None:
    run_ranks(2, check_errors)
