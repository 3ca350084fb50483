"""activations.partition() and auto(): the same bits in 1/N of what is saved, or a refusal."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ringcomm
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.parallel import activations
from ringcomm.parallel.tensor import copy_to_tp, reduce_from_tp

ROWS, TOKENS, WIDTH, NUM_BLOCKS = 2, 7, 24, 4
SAVED_BYTES = 4 * ROWS * TOKENS * WIDTH
PLAN = NUM_BLOCKS * SAVED_BYTES


class Half(nn.Module):
    """A column-parallel layer and a row-parallel one; each rank has weights of its own."""

    def __init__(self, rank: int, seed: int, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1000 * seed + rank)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(copy_to_tp(self.norm(x))))
        out: Tensor = self.dropout(x + reduce_from_tp(self.down(hidden)))
        return out


def make(rank: int, dropout: float = 0.0) -> nn.ModuleList:
    """Blocks of two halves, as attention and MLP are: six all_reduces in a step."""
    return nn.ModuleList(
        nn.Sequential(Half(rank, 2 * number, dropout), Half(rank, 2 * number + 1, dropout))
        for number in range(NUM_BLOCKS)
    )


def run(blocks: nn.ModuleList, reentrant: bool | None = False) -> Tensor:
    torch.manual_seed(0)
    param = next(blocks.parameters())
    x = torch.randn(ROWS, TOKENS, WIDTH).to(param.device, param.dtype).requires_grad_().mul(1)
    for block in blocks:
        x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    return x


def gradients(blocks: nn.Module) -> list[Tensor]:
    found = [param.grad.clone() for param in blocks.parameters() if param.grad is not None]
    blocks.zero_grad()
    return found


def expect(blocks: nn.ModuleList, reentrant: bool = False) -> list[Tensor]:
    run(blocks, reentrant).float().square().sum().backward()
    return gradients(blocks)


def sent_bytes(name: str) -> int:
    return sum(entry["sent_bytes"] for key, entry in ringcomm.stats().items() if key[0] == name)


# ---- partition()


def check_bits(
    rank: int, device: str, options: dict[str, Any], reentrant: bool, dtype: torch.dtype
) -> None:
    place = ranks.place(device, rank)
    blocks = make(rank, 0.2).to(place, dtype)
    expected = expect(blocks, reentrant)
    arena = None
    if options.get("arena"):
        arena = options["arena"] = activations.arena(1 << 14, device=place)
    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    for _ in range(2):
        with activations.partition(mesh=mesh, min_elems=0, **options) as held:
            out = run(blocks, reentrant)
        assert held.num_saved > 0
        out.float().square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
        del out
        gc.collect()
        assert held.saved_bytes == held.host_bytes == 0
    if arena is not None:
        assert (arena.num_blocks, arena.used_bytes) == (1, 0)


@pytest.mark.parametrize(
    ("world_size", "options", "reentrant", "dtype"),
    [
        (2, {}, False, torch.float32),
        (3, {"offload": "cpu"}, False, torch.bfloat16),
        (4, {"offload": "cpu", "check": False}, True, torch.float32),
        (4, {"arena": True}, False, torch.bfloat16),
        (3, {"arena": True, "check": False}, True, torch.float32),
        (2, {}, True, torch.bfloat16),
    ],
    ids=str,
)
def test_bits(
    device: str, world_size: int, options: dict[str, Any], reentrant: bool, dtype: torch.dtype
) -> None:
    """With dropout; twice, in shards that are uneven."""
    run_ranks(world_size, check_bits, device, options, reentrant, dtype)


def check_bytes(rank: int, world_size: int, offload: Any) -> tuple[int, int, int, int]:
    blocks = make(rank)
    reduced, digests = sent_bytes("all_reduce"), sent_bytes("all_gather")
    # Recomputed to the end, as the paper counts; torch stops a block before its last all_reduce.
    with (
        set_checkpoint_early_stop(False),
        activations.partition(min_elems=0, offload=offload) as held,
    ):
        out = run(blocks)
    kept = held.saved_bytes + held.host_bytes
    assert held.num_saved == NUM_BLOCKS
    assert held.host_bytes == (kept if offload else 0)
    gathered = sent_bytes("all_gather")
    out.sum().backward()
    return (
        kept,
        sent_bytes("all_gather") - gathered,
        gathered - digests,
        sent_bytes("all_reduce") - reduced,
    )


@pytest.mark.parametrize(("world_size", "offload"), [(2, None), (3, "cpu"), (4, None)])
def test_bytes_kept_and_sent(world_size: int, offload: str | None) -> None:
    options = ringcomm.Options(algorithm="two_shot")
    by_rank = run_ranks(world_size, check_bytes, world_size, offload, pg_options=options)
    kept, gathered, digests, reduced = (sum(numbers) for numbers in zip(*by_rank, strict=True))
    assert kept == PLAN
    assert gathered == (world_size - 1) * PLAN
    assert all(sent == (world_size - 1) * mine for mine, sent, _, _ in by_rank)
    assert digests == world_size * (world_size - 1) * 8 * NUM_BLOCKS
    assert 12 * gathered == reduced  # of tensor parallelism's, a twelfth


def refuse(rank: int) -> None:
    """What differs between the ranks: inside of layers in parts, and rows in another order."""
    torch.manual_seed(0)
    up, down = nn.Linear(8, 12), nn.Linear(12, 8)
    model = nn.Sequential(
        nn.Tanh(),
        ColumnParallelLinear.from_linear(up),
        nn.Tanh(),
        RowParallelLinear.from_linear(down),
    )
    x = torch.randn(6, 8)
    match = r"a tensor of shape \(\d, \d+\) is saved that rank 1 has otherwise than rank 0"
    with pytest.raises(ValueError, match=match), activations.partition(min_elems=0):
        model(x)
    auto = activations.auto(limit_bytes=0, min_elems=0)
    with pytest.raises(ValueError, match=match), auto:
        model(x)
    rows = x.roll(rank, 0).requires_grad_().mul(1)
    with pytest.raises(ValueError, match=match), activations.partition(min_elems=0):
        rows.sin()
    assert all(param.grad is None for param in model.parameters())
    # The same model in a checkpoint is right.
    model(x).square().sum().backward()
    expected = gradients(model)
    with activations.partition(min_elems=0):
        out = checkpoint(model, x.mul(1).requires_grad_(), use_reentrant=False)
    out.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


def test_what_differs_between_the_ranks_is_refused() -> None:
    run_ranks(2, refuse)


def check_what_is_left(rank: int) -> None:
    """Parameters, their views, small tensors, and what is saved twice."""
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.arange(40.0).view(5, 8)
    with activations.partition(min_elems=0) as held:
        (x @ weight.t()).sum().backward()  # saves x and a view of the weight
    assert held.num_saved == 1
    with activations.partition(min_elems=0) as held:
        y = (x * x).requires_grad_()
        out = (y * y).sum() + y.sin().sum() + y.view(-1).cos().sum()
    assert held.num_saved == 2  # y, and y in another shape
    assert held.saved_bytes == y.nbytes
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(y.grad, 2 * (2 * y + y.cos() - y.sin()))
    with activations.partition(min_elems=41) as held:
        (x.requires_grad_() * x.detach()).sin().sum().backward()
    assert held.num_saved == 0
    # A graph that is dropped gathers nothing, and the innermost context counts.
    blocks = make(rank)
    with activations.partition(min_elems=0) as outer, activations.partition(min_elems=0) as held:
        out = run(blocks)
    assert outer.num_saved == 0 < held.num_saved
    calls = sum(entry["num_calls"] for entry in ringcomm.stats().values())
    del out
    gc.collect()
    assert held.saved_bytes == 0
    assert calls == sum(entry["num_calls"] for entry in ringcomm.stats().values())
    with pytest.raises(ValueError, match="offload is None or"):
        activations.partition(offload="nvme")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_elems is 0 or more"):
        activations.partition(min_elems=-1)
    with pytest.raises(ValueError, match="give a group or a mesh, not both"):
        activations.auto(dist.group.WORLD, mesh=init_device_mesh("cpu", (2,)), limit_bytes=1)


def test_what_stays_whole_and_errors() -> None:
    run_ranks(2, check_what_is_left)


# ---- auto()


def check_steps(rank: int, limits: list[int], choice: str) -> tuple[list[str], list[int]]:
    """Three steps; what was said, and sent in each by gathers of the backward pass."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringcomm").addHandler(handler)
    blocks = make(rank)
    expected = expect(blocks)
    auto = activations.auto(limit_bytes=limits[rank], min_elems=0)
    assert (auto.limit_bytes, auto.choice) == (min(limits), None)
    with pytest.raises(KeyError), auto:
        raise KeyError  # measures nothing
    gathered = []
    for step in range(3):
        with auto as held:
            out = run(blocks)
        assert (auto.choice, auto.whole_bytes) == (choice, PLAN)
        kept = (held.saved_bytes > 0, held.host_bytes > 0)
        if step == 0:  # whole while they have room; shards of the others in host memory
            assert kept == (False, min(limits) < PLAN)
        else:
            assert kept == (choice == "partition", choice == "partition+cpu")
        before = sent_bytes("all_gather")
        out.square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(blocks), expected, strict=True))
        gathered.append(sent_bytes("all_gather") - before)
    logging.getLogger("ringcomm").removeHandler(handler)
    return messages, gathered


