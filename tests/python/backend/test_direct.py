"""Collectives on shared tensors: against numpy and against staged ones, and how they fail."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shared_tensors import num_direct, num_peer_regions, placed, reduce_op, shared_copy
from torch import Tensor

import ringcomm

WORLDS = [2, 3, 4]
ALL = 0b1111


def check_all_reduce(rank: int, dtype: torch.dtype, op: str, num_elems: int) -> None:
    world_size = dist.get_world_size()
    inputs = [oracle.integers(r, num_elems, dtype) for r in range(world_size)]
    before = num_direct()
    tensor = shared_copy(inputs[rank])
    dist.all_reduce(tensor, reduce_op(op))
    oracle.assert_equal(tensor, oracle.reduced(inputs, op))
    is_large = num_elems * tensor.element_size() >= (8 if world_size == 2 else 64) << 10
    assert num_direct() - before == is_large


TYPES = [*oracle.FLOATS, *oracle.INTS]


@pytest.mark.parametrize("dtype", TYPES)
def test_all_reduce(dtype: torch.dtype) -> None:
    """Each type with each operation and each number of ranks."""
    for turn, op in enumerate(("sum", "avg", "max"), TYPES.index(dtype)):
        for num_elems in (0, 1, 100, 20_000, 300_001):
            run_ranks(WORLDS[turn % 3], check_all_reduce, dtype, op, num_elems)


def check_bits(rank: int, dtype: torch.dtype) -> None:
    """The same bits as staged, where the order of summation shows."""
    values = oracle.floats(rank, 100_003, dtype)
    for op in ("sum", "avg"):
        staged, direct = values.clone(), shared_copy(values)
        before = num_direct()
        dist.all_reduce(staged, reduce_op(op))
        dist.all_reduce(direct, reduce_op(op))
        assert num_direct() == before + 1
        oracle.assert_equal(direct, staged)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(2, torch.float32), (3, torch.bfloat16), (4, torch.float16), (3, torch.float64)],
)
def test_same_bits_as_staged(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_bits, dtype)


def check_bytes(rank: int, num_elems: int) -> None:
    before = ringcomm.stats().get(("all_reduce", "direct"), {"sent_bytes": 0})["sent_bytes"]
    dist.all_reduce(ringcomm.empty_shared(num_elems).fill_(1))
    sent = ringcomm.stats()["all_reduce", "direct"]["sent_bytes"] - before
    world_size = dist.get_world_size()
    assert sent == 2 * (world_size - 1) * num_elems * 4 // world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_are_those_of_two_shot(world_size: int) -> None:
    run_ranks(world_size, check_bytes, 120_000)


def check_views(rank: int) -> None:
    """Parts of a shared tensor, at any offset; what is not contiguous is staged, and right."""
    world_size = dist.get_world_size()
    inputs = [oracle.integers(r, 40_000, torch.float32).view(200, 200) for r in range(world_size)]
    expected = oracle.reduced(inputs, "sum")
    for make in (
        lambda base: base.view(-1)[7:40_007].view(200, 200),
        lambda base: base.view(-1)[-40_000:].view(200, 200),
        lambda base: base.view(-1)[: 2 * 40_000 : 2].view(200, 200),
        lambda base: base.view(-1)[:40_000].view(200, 200).t(),
    ):
        base = ringcomm.empty_shared(100, 1000).fill_(-9)
        view = make(base)
        view.copy_(inputs[rank])
        before = num_direct()
        dist.all_reduce(view)
        oracle.assert_equal(view.contiguous(), expected)
        assert (base == -9).sum() == base.numel() - view.numel()
        assert num_direct() - before == view.is_contiguous()
        dist.all_reduce(view, async_op=True).wait()
        oracle.assert_equal(view.contiguous(), expected * world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_views(world_size: int) -> None:
    run_ranks(world_size, check_views)


def check_others(rank: int, num_elems: int, sharing: int) -> None:
    """Whoever shares: the results are the same."""
    world_size = dist.get_world_size()
    inputs = [oracle.integers(r, world_size * num_elems, torch.int32) for r in range(world_size)]
    mine = inputs[rank]
    total = oracle.reduced(inputs, "sum")

    tensor = placed(mine, rank, sharing)
    dist.all_reduce(tensor)
    oracle.assert_equal(tensor, total)

    source = placed(mine, rank, sharing)
    for output in (torch.empty(num_elems, dtype=torch.int32), source.chunk(world_size)[rank]):
        dist.reduce_scatter_tensor(output, source)
        oracle.assert_equal(output, total.chunk(world_size)[rank])

    share = placed(mine[:num_elems], rank, sharing)
    outputs = torch.empty(world_size * num_elems, dtype=torch.int32)
    dist.all_gather_into_tensor(outputs, share)
    gathered = torch.cat([values[:num_elems] for values in inputs])
    oracle.assert_equal(outputs, gathered)
    whole = placed(torch.zeros_like(outputs), rank, sharing)
    whole.chunk(world_size)[rank].copy_(share)
    dist.all_gather_into_tensor(whole, whole.chunk(world_size)[rank])
    oracle.assert_equal(whole, gathered)

    for root in range(world_size):
        tensor = placed(mine, rank, sharing)
        dist.broadcast(tensor, root)
        oracle.assert_equal(tensor, inputs[root])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("num_elems", [0, 33, 20_001])
def test_any_ranks_may_share(world_size: int, num_elems: int) -> None:
    for sharing in range(1 << world_size):
        run_ranks(world_size, check_others, num_elems, sharing)


def check_reads_in_place(rank: int, op: str) -> None:
    """No rank maps a peer's memory but to read the buffers of this collective."""
    large = ringcomm.empty_shared(120_000).fill_(1)
    output = torch.empty(240_000)
    dist.reduce(large, 0)
    assert num_peer_regions() == 0
    if op == "reduce_scatter":
        dist.reduce_scatter_tensor(output[:60_000], large)
    elif op == "all_gather":
        dist.all_gather_into_tensor(output, large)
    else:
        dist.broadcast(large, 0)
    assert num_peer_regions() == (op != "broadcast" or rank != 0)


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "broadcast"])
def test_buffers_are_read_where_they_lie(op: str) -> None:
    run_ranks(2, check_reads_in_place, op, fresh=True)


