"""activations.partition() and auto(): the same bits in 1/N of what is saved, or a refusal."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from activation_models import NUM_BLOCKS, PLAN, SAVED_BYTES, assert_equal, backward, make, run
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from zero_models import sent_bytes

import ringcomm
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.parallel import activations


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
@in_ranks()
def test_bits(rank: int, device: str, options: Any, reentrant: bool, dtype: torch.dtype) -> None:
    """With dropout; twice, in shards that are uneven."""
    place = ranks.place(device, rank)
    blocks = make(rank, 0.2).to(place, dtype)
    expected = backward(run(blocks, reentrant), blocks)
    arena = None
    if options.get("arena"):
        arena = options["arena"] = activations.arena(1 << 14, device=place)
    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    for _ in range(2):
        with activations.partition(mesh=mesh, min_elems=0, **options) as held:
            out = run(blocks, reentrant)
        assert held.num_saved > 0
        assert_equal(backward(out, blocks), expected)
        del out
        gc.collect()
        assert held.saved_bytes == held.host_bytes == 0
    if arena is not None:
        assert (arena.num_blocks, arena.used_bytes) == (1, 0)


def check_bytes(rank: int, world_size: int, offload: Any) -> tuple[int, int, int]:
    blocks = make(rank)
    reduced, digests = sent_bytes()["all_reduce"], sent_bytes()["all_gather"]
    # Recomputed to the end, as the paper counts; torch stops a block before its last all_reduce.
    with (
        set_checkpoint_early_stop(False),
        activations.partition(min_elems=0, offload=offload) as held,
    ):
        out = run(blocks)
    kept = held.saved_bytes + held.host_bytes
    assert held.num_saved == NUM_BLOCKS
    assert held.host_bytes == (kept if offload else 0)
    gathered = sent_bytes()["all_gather"]
    assert gathered - digests == (world_size - 1) * 16  # a number and a digest
    out.sum().backward()
    return (
        kept,
        sent_bytes()["all_gather"] - gathered,
        sent_bytes()["all_reduce"] - reduced,
    )


@pytest.mark.parametrize(("world_size", "offload"), [(2, None), (3, "cpu"), (4, None)])
def test_bytes_kept_and_sent(world_size: int, offload: str | None) -> None:
    options = ringcomm.Options(algorithm="two_shot")
    by_rank = run_ranks(world_size, check_bytes, world_size, offload, pg_options=options)
    kept, gathered, reduced = (sum(numbers) for numbers in zip(*by_rank, strict=True))
    assert kept == PLAN
    assert gathered == (world_size - 1) * PLAN
    assert all(sent == (world_size - 1) * mine for mine, sent, _ in by_rank)
    assert 12 * gathered == reduced  # of tensor parallelism's, a twelfth


@in_ranks(2)
def test_what_differs_between_the_ranks_is_refused(rank: int) -> None:
    """Inside of layers in parts, and rows in another order."""
    torch.manual_seed(0)
    up, down = nn.Linear(8, 12), nn.Linear(12, 8)
    model = nn.Sequential(
        nn.Tanh(),
        ColumnParallelLinear.from_linear(up),
        nn.Tanh(),
        RowParallelLinear.from_linear(down),
    )
    x = torch.randn(6, 8)
    match = r"one of shape \(\d, \d+\) differs between rank 0 and rank 1"
    for context in (
        activations.partition(min_elems=0),
        activations.auto(limit_bytes=0, min_elems=0),
    ):
        with pytest.raises(ValueError, match=match), context:
            model(x)
    rows = x.roll(rank, 0).requires_grad_().mul(1)
    with pytest.raises(ValueError, match=match), activations.partition(min_elems=0):
        rows.sin()
    with pytest.raises(ValueError, match=match), activations.partition(min_elems=0):
        rows.sin().sum().backward()  # before anything is gathered
    assert all(param.grad is None for param in model.parameters())
    # The same model in a checkpoint is right.
    expected = backward(model(x), model)
    with activations.partition(min_elems=0):
        out = checkpoint(model, x.mul(1).requires_grad_(), use_reentrant=False)
    assert_equal(backward(out, model), expected)


@in_ranks(2)
def test_what_stays_whole_and_errors(rank: int) -> None:
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
    with pytest.raises(ValueError, match="offload must be None or"):
        activations.partition(offload="nvme")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_elems must be 0 or more"):
        activations.partition(min_elems=-1)
    with pytest.raises(ValueError, match="give a group or a mesh, not both"):
        activations.auto(dist.group.WORLD, mesh=init_device_mesh("cpu", (2,)), limit_bytes=1)
    for wrong, text in ((None, "no default for cpu; got None"), (-1 + rank, "got")):
        with pytest.raises(ValueError, match=text):  # a rank alone: the others are told
            activations.auto(limit_bytes=wrong)


def check_steps(rank: int, limits: list[int], choice: str) -> tuple[list[str], list[int]]:
    """Three steps; what was said, and sent in each by gathers of the backward pass."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringcomm").addHandler(handler)
    blocks = make(rank)
    expected = backward(run(blocks), blocks)
    arena = activations.arena(1 << 14, device="cpu")
    auto = activations.auto(limit_bytes=limits[rank], min_elems=0, arena=arena)
    assert (auto.limit_bytes, auto.choice) == (min(limits), None)
    with pytest.raises(KeyError), auto:
        raise KeyError  # measures nothing
    gathered = []
    for step in range(3):
        with auto as held:
            out = run(blocks)
        assert (auto.choice, auto.whole_bytes) == (choice, PLAN)
        kept = (held.saved_bytes > 0, held.host_bytes > 0)
        assert (arena.used_bytes > 0) == kept[0]
        if step == 0:  # whole while they have room; shards of the others in host memory
            assert kept == (False, min(limits) < PLAN)
        else:
            assert kept == (choice == "partition", choice == "partition+cpu")
        before = sent_bytes()["all_gather"]
        assert_equal(backward(out, blocks), expected)
        gathered.append(sent_bytes()["all_gather"] - before)
    assert (arena.num_blocks, arena.used_bytes) == (1, 0)
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
        assert message.startswith(f"checkpoints of {PLAN} bytes do not fit in {limit}: ")
        assert f"keeps 1/{world_size} of them on each rank, {shard} bytes" in message
        assert message.endswith(", in host memory") == (choice == "partition+cpu")


@in_ranks(2)
def test_auto_learns_nothing_of_a_pass_without_gradients(rank: int) -> None:
    saved = activations.auto(limit_bytes=1, min_elems=0)
    with saved, torch.no_grad():
        checkpoint(nn.Linear(8, 8), torch.ones(4, 8), use_reentrant=False)
    assert saved.choice is None


def save(x: Tensor, num: int, *, ends_early: bool) -> None:
    with activations.partition(min_elems=0):
        out = sum(((x + i).sin() for i in range(num)), x).sum()
        if ends_early:
            out.backward()


@pytest.mark.parametrize("check_in", ["end", "backward pass"])
@in_ranks(2)
def test_ranks_that_save_different_numbers_are_refused(rank: int, check_in: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1154; one of them saves nothing."""
    for rows in (1, 3):
        x = torch.ones(3, 8, requires_grad=True) * 2
        match = f"different numbers of them: {rows}, 0"
        ends_early = check_in == "backward pass" and rank == 0
        with pytest.raises(ValueError, match=match):
            save(x, rows if rank == 0 else 0, ends_early=ends_early)
    with activations.partition(min_elems=0), torch.no_grad():
        x.sin()  # nothing is saved: no rank waits for others