@pytest.mark.parametrize(
    ("limits", "choice"),
    [
        ([PLAN, PLAN], "whole"),  # as much as there is room for
        ([2 * PLAN, PLAN - 1, PLAN], "partition"),
        ([PLAN // 2, PLAN // 2], "partition"),
        ([100], "partition+cpu"),
        ([100, PLAN, PLAN], "partition+cpu"),
    ],
)
def test_auto(limits: list[int], choice: str) -> None:
    """The lowest limit counts, and all ranks do the same; the first step is measured."""
    world_size, limit = len(limits), min(limits)
    by_rank = run_ranks(world_size, check_steps, limits, choice)
    num_host = NUM_BLOCKS - limit * NUM_BLOCKS // PLAN
    per_step = [num_host * SAVED_BYTES, *[0 if choice == "whole" else PLAN] * 2]
    sent = [sum(gathered[step] for _, gathered in by_rank) for step in range(3)]
    assert sent == [(world_size - 1) * num_bytes for num_bytes in per_step]
    (said, *others) = [messages for messages, _ in by_rank]
    assert not any(others)
    assert len(said) == (choice != "whole")
    for message in said:  # once, with the numbers
        shard = -(-PLAN // world_size)
        assert message.startswith(f"checkpoints of {PLAN} bytes have no room in {limit}: ")
        assert f"keeps 1/{world_size} of them on each rank, {shard} bytes" in message
        assert message.endswith(", in host memory") == (choice == "partition+cpu")


def check_together(rank: int, limit: int) -> None:
    """Autocast, an arena for shards, two micro-batches a step and a scaled loss."""
    blocks = make(rank)
    arena = activations.arena(1 << 14)
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
    for wrong, match in ((None, "no default for cpu; got None"), (-1 + rank, "got")):
        with pytest.raises(ValueError, match=match):  # a rank alone: the others are told
            activations.auto(limit_bytes=wrong)


@pytest.mark.parametrize("limit", [10, PLAN - 1])
def test_auto_together_with_others(limit: int) -> None:
    run_ranks(2, check_together, limit)
