"""Memory on GPUs that a group allocates for FSDP2 and DDP, and uses again."""

from __future__ import annotations

import datetime
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus, with_kernels
from test_lent_memory import TABLE_BYTES, few_calls, used_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)

import ringcomm

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
MIB = 1 << 20


def allocator() -> Any:
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device(GPU, 0))


def allocate(num_bytes: int) -> Tensor:
    device = torch.device(GPU, emugpu.current_device())
    tensor: Tensor = allocator().allocate_tensor(num_bytes, dtype=torch.uint8, device=device)
    assert tensor.shape == (num_bytes,)
    return tensor


def check_allocator(rank: int) -> None:
    device = torch.device(GPU, emugpu.current_device())
    if not allocator().supports_tensor_alloc(device):  # before the first call
        refusal = r"an earlier call of the group on it; use torch\.empty"
        with pytest.raises(NotImplementedError, match=refusal):
            allocate(10)
    few_calls()
    assert allocator().supports_tensor_alloc(device)
    with pytest.raises(ValueError, match="-5"):
        allocator().allocate_tensor(-5, dtype=torch.uint8, device=device)
    del_before = used_bytes()
    large, small = allocate(6 * MIB), allocate(1000)
    del large, small
    few_calls()
    used = used_bytes()
    assert used > del_before
    for _ in range(20):  # what was given back is used again, whatever the order
        small = allocate(900)
        large = allocate(5 * MIB)
        del small, large
    few_calls()
    assert used_bytes() == used
    # One rank still has what the others have dropped: all get another piece.
    large = allocate(6 * MIB)
    kept = large if rank == 0 else None
    del large
    other = allocate(6 * MIB)
    other.fill_(rank + 1)
    dist.all_reduce(other)
    assert other[-1].item() == sum(range(1, dist.get_world_size() + 1))
    del other, kept
    few_calls()


def check_stream_order(rank: int) -> None:
    """What still runs on what was given back comes before what uses it next."""
    few_calls()
    first = allocate(4 * MIB)
    address, result = first.data_ptr(), torch.empty_like(first)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream())
    first.fill_(rank + 1)
    result.copy_(first)
    del first
    side = emugpu.Stream()
    with emugpu.stream(side):
        second = allocate(4 * MIB)
        assert second.data_ptr() == address
        second.fill_(9)
    assert not side.query()
    held.release()
    side.synchronize()
    assert second[-1].item() == 9
    assert result.unique().tolist() == [rank + 1]


def check_full_gpu(rank: int) -> None:
    """Without memory for a piece on one rank, all get ordinary memory."""
    few_calls()
    hog = []
    while rank == 1:
        try:
            hog.append(torch.empty(MIB, dtype=torch.uint8, device=GPU))
        except RuntimeError:
            hog.pop()  # room for tensors, and not for a piece of 2 MiB
            break
    used = used_bytes()
    tensor = allocate(1000)
    assert used_bytes() < used + MIB
    dist.all_reduce(tensor.fill_(rank + 1))
    assert tensor.unique().tolist() == [sum(range(1, dist.get_world_size() + 1))]
    del hog


def check_captured(rank: int) -> None:
    """A piece that a graph uses goes to no other tensor."""
    few_calls()
    given = torch.full((MIB,), rank + 1, dtype=torch.uint8, device=GPU)
    result = torch.zeros_like(given)
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        piece = allocate(MIB)
        piece.copy_(given)
        result.copy_(piece)
    del piece
    others = [allocate(MIB).fill_(77) for _ in range(2)]
    graph.replay()
    emugpu.synchronize()
    assert result.unique().tolist() == [rank + 1]
    assert [other.unique().tolist() for other in others] == [[77]] * 2


