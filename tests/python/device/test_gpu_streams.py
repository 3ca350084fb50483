"""Streams, events, works and memory as users of NCCL know them; messages."""

from __future__ import annotations

import datetime
import gc
import time
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import device, held, in_gpu_ranks, module, on_all_gpus
from torch import Tensor
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

from ringcomm import _C
from ringcomm.backend import resolve_group
from ringcomm.torch_names import all_gather_single, backend_of

NUM_ELEMS = 10_007


def ones(value: float = 1.0) -> Tensor:
    return torch.full((NUM_ELEMS,), value, device=device())


def holds(tensor: Tensor, value: float) -> bool:
    return tensor.tolist() == [value] * NUM_ELEMS


@in_gpu_ranks(on_all_gpus)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_calls_and_waits_do_not_block_the_host(rank: int, is_async: bool) -> None:
    world_size = dist.get_world_size()
    tensor = ones()
    dist.all_reduce(tensor)  # connects
    module().synchronize()
    with held():
        tensor.fill_(rank + 1.0)
        work = dist.all_reduce(tensor, async_op=is_async)
        if work is not None:
            assert not work.is_completed()
            work.wait()
        result = tensor.clone()
        assert not module().current_stream().query()  # all of it waits, and we do not
    assert holds(result, world_size * (world_size + 1) / 2)
    if work is not None:
        assert work.is_completed()


@in_gpu_ranks(on_all_gpus)
def test_wait_orders_the_current_stream(rank: int) -> None:
    """The work is made on one stream, waited for on another and read there."""
    world_size = dist.get_world_size()
    side = module().Stream()
    for turn in range(5):
        tensor = ones(float(turn + rank))
        work: Any = dist.all_reduce(tensor, async_op=True)
        with module().stream(side):
            work.wait()
            result = tensor + 1
        side.synchronize()
        assert holds(result, sum(turn + r for r in range(world_size)) + 1)


@in_gpu_ranks(on_all_gpus)
def test_a_call_frees_the_tensors_of_earlier_ones_without_a_lock(rank: int) -> None:
    """Their end runs Python, which may ask the group: with its lock held, for ever."""
    backend = backend_of(resolve_group(), device())
    dist.all_reduce(ones())  # connects
    asked: list[int] = []

    class Asks:
        def __del__(self) -> None:
            asked.append(_C.ranks_per_device(backend, device()))

    marked = ones()
    marked.asks = Asks()  # type: ignore[attr-defined]
    with held():
        dist.all_reduce(marked, async_op=True)
        del marked
        assert not asked  # the call has the tensor
    module().synchronize()
    dist.all_reduce(ones())
    assert len(asked) == 1


@in_gpu_ranks(on_all_gpus)
def test_collectives_run_in_the_order_of_the_current_stream_and_of_calls(rank: int) -> None:
    """What the current stream has yet to do with a tensor comes first, then call after call."""
    world_size = dist.get_world_size()
    side = module().Stream()
    tensor = ones(-1.0)
    module().synchronize()
    with module().stream(side), held(side, for_a_second=True):
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, async_op=True).wait()
        event = side.record_event()
    module().current_stream().wait_event(event)
    assert holds(tensor, world_size * (world_size + 1) / 2)
    tensor.fill_(1.0)
    for _ in range(4):
        dist.all_reduce(tensor, async_op=True)
    work: Any = dist.broadcast(tensor, 0, async_op=True)
    on_host = torch.ones(3)
    dist.all_reduce(on_host)  # of the same group, and not in that order
    assert on_host.tolist() == [world_size] * 3
    work.wait()
    assert holds(tensor, float(world_size) ** 4)


@in_gpu_ranks(on_all_gpus)
def test_asynchronous_calls_have_their_own_stream(rank: int) -> None:
    """An asynchronous call waits for what was enqueued before it, and for nothing later."""
    world_size = dist.get_world_size()
    tensor = ones()
    dist.all_reduce(tensor)
    work: Any = dist.all_reduce(tensor, async_op=True)
    with held():
        work.wait(datetime.timedelta(seconds=20))  # on the host; the current stream is held
        assert work.is_completed()
    assert holds(tensor, world_size**2)


