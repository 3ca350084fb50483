"""More groups under way at once than a GPU has room for kernels that wait, on emulated GPUs.

An emulated GPU holds so many blocks of all processes, and an operator of torch fills a
multiprocessor, so ranks that wait can keep out what a late rank must do first.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks, needs_emulated_gpu, run_on_gpus, with_kernels
from failures import caught

from ringcomm import _C

pytestmark = needs_emulated_gpu

GPU = "emugpu"
SLOW_S = 0.2


def run(world_size: int, fn: Any, *args: Any, env: Any = None, **options: Any) -> list[Any]:
    env = {**with_kernels(), "RINGCOMM_EMULATOR_SMS": "8", **(env or {})}
    return run_on_gpus(world_size, fn, *args, env=env, fresh=True, **options)


def is_over_messages(group: Any) -> bool:
    """Whether the ranks share no memory of their devices; collective."""
    device = torch.ones(1, device=GPU).device
    return _C.ranks_per_device(group._get_backend(device), device) == 0


def groups_in_use(num_groups: int, timeout_s: float = 30.0) -> list[Any]:
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = [dist.new_group(timeout=timeout) for _ in range(num_groups)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device=GPU), group=group)
    emugpu.synchronize()
    return groups


def check_late_rank(rank: int, num_groups: int, timeout_s: float = 30.0) -> None:
    """All but one rank wait in all groups; that one computes first."""
    world_size = dist.get_world_size()
    groups = groups_in_use(num_groups, timeout_s)
    for late in range(world_size):
        # Packets for each block of any group, and calls in place.
        sizes = [60_000, 600_000] * num_groups
        tensors = [torch.full((size,), rank + 1.0, device=GPU) for size in sizes]
        emugpu.synchronize()
        dist.barrier()
        if rank == late:
            time.sleep(SLOW_S)
            computed = torch.ones(1000, device=GPU) * 2
            assert computed.tolist() == [2.0] * 1000  # before it comes to any group
        works: list[Any] = [
            dist.all_reduce(tensor, group=groups[i // 2], async_op=True)
            for i, tensor in enumerate(tensors)
        ]
        for work in works:
            work.wait(datetime.timedelta(seconds=30))  # on the host, which hears of errors
        expected = world_size * (world_size + 1) / 2
        assert all(tensor.unique().tolist() == [expected] for tensor in tensors)


def test_groups_under_way_at_once_leave_room_for_a_late_rank() -> None:
    run(3, check_late_rank, 4)


FEW = {"RINGCOMM_EMULATOR_REAL_SMS": "2", "RINGCOMM_EMULATOR_QUEUES": "0"}


@pytest.mark.slow
@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_SMS": "64", **FEW}, fresh=True)
def test_on_a_gpu_with_fewer_multiprocessors_than_it_says_they_leave_none(rank: int) -> None:
    """The control of the test above: where blocks are not counted right, the late rank hangs."""
    assert "1500 ms" in caught(check_late_rank, rank, 4, 1.5)["text"]


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_SMS": "8"}, fresh=True)
def test_without_room_a_group_goes_by_messages_until_groups_are_destroyed(rank: int) -> None:
    """Three blocks of a rank may wait: those of six groups, one each, and twice that at most."""
    groups = groups_in_use(8)
    last = groups[-1]
    assert is_over_messages(last)
    dist.barrier()
    for group in groups[1:]:
        dist.destroy_process_group(group)
    dist.barrier()
    (again,) = groups_in_use(1)
    assert not is_over_messages(again)
    work = dist.isend(torch.full((10,), 2.0, device=GPU), 1 - rank, group=again)
    received = torch.zeros(10, device=GPU)
    dist.recv(received, 1 - rank, group=again)
    assert work is not None
    work.wait()
    assert received.tolist() == [2.0] * 10


@in_emulated_ranks(4, env={"RINGCOMM_EMULATOR_SMS": "8"}, fresh=True)
def test_messages_of_more_ranks_than_a_gpu_has_room_for_are_refused(rank: int) -> None:
    x = torch.ones(10, device=GPU)
    dist.all_reduce(x)
    with pytest.raises(ValueError, match="no room for kernels that wait for messages"):
        dist.isend(x, (rank + 1) % 4)
    dist.all_reduce(x)  # the group is as usable as before
    assert x.tolist() == [16.0] * 10


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_SMS": "8"}, fresh=True, group_timeout_s=10.0)
def test_a_replay_beside_a_call_on_another_stream_is_an_error(rank: int) -> None:
    x = torch.ones(1000, device=GPU)
    y = torch.ones(1000, device=GPU)
    dist.all_reduce(x)
    emugpu.synchronize()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        dist.all_reduce(x)
    store = dist.distributed_c10d._get_default_store()

    def call() -> None:
        """One, because each kernel that is enqueued takes its time to see that the group ended."""
        work: Any = dist.all_reduce(y, async_op=True)
        work.wait(datetime.timedelta(seconds=60))

    if rank == 0:  # whose kernels both wait for rank 1, until one of them finds the other
        with emugpu.stream(emugpu.Stream()):
            graph.replay()
        said = caught(call)
        store.set("rank 0 has heard", "yes")
    else:
        store.wait(["rank 0 has heard"])
        said = caught(call)
    assert "two calls of this group ran at the same time on rank 0" in said["text"], said
