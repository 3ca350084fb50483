"""Mappings of peers' ordinary GPU memory: one for all groups of a process, when kernels may use
them, and how memory that was freed is given back.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from cases import slow
from emulated_gpu import in_emulated_ranks, run_on_gpus, with_kernels
from emulator_driver import Handle
from gpu_ranks import meet
from sequence_side import Call
from sequences import run_calls
from test_peer_allocations import (
    FEW_CALLS,
    GPU,
    MEMORY,
    NUM_BYTES,
    bytes_read_of_peers,
    check_sum,
    check_sums,
    new_tensor,
    num_mapped,
    used_bytes,
)
from torch import Tensor

import ringcomm

pytestmark = emulated_gpu.needs_emulated_gpu

PATIENCE_S = 60.0  # for what takes less than a second
# Places for several groups, and a queue for each stream.
ROOM = {"RINGCOMM_EMULATOR_SMS": "48", "RINGCOMM_EMULATOR_QUEUES": "0"}
in_two = in_emulated_ranks(2, env=ROOM, fresh=True)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def mapped_tensor() -> Tensor:
    tensor = new_tensor()
    check_sums(tensor)
    assert num_mapped() == 1
    return tensor


def wait_until_mapped(num: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while num_mapped() > num and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_mapped() == num


# ---- one for all groups


def check_two_groups(rank: int) -> None:
    """Over one allocation, which is freed and comes again at its address: both go on in place."""
    groups = [dist.group.WORLD, dist.new_group()]
    num_same = 0
    tensor = new_tensor()
    for turn in range(4):
        place = tensor.data_ptr()
        for num_used, (group, half) in enumerate(zip(groups, tensor.chunk(2), strict=True), 1):
            check_sums(half, first=10 * turn, group=group)
            # Half of the half, and nothing of what was there before.
            least = num_used * NUM_BYTES // 4
            assert least <= bytes_read_of_peers(tensor) < 1.1 * least + (1 << 16)
            assert num_mapped() == 1
        meet()  # a rank unmaps what another has freed before its own next call
        del tensor, half
        emugpu.empty_cache()
        tensor = new_tensor()
        num_same += tensor.data_ptr() == place
    assert num_same > 0, "a test of nothing: no address was used again"


@in_two
def test_a_group_without_calls(rank: int) -> None:
    """One that has mapped what was freed, and makes no more calls, keeps no other from mapping."""
    num_same = 0
    for other in [dist.new_group() for _ in range(3)]:
        tensor = new_tensor()
        check_sums(tensor, group=other)
        wait_until_mapped(1)
        place = tensor.data_ptr()
        meet()
        del tensor
        emugpu.empty_cache()
        tensor = new_tensor()
        num_same += tensor.data_ptr() == place
        check_sums(tensor, 2 * FEW_CALLS)
        assert bytes_read_of_peers(tensor) > 0
        wait_until_mapped(1)
        meet()
        del tensor
        emugpu.empty_cache()
    assert num_same > 0, "a test of nothing: no address was used again"


@in_emulated_ranks(2, env=ROOM | {"RINGCOMM_EMULATOR_REFUSES_REUSED": "1"}, fresh=True)
def test_a_driver_that_refuses_for_a_while(rank: int) -> None:
    """What the driver refuses to map is staged, and mapped once it no longer does."""
    driver = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
    handle, address = Handle(), ctypes.c_uint64()
    tensor = new_tensor()
    if rank == 0:
        source = ctypes.c_uint64(tensor.data_ptr())
        assert driver.cuIpcGetMemHandle(ctypes.byref(handle), source) == 0
        store().set("handle", bytes(handle).hex())
    else:  # the program holds it, which ringcomm does not know
        handle = Handle.from_buffer_copy(bytes.fromhex(store().get("handle").decode()))
        assert driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, 1) == 0
    meet()
    place = tensor.data_ptr()
    others: list[Tensor] = []
    if rank == 0:  # the same address again, after some attempts
        for _ in range(64):
            del tensor
            emugpu.empty_cache()
            tensor = new_tensor()
            if tensor.data_ptr() == place:
                break
            others.append(new_tensor())
        assert tensor.data_ptr() == place, "a test of nothing: the address was not used again"
    check_sums(tensor, 2 * FEW_CALLS)
    if rank == 1:  # whose own tensor rank 0 reads where it is
        assert bytes_read_of_peers(tensor, *others) == 0
        assert driver.cuIpcCloseMemHandle(address) == 0
    for _ in range(70):  # it tries every 64 calls
        dist.all_reduce(torch.ones(10, device=GPU))
    check_sums(tensor, 6 * FEW_CALLS)  # some are staged yet
    assert bytes_read_of_peers(tensor, *others) > 0


# ---- which kernels may use them


@in_two
def test_launched_before(rank: int) -> None:
    """A kernel that was launched before its rank mapped an allocation does not use it."""
    tensor = new_tensor().fill_(7 - 7 * rank)
    dist.all_reduce(torch.ones(10, device=GPU))  # connects
    emugpu.synchronize()
    if rank == 1:
        for _ in range(4):
            dist.broadcast(tensor, 0)
        store().set("launched", "")
        store().wait(["announced"])
        dist.broadcast(tensor, 0)
        assert num_mapped() == 1
        store().set("mapped", "")
        store().wait(["third"])
        assert bytes_read_of_peers(tensor) == 0
        store().set("seen", "")
    else:
        store().wait(["launched"])
        for _ in range(2):  # in the second it announces its allocation
            dist.broadcast(tensor, 0)
        store().set("announced", "")
        store().wait(["mapped"])
        dist.broadcast(tensor, 0)
        emugpu.synchronize()
        store().set("third", "")
        store().wait(["seen"])
        for _ in range(2):
            dist.broadcast(tensor, 0)
    emugpu.synchronize()
    assert tensor[::1000].unique().tolist() == [7]
    assert rank == 0 or bytes_read_of_peers(tensor) >= NUM_BYTES


@in_two
def test_messages_of_another_group(rank: int) -> None:
    """While one is under way nothing is mapped: it may wait for a peer that is in a collective."""
    other = dist.new_group()
    message = torch.full((1 << 20,), rank, dtype=torch.int32, device=GPU)
    dist.all_reduce(message[:10])  # connects, as the next line does
    dist.send(message, 1, other) if rank == 0 else dist.recv(message, 0, other)
    emugpu.synchronize()
    received = dist.irecv(message, 0, other) if rank == 1 else None
    meet()
    tensor = new_tensor()
    for turn in range(2 * FEW_CALLS):  # of which none waits for the whole device
        dist.all_reduce(tensor.fill_(turn))
        assert tensor[::1000].unique().tolist() == [2 * turn]
    assert num_mapped() == 0  # nor does rank 1 announce anything
    meet()
    if received is None:
        dist.send(message, 1, other)
    else:
        received.wait()
    emugpu.synchronize()
    meet()
    check_sums(tensor)
    assert num_mapped() == 1


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_MEMORY": str(MEMORY)}, fresh=True)
def test_scarce_memory_for_one_buffer(rank: int) -> None:
    """One that cannot be mapped, because memory is scarce, is staged; others stay in place."""
    tensor, other = new_tensor(), new_tensor()
    first, second = tensor.chunk(2)
    check_sums(first)
    assert num_mapped() == 1
    small = []
    while 16 * (MEMORY - used_bytes()) >= MEMORY:
        small.append(torch.empty(1 << 20, dtype=torch.uint8, device=GPU))
    meet()
    before = bytes_read_of_peers(tensor, other)
    assert before > 0
    check_sums(other)
    assert bytes_read_of_peers(tensor, other) == before
    check_sum(second)
    check_sum(other)
    assert num_mapped() == 1
    assert bytes_read_of_peers(tensor, other) > before


# ---- what was freed


@in_two
def test_freed_without_calls(rank: int) -> None:
    """Peers unmap it though no group makes a call."""
    tensor = mapped_tensor()
    meet()
    del tensor
    emugpu.empty_cache()
    wait_until_mapped(0)
    meet()


@in_two
def test_release(rank: int) -> None:
    """Of rank 0: rank 1 has it unmapped by then, and keeps its own."""
    tensor = mapped_tensor()
    meet()
    if rank == 0:
        del tensor
        emugpu.empty_cache()
        assert ringcomm.release(PATIENCE_S)
    meet()
    assert num_mapped() == 1 - rank
    assert ringcomm.release(PATIENCE_S)  # again: there is nothing more
    meet()
    assert num_mapped() == 1 - rank


@in_two
def test_release_during_a_call(rank: int) -> None:
    """A peer whose kernel runs unmaps nothing, and release() says so."""
    tensor = mapped_tensor()
    meet()
    if rank == 1:
        dist.all_reduce(tensor.fill_(1))  # waits for rank 0
    meet()
    if rank == 0:
        del tensor
        emugpu.empty_cache()
        assert not ringcomm.release(0.3)
        tensor = new_tensor().fill_(2)
        dist.all_reduce(tensor)
    emugpu.synchronize()
    assert tensor[::1000].unique().tolist() == [3]
    meet()
    if rank == 0:
        assert ringcomm.release(PATIENCE_S)
    meet()
    assert num_mapped() == 1 - rank


@pytest.mark.parametrize("refuses", ["0", slow("1")])
def test_two_groups(refuses: str) -> None:
    env = with_kernels() | ROOM | {"RINGCOMM_EMULATOR_REFUSES_REUSED": refuses}
    run_on_gpus(2, check_two_groups, env=env, fresh=True)


@in_emulated_ranks(2, env=[{}, {"RINGCOMM_MAP_TENSORS": "0"}], fresh=True)
def test_one_rank_that_switches_it_off(rank: int) -> None:
    tensor = new_tensor()
    check_sums(tensor, 2 * FEW_CALLS)
    assert (bytes_read_of_peers(tensor), num_mapped()) == (0, 0)


def test_release_without_anything_mapped() -> None:
    assert ringcomm.release()
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        ringcomm.release(-1)


# ---- collectives where all ranks, some or none pass a tensor of ringcomm.empty_shared

NUM_ELEMS = 1 << 20


@in_emulated_ranks(2)
def test_a_graph_from_before_any_shared_tensor(rank: int) -> None:
    """A graph from before the first shared tensor meets a peer's eager call of one."""
    dist.all_reduce(torch.ones(10, device=GPU))
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