def check_captured_send(rank: int) -> None:
    """What a captured send reads stays, though its tensor goes."""
    few_calls()
    shared = ringcomm.empty_shared(MIB, dtype=torch.uint8, device=GPU).fill_(rank + 5)
    received = torch.zeros(MIB, dtype=torch.uint8, device=GPU)
    emugpu.synchronize()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.send(shared, 1) if rank == 0 else dist.recv(received, 0)
    used = used_bytes()
    del shared
    few_calls()
    assert used_bytes() == used if rank == 0 else True
    graph.replay()
    emugpu.synchronize()
    assert received.unique().tolist() == [0 if rank == 0 else 5]


def check_graph_before_any_piece(rank: int) -> None:
    """A graph from before the first shared tensor meets a peer's eager call of one."""
    few_calls()
    given = torch.full((MIB,), rank + 1.0, device=GPU)
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.all_reduce(given)
    shared = ringcomm.empty_shared(MIB, device=GPU).fill_(rank + 1.0)
    emugpu.synchronize()
    if rank == 0:
        graph.replay()
    else:
        dist.all_reduce(shared)
    emugpu.synchronize()
    assert (given if rank == 0 else shared).unique().tolist() == [3.0]


def check_dropped_by_some(rank: int) -> None:
    """A piece that another rank drops is freed, also if this one gives it back before."""
    few_calls()
    before = used_bytes()
    piece = allocate(2 * MIB)
    held = emugpu.hold(emugpu.current_stream()) if rank == 1 else None
    kept = piece if rank == 0 else None
    del piece
    longer = allocate(14 * MIB)
    del kept
    work = dist.all_reduce(torch.ones(10, device=GPU), async_op=True)
    dist.all_reduce(torch.ones(1))  # rank 0 has given its part back, rank 1's is still used
    if held is not None:
        held.release()
    assert work is not None
    work.wait()
    del work
    few_calls()
    assert used_bytes() < before + 15 * MIB + TABLE_BYTES  # 16 MiB with the piece
    del longer


def check_all_pieces_kept(rank: int) -> None:
    """Pieces that wait to be used again make room for shared tensors."""
    few_calls()
    pieces = [allocate(1000) for _ in range(256)]
    ordinary = allocate(1000)
    dist.all_reduce(ordinary.fill_(1))
    del pieces, ordinary
    emugpu.synchronize()
    shared = ringcomm.empty_shared(1000, device=GPU).fill_(1.0)
    dist.all_reduce(shared)
    assert shared[-1].item() == dist.get_world_size()


def check_device_without_index(rank: int) -> None:
    few_calls()
    tensor = allocator().allocate_tensor(10, dtype=torch.int16, device=torch.device(GPU))
    assert (tensor.device.index, tensor.dtype) == (emugpu.current_device(), torch.int16)