@in_gpu_ranks(on_all_gpus)
def test_tensors_live_as_long_as_they_are_used(rank: int) -> None:
    """The input goes while the call is under way; what takes its memory is not sent."""
    world_size = dist.get_world_size()
    gathered = torch.zeros(world_size * NUM_ELEMS, device=device())
    for turn in range(3):
        with held():
            work = all_gather_single(gathered, ones(float(rank + turn)), async_op=True)
            junk = [ones(-7.0) for _ in range(4)]
            work.wait()
        expected = [float(r + turn) for r in range(world_size) for _ in range(NUM_ELEMS)]
        assert gathered.tolist() == expected
        del junk


@in_gpu_ranks(on_all_gpus, fresh=True)
def test_works_and_tensors_that_nobody_keeps(rank: int) -> None:
    """Nobody waits for these, or keeps their tensors; the device does, as long as it uses them."""
    world_size = dist.get_world_size()
    dist.all_reduce(ones(), async_op=True).wait()
    module().synchronize()
    gc.collect()
    before = module().memory_allocated()
    gathered = [torch.empty(world_size * NUM_ELEMS, device=device()) for _ in range(8)]
    for turn, output in enumerate(gathered):
        all_gather_single(output, ones(float(turn + rank)), async_op=True)
        ones(-1.0)  # takes what has become free
    dist.all_reduce(ones())
    module().synchronize()
    for turn, output in enumerate(gathered):
        expected = torch.arange(float(world_size)).repeat_interleave(NUM_ELEMS) + turn
        assert torch.equal(output.cpu(), expected)
    del gathered, output
    dist.all_reduce(torch.ones(1, device=device()))  # the next call lets go of what is over
    module().synchronize()
    gc.collect()
    assert module().memory_allocated() <= before + 512


@in_gpu_ranks(on_all_gpus)
def test_works_outlive_their_group(rank: int) -> None:
    """Also works that the group had let go of before."""
    group = dist.new_group()
    works: list[Any] = [dist.all_reduce(ones(), group=group, async_op=True) for _ in range(3)]
    works[0].wait()
    module().synchronize()
    assert works[1].is_completed()
    dist.all_reduce(ones(), group=group)
    dist.destroy_process_group(group)
    for work in works:
        work.wait()
        assert work.is_completed()
        assert work.is_success()


@in_gpu_ranks(on_all_gpus)
def test_works_of_compiled_programs_are_forgotten(rank: int) -> None:
    """torch keeps the works, and so the tensors, of calls that a compiled function may await."""
    num_kept = torch._C._distributed_c10d._get_work_registry_size
    tensor = ones()
    with allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor)
        assert num_kept() == 0
    assert holds(tensor, float(dist.get_world_size()) ** 2)


@in_gpu_ranks(on_all_gpus)
def test_futures(rank: int) -> None:
    """Of a collective; a receive from any source is refused."""
    with pytest.raises(NotImplementedError, match="any source"):
        dist.recv(ones())
    work: Any = dist.all_reduce(ones(), async_op=True)
    twice = work.get_future().then(lambda done: done.value()[0] * 2)
    assert holds(twice.wait(), 2.0 * dist.get_world_size())


def _from_works(works: list[Any], by: str, received: list[Tensor]) -> None:
    """Orders the current stream after works, by one of the ways of torch.

    torch orders users of what then() makes only if it has tensors; a batch has no results.
    """
    for work in works:
        if by == "wait":
            work.wait()
        elif by == "block_current_stream":
            work.block_current_stream()
        elif by == "future":
            work.get_future().wait()
        else:
            work.get_future().then(lambda _: [tensor + 0 for tensor in received]).wait()


