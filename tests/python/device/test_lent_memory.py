"""ringcomm.empty_shared on GPUs: when the memory of tensors that have gone is free again."""

from __future__ import annotations

import ctypes
import os

import emugpu
import emulated_gpu
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from torch import Tensor

import ringcomm

pytestmark = emulated_gpu.needs_emulated_gpu

GPU = "emugpu"
NUM_ELEMS = 1 << 20
NUM_BYTES = 4 * NUM_ELEMS
TABLE_BYTES = 2 << 20  # where kernels find all pieces; kept


def used_bytes() -> int:
    """Of this process on the device."""
    driver = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value


def shared_sum(rank: int) -> Tensor:
    """A tensor in shared memory, after an all_reduce of what every rank has written to it."""
    world_size = dist.get_world_size()
    shared = ringcomm.empty_shared(NUM_ELEMS, device=GPU).fill_(rank + 1.0)
    dist.all_reduce(shared)
    assert shared[-1].item() == world_size * (world_size + 1) / 2
    return shared


def few_calls() -> None:
    """In which ranks find out what all have dropped, unmap it, and free their own."""
    for _ in range(4):
        dist.all_reduce(torch.ones(10, device=GPU))
        emugpu.synchronize()
        dist.all_reduce(torch.ones(1))  # of the host: nobody goes on before all are here


@in_emulated_ranks(3)
def test_memory_is_freed_when_all_ranks_have_dropped_it(rank: int) -> None:
    """When the last rank has dropped its part, by the next calls."""
    few_calls()
    before = used_bytes()
    kept = [shared_sum(rank) for _ in range(3)]
    few_calls()
    assert used_bytes() >= before + 3 * NUM_BYTES
    mine = kept[1] if rank == 1 else None
    del kept
    few_calls()
    left = used_bytes() - before
    assert NUM_BYTES <= left <= NUM_BYTES + 2 * TABLE_BYTES, left
    # Of rank 1 that one, of the others a new one: all in place, and right.
    new = ringcomm.empty_shared(NUM_ELEMS, device=GPU)
    total = new if mine is None else mine
    dist.all_reduce(total.fill_(rank + 1.0))
    assert total[-1].item() == sum(range(1, dist.get_world_size() + 1))
    del mine, new, total
    few_calls()
    assert used_bytes() <= before + 3 * TABLE_BYTES


@in_emulated_ranks(2)
def test_many(rank: int) -> None:
    """More than there can be at a time."""
    for _ in range(300):
        ringcomm.empty_shared(10, device=GPU)
        few = torch.ones(10, device=GPU)
        dist.all_reduce(few)
        few.tolist()


@in_emulated_ranks(2)
def test_pending_calls(rank: int) -> None:
    """What is still to run keeps the memory; what is freed meanwhile does not wait for it."""
    world_size = dist.get_world_size()
    ringcomm.empty_shared(NUM_ELEMS, device=GPU)
    shared = ringcomm.empty_shared(NUM_ELEMS, device=GPU)
    other = torch.ones(10, device=GPU)
    emugpu.synchronize()
    held = emugpu.hold(emugpu.current_stream())
    shared.fill_(rank + 1.0)
    dist.all_reduce(shared)
    result = shared.clone()
    del shared
    for _ in range(3):
        dist.all_reduce(other)
    assert not emugpu.current_stream().query()  # nothing has waited for what is held
    held.release()
    assert result.tolist() == [world_size * (world_size + 1) / 2] * NUM_ELEMS
    few_calls()


@in_emulated_ranks(2)
def test_a_captured_send(rank: int) -> None:
    """What a captured send reads stays, though its tensor goes."""
    few_calls()
    shared = ringcomm.empty_shared(NUM_ELEMS, dtype=torch.uint8, device=GPU).fill_(rank + 5)
    received = torch.zeros(NUM_ELEMS, dtype=torch.uint8, device=GPU)
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


@in_emulated_ranks(2)
def test_a_graph_from_before_any_piece(rank: int) -> None:
    """A graph from before the first shared tensor meets a peer's eager call of one."""
    few_calls()
    given = torch.full((NUM_ELEMS,), rank + 1.0, device=GPU)
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.all_reduce(given)
    shared = ringcomm.empty_shared(NUM_ELEMS, device=GPU).fill_(rank + 1.0)
    emugpu.synchronize()
    if rank == 0:
        graph.replay()
    else:
        dist.all_reduce(shared)
    emugpu.synchronize()
    assert (given if rank == 0 else shared).unique().tolist() == [3.0]


@in_emulated_ranks(2)
def test_a_tensor_outlives_its_group(rank: int) -> None:
    """Its memory goes with the tensor."""
    before = used_bytes()
    group = dist.new_group()
    shared = ringcomm.empty_shared(NUM_ELEMS, device=GPU, group=group)
    dist.all_reduce(shared.fill_(1.0), group=group)
    emugpu.synchronize()
    dist.destroy_process_group(group)
    assert shared[-1].item() == dist.get_world_size()
    assert used_bytes() >= before + NUM_BYTES
    del shared
    assert used_bytes() <= before
