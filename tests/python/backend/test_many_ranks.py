"""Worlds of 5 to 8 ranks: more than the cores of most machines that run this."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ringcomm import Options


def check_everything(rank: int) -> None:
    world_size = dist.get_world_size()
    groups = [
        dist.new_group(backend="ringcomm", pg_options=Options(algorithm=algorithm))
        for algorithm in ("auto", "one_shot", "two_shot", "ring")
    ]
    # Fewer elements than ranks; one_shot's limit of 32 KB and one more; several pieces, odd.
    for num_elems in (0, 3, world_size + 1, 8192, 8193, 300_007):
        inputs = [oracle.integers(r, num_elems, torch.float32) for r in range(world_size)]
        for group in groups:
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, group=group)
            oracle.assert_equal(tensor, oracle.reduced(inputs, "sum"))
    for num_elems in (1, 40_003):
        inputs = [
            oracle.integers(r, num_elems * world_size, torch.bfloat16) for r in range(world_size)
        ]
        output = torch.empty(num_elems, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(output, inputs[rank], dist.ReduceOp.MAX)
        oracle.assert_equal(output, oracle.reduced(inputs, "max").chunk(world_size)[rank])
        gathered = torch.empty(world_size * num_elems, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(gathered, output)
        oracle.assert_equal(gathered, oracle.reduced(inputs, "max"))
        dist.broadcast(gathered, world_size - 1)
        dist.reduce(gathered, world_size - 2, dist.ReduceOp.MIN)
        oracle.assert_equal(gathered, oracle.reduced(inputs, "max"))
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [5, 6, 7, 8])
def test_collectives(world_size: int) -> None:
    run_ranks(world_size, check_everything, fresh=True)


def pass_around(rank: int) -> None:
    world_size = dist.get_world_size()
    token = torch.tensor([rank])
    for _ in range(world_size):
        received = torch.empty_like(token)
        work = dist.isend(token, (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        assert work is not None
        work.wait()
        token = received
    assert token.item() == rank


@pytest.mark.parametrize("world_size", [5, 8])
def test_around_in_a_ring(world_size: int) -> None:
    run_ranks(world_size, pass_around, fresh=True)