# Several slices for each block; synchronous, in place where that can be, and later; shares of
# different sizes, of which some are nothing.
SIZE, IN_PLACE = 150_001, 22
REDUCED = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVED = ("broadcast", "gather", "scatter", "all_gather", "all_gather_into_tensor", "all_to_all")
CALLS = [
    Call(kind, dtype="int32", op=op, size=SIZE, uneven=uneven, root=1, wait=wait, variety=variety)
    for kind, op, uneven in (
        *((kind, op, 0) for kind in REDUCED for op in ("sum", "max")),
        *((kind, "sum", 0) for kind in MOVED),
        *(("all_to_all_single", "sum", uneven) for uneven in (0, 5)),
    )
    for wait, variety in ((0, 0), (0, IN_PLACE), (1, 1))
]


@pytest.mark.parametrize(
    "sharing", [[True] * 3, [False, True, False], slow([True, False, True])], ids=str
)
@in_emulated_ranks(3, fresh=True)
def test_collectives_of_shared_tensors(rank: int, sharing: list[bool]) -> None:
    """Pieces of a tensor that all ranks make, whether they use it or not, used where they are."""
    device = torch.device(GPU, emugpu.current_device())
    shared = ringcomm.empty_shared(1 << 22, dtype=torch.int32, device=GPU)
    begin = rank % 4  # ranks' tensors begin at different places of theirs

    def piece(length: int, **options: Any) -> Tensor:
        nonlocal begin
        begin += length
        return shared[begin - length : begin]

    for _ in range(2):
        for call in CALLS:
            begin = rank % 4
            assert run_calls([call], device, empty=piece if sharing[rank] else torch.empty) == []
    assert num_mapped() > 0
    assert run_calls(CALLS[::3], device) == []  # also the same call of memory that is not shared