def check_interrupted(rank: int) -> None:
    """A signal ends the wait for ranks that do not come."""
    few_calls()
    store: Any = dist.distributed_c10d._get_default_store()

    def stop(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    if rank == 0:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            allocate(1000)
        store.set("interrupted", "")
    else:
        store.wait(["interrupted"], datetime.timedelta(seconds=20))
        with pytest.raises(ringcomm.RingcommError):
            dist.all_reduce(torch.ones(1))


CHECKS = [check_allocator, check_stream_order, check_captured, check_captured_send]
CHECKS += [check_graph_before_any_piece, check_dropped_by_some, check_all_pieces_kept]
CHECKS += [check_device_without_index, check_interrupted]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_memory_of_the_group(check: Callable[[int], None]) -> None:
    run_on_gpus(2, check, env=with_kernels(), fresh=True)


def test_ordinary_memory_where_a_gpu_is_full() -> None:
    env = with_kernels() | {"RINGCOMM_EMULATOR_MEMORY": str(64 * MIB)}
    run_on_gpus(2, check_full_gpu, env=env, fresh=True)


def check_fsdp2(rank: int) -> None:
    """Its calls of a training step, on its streams, with layers of two sizes."""
    few_calls()
    world_size, device = dist.get_world_size(), torch.device(GPU, emugpu.current_device())
    group: Any = dist.group.WORLD
    gather, scatter = ProcessGroupAllocAllGather(group), ProcessGroupAllocReduceScatter(group)
    side, compute = emugpu.Stream(), emugpu.current_stream()
    layers = [120_000, 400_000, 120_000, 400_000]

    def unshard(shard: Tensor) -> Tensor:
        with emugpu.stream(side):
            num = shard.numel()
            whole = gather.allocate((num * world_size,), dtype=shard.dtype, device=device)
            own = whole.narrow(0, num * rank, num)
            own.copy_(shard)
            gather(whole, own, group)
        compute.wait_stream(side)
        return whole

    used = []
    for step in range(1, 5):
        for num in layers:
            shard = torch.full((num,), 10.0 * rank + step, device=device)
            side.wait_stream(compute)
            weights = unshard(shard).view(world_size, num)
            for r in range(world_size):
                assert weights[r, ::999].unique().tolist() == [10.0 * r + step]
            grads = scatter.allocate((world_size * num,), dtype=torch.float32, device=device)
            grads.copy_(weights.flatten() + rank)
            del weights
            reduced = torch.empty(num, device=device)
            scatter(reduced, grads, group, dist.ReduceOp.SUM)
            expected = sum(10.0 * rank + step + r for r in range(world_size))
            assert reduced[::999].unique().tolist() == [expected]
            del grads, shard, reduced
        emugpu.synchronize()
        used.append(used_bytes())
    assert max(used) - min(used[1:]) < MIB, used  # no piece more


def test_fsdp2_allocates_from_the_group() -> None:
    run_on_gpus(2, check_fsdp2, env=with_kernels(), fresh=True)


def trained(rank: int, kind: str, from_group: bool) -> tuple[list[Tensor], list[int]]:
    """Weights by FSDP2, and the memory in use after each step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(256, 700), nn.Tanh(), nn.Linear(700, 256)).double()
    model = model.to(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if from_group:
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    used = []
    for step in range(4):
        x = torch.arange(4.0 * 256, dtype=torch.float64).reshape(4, 256).sub(500).mul(1e-3)
        optimizer.zero_grad()
        model(x.add(rank + step).to(kind)).square().mean().backward()
        optimizer.step()
        if kind == GPU:
            emugpu.synchronize()
            used.append(used_bytes())
    return [parameter.full_tensor().cpu() for parameter in model.parameters()], used


def check_real_fsdp2(rank: int) -> None:
    few_calls()
    expected, _ = trained(rank, "cpu", False)
    for from_group in (False, True):
        weights, used = trained(rank, GPU, from_group)
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        if from_group:
            assert max(used) - min(used[1:]) < MIB, used


def test_fsdp2() -> None:
    run_on_gpus(2, check_real_fsdp2, env=with_kernels(), fresh=True)


def check_ddp(rank: int) -> None:
    """Its reducer asks the group for buckets, as FSDP2 does, where the environment lets it."""
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # as of "ringcomm" alone
    few_calls()
    piece = allocate(4 * MIB)
    address = piece.data_ptr()
    del piece
    emugpu.synchronize()
    torch.manual_seed(0)
    model = nn.Linear(512, 1024).to(GPU)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    found = []

    def hook(_: object, bucket: dist.GradBucket) -> Any:
        found.append(bucket.buffer().data_ptr())
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP compares types, and these are strings
    ddp.register_comm_hook(None, hook)
    world_size = dist.get_world_size()
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.full((2, 512), rank + 1.0 + step, device=GPU)).sum().backward()
        expected = sum(2 * (r + 1.0 + step) for r in range(world_size))
        assert model.weight.grad is not None
        assert model.weight.grad[::99].cpu().unique().tolist() == [expected]
    assert found[0] == address


def test_ddp_allocates_from_the_group() -> None:
    env = with_kernels() | {"DDP_DISABLE_COMM_MEM": "0"}
    run_on_gpus(2, check_ddp, env=env, fresh=True)