def check_large(rank: int) -> None:
    """Results beyond the caches; several pieces of the staged form after a mixed first phase."""
    values = torch.full((6_000_000,), float(rank + 1))
    for sharing in (ALL, 0b01):
        tensor = placed(values, rank, sharing)
        dist.all_reduce(tensor)
        assert (tensor == 3).all()
        outputs = torch.empty(12_000_000)
        dist.all_gather_into_tensor(outputs, placed(values, rank, sharing))
        assert (outputs == torch.tensor([1.0, 2.0]).repeat_interleave(6_000_000)).all()


def test_large() -> None:
    run_ranks(2, check_large)


# ---- failures


def check_mismatch(rank: int, sharing: int) -> None:
    tensor = placed(torch.ones(50_000 + rank), rank, sharing)
    with pytest.raises(ringcomm.MismatchError, match="all_reduce #0"):
        dist.all_reduce(tensor)
    assert (tensor == 1).all()


@pytest.mark.parametrize("sharing", [0b00, 0b01, 0b10, 0b11])
def test_mismatch(sharing: int) -> None:
    run_ranks(2, check_mismatch, sharing, fresh=True)


def all_reduce_often(tensor: Tensor) -> None:
    for _ in range(1000):
        dist.all_reduce(tensor)


def check_death(rank: int, folder: str) -> None:
    tensor = ringcomm.empty_shared(50_000).fill_(1)
    dist.all_reduce(tensor)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ringcomm.PeerDiedError) as caught:
        all_reduce_often(tensor)
    assert caught.value.rank == 2
    address = tensor.data_ptr()
    del tensor, caught
    gc.collect()
    assert ringcomm.empty_shared(50_000).data_ptr() != address  # a late peer may write there


def test_a_peer_dies(tmp_path: Path) -> None:
    run_ranks(3, check_death, str(tmp_path), fresh=True, may_die=[2])


def check_death_before_mapping(rank: int, folder: str) -> None:
    """The peer has died when its memory is first wanted: it is named, and nothing hangs."""
    dist.barrier()
    tensor = ringcomm.empty_shared(50_000).fill_(1)
    if rank == 1:
        work = dist.all_reduce(tensor, async_op=True)
        Path(folder, "published").touch()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    while not Path(folder, "published").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    with pytest.raises(ringcomm.PeerDiedError) as caught:
        dist.all_reduce(tensor)
    assert caught.value.rank == 1


def test_a_peer_dies_before_its_memory_is_mapped(tmp_path: Path) -> None:
    run_ranks(2, check_death_before_mapping, str(tmp_path), fresh=True, may_die=[1])


def check_timeout(rank: int) -> None:
    tensor = ringcomm.empty_shared(50_000).fill_(1)
    if rank == 0:
        with pytest.raises(ringcomm.CollectiveTimeoutError) as caught:
            dist.all_reduce(tensor)
        assert caught.value.rank == 1
    else:
        time.sleep(3)
        with pytest.raises(ringcomm.CollectiveTimeoutError):
            dist.all_reduce(tensor)
        assert (tensor == 1).all()


def test_timeout() -> None:
    run_ranks(2, check_timeout, fresh=True, group_timeout_s=1)
