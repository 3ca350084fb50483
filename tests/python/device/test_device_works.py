"""What works of device collectives do: streams, the host, memory, batches.

On emulated GPUs, over sends and receives that behave as NCCL's. Streams are held, so that what is
asynchronous shows without a clock.
"""

from __future__ import annotations

import datetime
import gc
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
SLOW = {"RINGCOMM_EMULATOR_POISON": "1", "RINGCOMM_EMULATOR_DELAY_US": "300"}


def run(world_size: int, fn: Any, *args: Any, **options: Any) -> list[Any]:
    return run_on_gpus(world_size, fn, *args, env=SLOW, **options)


# ---- streams and the host


def check_host_goes_on(rank: int, is_async: bool) -> None:
    world_size = dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=GPU))  # the first one meets the others
    stream = emugpu.current_stream()
    base = torch.ones(1001, device=GPU)
    held = emugpu.hold(stream)
    tensor = base * (rank + 1)  # late, and the collective behind it
    work = dist.all_reduce(tensor, async_op=is_async)
    if work is not None:
        assert not work.is_completed()
        future = work.get_future().then(lambda done: done.value()[0] * 2)
        assert work.wait()
        assert not work.is_completed()
    after = tensor + 1
    assert not stream.query()
    held.release()
    total = world_size * (world_size + 1) / 2
    assert after.tolist() == [total + 1] * 1001
    if work is not None:
        assert work.is_completed()
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        assert future.wait().tolist() == [2 * total] * 1001


@pytest.mark.parametrize("is_async", [False, True])
def test_host_does_not_wait(is_async: bool) -> None:
    run(3, check_host_goes_on, is_async)


def check_own_stream(rank: int) -> None:
    """An asynchronous collective waits for what was enqueued before it, and for nothing later."""
    tensor = torch.ones(100, device=GPU)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    held = emugpu.hold(emugpu.current_stream())
    work.wait(datetime.timedelta(seconds=20))  # on the host; the current stream is held
    assert work.is_completed()
    held.release()
    assert tensor.tolist() == [4.0] * 100
    side = emugpu.Stream()
    with emugpu.stream(side):
        other = torch.full((100,), 3.0, device=GPU)
        dist.all_reduce(other)
        dist.all_reduce(other, async_op=True).wait()
    emugpu.current_stream().wait_stream(side)
    assert other.tolist() == [12.0] * 100


def test_asynchronous_calls_have_their_own_stream() -> None:
    run(2, check_own_stream)


def check_order(rank: int) -> None:
    """Without a wait between them, collectives on one tensor run in the order of their calls."""
    world_size = dist.get_world_size()
    tensor = torch.ones(5000, device=GPU)
    for _ in range(4):
        work = dist.all_reduce(tensor, async_op=True)
    work = dist.broadcast(tensor, 0, async_op=True)
    cpu = torch.ones(3)
    dist.all_reduce(cpu)  # of the same group, and not in that order
    assert cpu.tolist() == [world_size] * 3
    assert work is not None
    work.wait()
    assert (tensor == float(world_size) ** 4).all()


def test_calls_run_in_order_beside_those_on_the_cpu() -> None:
    run(3, check_order)


# ---- memory


def check_kept_alive(rank: int) -> None:
    """Works and inputs that the caller drops at once; their memory is poisoned when it is free."""
    world_size = dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=GPU), async_op=True).wait()
    emugpu.synchronize()
    gc.collect()
    before = emugpu.memory_allocated()
    outputs = []
    for i in range(8):
        output = torch.empty(world_size * 2000, device=GPU)
        dist.all_gather_into_tensor(
            output, torch.full((2000,), float(rank + i), device=GPU), async_op=True
        )
        torch.full((2000,), -1.0, device=GPU)  # takes what has become free
        columns = torch.empty(2000, 2 * world_size, device=GPU).t()
        dist.all_gather_into_tensor(
            columns, torch.full((2, 2000), float(rank), device=GPU), async_op=True
        )
        torch.full((2000,), -1.0, device=GPU)
        outputs.append((output, columns))
    emugpu.synchronize()
    expected = torch.arange(float(world_size))
    for i, (output, columns) in enumerate(outputs):
        assert torch.equal(output.cpu(), (expected + i).repeat_interleave(2000))
        assert torch.equal(columns.cpu(), expected.repeat_interleave(2)[:, None].expand(-1, 2000))
    del outputs, output, columns
    dist.all_reduce(torch.ones(1, device=GPU))  # the next call lets go of what is over
    emugpu.synchronize()
    gc.collect()
    assert emugpu.memory_allocated() <= before + 512


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_are_kept_as_long_as_they_are_used(world_size: int) -> None:
    run(world_size, check_kept_alive)


# ---- messages and batches


def check_messages(rank: int) -> None:
    world_size = dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=GPU))
    if rank < 2:
        for tag, numel in ((3, 1), (1, 5000), (2, 0)):
            tensor = torch.full((numel,), 7.0, device=GPU)
            if rank == 0:
                dist.send(tensor, 1, tag=tag)
            else:
                columns = torch.zeros(numel, 2, device=GPU)
                dist.recv(columns[:, 1], 0, tag=tag)
                assert (columns.cpu() == torch.tensor([0.0, 7.0])).all()
    received = [torch.zeros(1000, device=GPU) for _ in range(world_size)]
    peers = [peer for peer in range(world_size) if peer != rank]
    sends = [
        dist.P2POp(dist.isend, torch.full((1000,), 10.0 * rank + peer, device=GPU), peer)
        for peer in peers
    ]
    receives = [dist.P2POp(dist.irecv, received[peer], peer) for peer in peers]
    for work in dist.batch_isend_irecv([*sends, *receives]):  # all send first
        work.wait()
    for peer in peers:
        assert received[peer].tolist() == [10.0 * peer + rank] * 1000
    numbers = [torch.zeros(1) for _ in peers]  # of CPU tensors any order does
    batch = [dist.P2POp(dist.isend, torch.ones(1) * rank, peer) for peer in peers]
    batch += [dist.P2POp(dist.irecv, *pair) for pair in zip(numbers, peers, strict=True)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert [number.item() for number in numbers] == peers
    with pytest.raises(NotImplementedError, match="any source"):
        dist.recv(received[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(world_size: int) -> None:
    run(world_size, check_messages)


def check_coalesced(rank: int) -> None:
    world_size = dist.get_world_size()
    tensors = [torch.full((size,), float(rank), device=GPU) for size in (1, 0, 700)]
    with dist._coalescing_manager(device=torch.device(GPU), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        assert (tensor.cpu() == sum(range(world_size))).all()
    outputs = [torch.empty(world_size * size, device=GPU) for size in (2, 300)]
    with dist._coalescing_manager(device=torch.device(GPU)):
        for output in outputs:
            own = torch.full((len(output) // world_size,), float(rank), device=GPU)
            dist.all_gather_into_tensor(output, own)
    for output in outputs:
        size = len(output) // world_size
        assert torch.equal(output.cpu(), torch.arange(float(world_size)).repeat_interleave(size))
    scattered = torch.empty(5, device=GPU)
    wide = torch.arange(5.0 * world_size, device=GPU)
    with dist._coalescing_manager(device=torch.device(GPU)):
        dist.reduce_scatter_tensor(scattered, wide)
    assert torch.equal(scattered.cpu(), world_size * torch.arange(5.0) + 5 * rank * world_size)


def test_coalesced_calls() -> None:
    run(3, check_coalesced)