@in_gpu_ranks(
    on_all_gpus,
    env={"RINGCOMM_EMULATOR_QUEUES": "0"},
    group_timeout_s=60.0,
)
@pytest.mark.parametrize("made", ["single", "coalesced", "blocks", "batch"])
@pytest.mark.parametrize("by", ["wait", "block_current_stream", "future", "then"])
def test_works_order_the_stream_that_waits(rank: int, made: str, by: str) -> None:
    """https://github.com/pytorch/pytorch/issues/122807: works of a coalesced block order nothing;
    https://github.com/meta-pytorch/torchft/issues/240: Work.block_current_stream()."""
    world_size = dist.get_world_size()
    group: Any = dist.group.WORLD
    received = [ones(-1.0), ones(-1.0)]
    for tensor in received:
        dist.all_reduce(tensor)  # connects
    if made == "batch":
        exchange_with_neighbours(received, rank)[0].wait()  # connects
    side = module().Stream()
    module().synchronize()
    with held():
        for tensor in received:
            tensor.fill_(rank + 1.0)
        works: list[Any]
        if made == "single":
            works = [dist.all_reduce(tensor, async_op=True) for tensor in received]
        elif made == "coalesced":
            with dist._coalescing_manager(device=device(), async_ops=True) as manager:
                for tensor in received:
                    dist.all_reduce(tensor)
            works = manager.works
        elif made == "blocks":  # of several works
            group._start_coalescing(device())
            for tensor in received:
                dist.all_reduce(tensor, async_op=True)
            works = [group._end_coalescing(device())]
        else:
            works = exchange_with_neighbours(received, rank)
        with module().stream(side):
            _from_works(works, by, received)
            results = [tensor.clone() for tensor in received]
        time.sleep(0.02)  # for a stream that does not wait
        assert not side.query()
    side.synchronize()
    expected = (
        (rank - 1) % world_size + 1.0 if made == "batch" else world_size * (world_size + 1) / 2
    )
    for result in results:
        assert holds(result, expected)


def exchange_with_neighbours(received: list[Tensor], rank: int) -> list[Any]:
    """Sends what the tensors hold to the next rank, and receives it from the one before."""
    to, source = (rank + 1) % dist.get_world_size(), (rank - 1) % dist.get_world_size()
    sends = [dist.P2POp(dist.isend, tensor.clone(), to) for tensor in received]
    receives = [dist.P2POp(dist.irecv, tensor, source) for tensor in received]
    return dist.batch_isend_irecv([*sends, *receives])


@in_gpu_ranks(on_all_gpus)
def test_the_future_of_a_barrier(rank: int) -> None:
    """A work without results has a future with devices, too."""
    work: Any = dist.barrier(async_op=True, device_ids=[device().index])
    assert work.get_future().wait() == []
    work.wait()


LARGE = (1 << 20) // 4  # elements, of a MiB


@in_gpu_ranks(on_all_gpus, group_timeout_s=15.0)
@pytest.mark.parametrize(
    ("order", "sizes"),
    [("ssrr", (100_003, LARGE)), ("rrss", (LARGE, 100_003)), ("srsr", (LARGE, LARGE))],
)
def test_batches_of_large_messages(rank: int, order: str, sizes: tuple[int, ...]) -> None:
    """Messages both ways between ranks 0 and 1, each of many slots, in one batch.

    `order`: "s" and "r" for the sends and receives, as they stand in the batch.
    """
    dist.all_reduce(ones())
    if rank > 1:
        return
    peer = 1 - rank
    sent = [oracle.integers(rank, size, torch.float32, seed) for seed, size in enumerate(sizes)]
    due = [oracle.integers(peer, size, torch.float32, seed) for seed, size in enumerate(sizes)]
    for _ in range(3):
        received = [torch.zeros(size, device=device()) for size in sizes]
        sends = [dist.P2POp(dist.isend, tensor.to(device()), peer) for tensor in sent]
        receives = [dist.P2POp(dist.irecv, tensor, peer) for tensor in received]
        batch = [(sends if letter == "s" else receives).pop(0) for letter in order]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        for tensor, expected in zip(received, due, strict=True):
            oracle.assert_equal(tensor.cpu(), expected)
