"""More groups under way at once than a GPU has room for kernels that wait, on emulated GPUs.

An emulated GPU holds so many blocks of all processes, and an operator of torch fills a
multiprocessor, so ranks that wait can keep out what a late rank must do first.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from pathlib import Path
from typing import Any

import emugpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks, needs_emulated_gpu, run_on_gpus, with_kernels
from failures import caught
from ranks import remove_gpu_file

from ringcomm import _C

pytestmark = needs_emulated_gpu

GPU = "emugpu"
SLOW_S = 0.2


def run(world_size: int, fn: Any, *args: Any, env: Any = None, **options: Any) -> list[Any]:
    env = {**with_kernels(), "RINGCOMM_EMULATOR_SMS": "8", **(env or {})}
    return run_on_gpus(world_size, fn, *args, env=env, fresh=True, **options)


def transport(group: Any) -> str:
    (name,) = _C.device_transports(group._get_backend(torch.device(GPU))).values()
    return str(name)


def groups_in_use(num_groups: int, timeout_s: float = 30.0) -> list[Any]:
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = [dist.new_group(timeout=timeout) for _ in range(num_groups)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device=GPU), group=group)
    emugpu.synchronize()
    return groups


def check_late_rank(rank: int, num_groups: int, timeout_s: float = 30.0) -> int:
    """All but one rank wait in all groups; that one computes first. Returns how many take turns."""
    world_size = dist.get_world_size()
    groups = groups_in_use(num_groups, timeout_s)
    for late in range(world_size):
        # A slice for each block of any group.
        tensors = [torch.full((200_000,), rank + 1.0, device=GPU) for _ in groups]
        emugpu.synchronize()
        dist.barrier()
        if rank == late:
            time.sleep(SLOW_S)
            computed = torch.ones(1000, device=GPU) * 2
            assert computed.tolist() == [2.0] * 1000  # before it comes to any group
        works: list[Any] = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for group, tensor in zip(groups, tensors, strict=True)
        ]
        for work in works:
            work.wait(datetime.timedelta(seconds=30))  # on the host, which hears of errors
        expected = torch.full((200_000,), world_size * (world_size + 1) / 2)
        assert all(torch.equal(tensor.cpu(), expected) for tensor in tensors)
    return sum("taking turns" in transport(group) for group in groups)


def test_groups_under_way_at_once_leave_room_for_a_late_rank() -> None:
    (num_in_turns,) = set(run(3, check_late_rank, 4))
    assert 0 < num_in_turns < 4


def gpu_files() -> set[Path]:
    """By which this process shares its GPU."""
    links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return {Path(link) for link in links if link.startswith("/dev/shm/ringcomm-gpu-")}


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_SMS": "8"}, fresh=True)
def test_without_its_file_of_seats_a_gpu_has_no_more_groups_of_kernels(
    rank: int, tmp_path: Path
) -> None:
    (group,) = groups_in_use(1)
    (file,) = gpu_files()
    assert not remove_gpu_file(file)  # the tests' clean-up
    dist.barrier()
    if rank == 0:
        file.unlink()
    dist.barrier()
    (other,) = groups_in_use(1)
    for either in (group, other):
        summed = torch.ones(1, device=GPU)
        dist.all_reduce(summed, group=either)
        assert summed.item() == dist.get_world_size()
    assert "cuda_ipc" not in transport(other)
    left_behind = tmp_path / f"ringcomm-gpu-{rank}"
    left_behind.touch()
    assert remove_gpu_file(left_behind)
    assert not left_behind.exists()


FEW = {"RINGCOMM_EMULATOR_REAL_SMS": "6", "RINGCOMM_EMULATOR_QUEUES": "0"}


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_SMS": "8", **FEW}, fresh=True)
def test_on_a_gpu_with_fewer_multiprocessors_than_it_says_they_leave_none(rank: int) -> None:
    """The control of the test above: where blocks are not counted right, the late rank hangs."""
    assert "1500 ms" in caught(check_late_rank, rank, 4, 1.5)["text"]


@in_emulated_ranks(2, env={"RINGCOMM_EMULATOR_SMS": "12"}, fresh=True)
def test_what_has_no_room_is_refused_until_groups_are_destroyed(rank: int) -> None:
    groups = groups_in_use(6)
    last = groups[-1]
    assert "taking turns (no room)" in transport(last)
    x = torch.ones(10, device=GPU)
    with pytest.raises(ValueError, match=r"other groups use all .* destroy groups"):
        dist.isend(x, 1 - rank, group=last)
    with pytest.raises(ValueError, match=r"no room left .* messages of rank \d; use all_to_all"):
        dist.isend(x, 1 - rank, group=groups[0])
    with (
        emugpu.graph(emugpu.CUDAGraph()),
        pytest.raises(ValueError, match=r"take turns .* destroy groups"),
    ):
        dist.all_reduce(x, group=last)
    dist.all_reduce(x, group=last)  # they have ended nothing
    emugpu.synchronize()
    dist.barrier()
    for group in groups[1:]:
        dist.destroy_process_group(group)
    dist.barrier()
    (again,) = groups_in_use(1)
    assert "side by side" in transport(again)
    work = dist.isend(x, 1 - rank, group=again)
    received = torch.zeros(10, device=GPU)
    dist.recv(received, 1 - rank, group=again)
    assert work is not None
    work.wait()
    assert received.tolist() == [2.0] * 10


def exchange_with_all(rank: int) -> tuple[list[int], dict[int, list[float]]]:
    """A batch of messages with all peers: who was refused, and what is in the receive buffers."""
    groups_in_use(1)
    dist.all_reduce(torch.ones(1, device=GPU))
    peers = [peer for peer in range(dist.get_world_size()) if peer != rank]
    wide = {peer: torch.full((1000, 2), -1.0, device=GPU) for peer in peers}
    sent = torch.full((1000,), rank + 1.0, device=GPU)
    batch = [dist.P2POp(dist.isend, sent, peer) for peer in peers]
    batch += [dist.P2POp(dist.irecv, wide[peer][:, 0], peer) for peer in peers]  # with holes

    def exchange() -> None:
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    said = caught(exchange).get("text", "")
    refused = [int(number) for number in re.findall(r"rank (\d)", said)]
    assert ("messages with other ranks were exchanged" in said) == (len(refused) == 1)
    received = {peer: wide[peer][:, 0].unique().tolist() for peer in peers}
    dist.all_reduce(sent)  # the group is as usable as before
    assert sent.tolist() == [6.0] * 1000
    return refused, received


def test_messages_without_room_are_refused_on_both_ranks_and_the_others_arrive() -> None:
    """After two groups' collectives there are seats for messages of some pairs of three ranks."""
    results = run(3, exchange_with_all, env={"RINGCOMM_EMULATOR_SMS": "24"})
    pairs = {(rank, peer) for rank, (refused, _) in enumerate(results) for peer in refused}
    assert pairs == {(peer, rank) for rank, peer in pairs}, results
    assert 0 < len(pairs) < 6, results
    for rank, (_, received) in enumerate(results):
        for peer, values in received.items():
            assert values == [-1.0 if (rank, peer) in pairs else peer + 1.0], results


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
