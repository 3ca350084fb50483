"""Collectives in CUDA graphs: captured on one stream or several, replayed with other inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import (
    CUDA,
    device,
    in_gpu_ranks,
    kind,
    meet,
    module,
    on_gpus,
    on_one_gpu,
)
from test_gpu_streams import NUM_ELEMS, holds, ones

from ringcomm.torch_names import all_gather_single, reduce_scatter_single


def captured(fn: Callable[[], Any]) -> Any:
    side = module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        fn()
    module().synchronize()
    graph = module().CUDAGraph()
    with module().graph(graph):
        fn()
    return graph


@pytest.mark.slow
@in_gpu_ranks(on_gpus, fresh=True)
def test_many_replays(rank: int) -> None:
    """Inputs change from replay to replay; eager calls and another graph come in between."""
    world_size = dist.get_world_size()
    source, tensor, other = ones(), ones(), ones()
    large = torch.ones(300_007, device=device())

    def call() -> None:
        tensor.copy_(source)
        dist.all_reduce(tensor)
        dist.all_reduce(large, dist.ReduceOp.AVG)

    graph = captured(call)
    second = captured(lambda: dist.all_reduce(other, dist.ReduceOp.MAX))
    for turn in range(1000 if kind() == CUDA else 200):
        is_checked = turn % 100 == 99
        if is_checked:
            source.fill_(float(turn + rank))
            other.fill_(float(rank - turn))
        graph.replay()
        if is_checked:
            eager = ones()
            dist.all_reduce(eager)
            second.replay()
            assert holds(tensor, sum(turn + r for r in range(world_size)))
            assert holds(other, world_size - 1.0 - turn)
            assert holds(eager, world_size)
    assert large.tolist() == [1.0] * 300_007


@in_gpu_ranks(on_one_gpu)
def test_other_collectives_in_a_graph(rank: int) -> None:
    world_size = dist.get_world_size()
    own, part = ones(), ones(0.0)
    whole = torch.zeros(world_size * NUM_ELEMS, device=device())
    moved = torch.zeros_like(whole)

    def call() -> None:
        all_gather_single(whole, own)
        dist.all_to_all_single(moved, whole)
        reduce_scatter_single(part, moved)
        dist.broadcast(part, 0)

    graph = captured(call)
    for turn in range(10):
        own.fill_(rank + turn)
        graph.replay()
        expected = (torch.arange(float(world_size)) + turn).repeat_interleave(NUM_ELEMS)
        assert torch.equal(whole.cpu(), expected)
        # Part j comes to rank j from every rank: it has its own value everywhere, and sums up all.
        assert holds(part, float(sum(r + turn for r in range(world_size))))


@in_gpu_ranks(on_one_gpu)
@pytest.mark.parametrize("sizes", [(1000, 300_007), (300_007, 1000)], ids=str)
def test_calls_on_two_streams_of_a_graph(rank: int, sizes: tuple[int, int]) -> None:
    """Two calls that nothing orders but their group, on two streams of one graph; async works."""
    world_size = dist.get_world_size()
    first, second = (torch.ones(size, device=device()) for size in sizes)
    sums = [torch.zeros_like(first), torch.zeros_like(second)]
    side = module().Stream()

    def call() -> None:
        side.wait_stream(module().current_stream())
        with module().stream(side):
            work = dist.all_reduce(first, async_op=True)
        dist.all_reduce(second)
        work.wait()
        sums[0].copy_(first)
        sums[1].copy_(second)
        module().current_stream().wait_stream(side)

    graph = captured(call)
    for turn in range(8):
        first.fill_(float(turn + rank))
        second.fill_(float(2 * turn - rank))
        graph.replay()
        total = world_size * (world_size - 1) // 2
        assert sums[0].tolist() == [world_size * turn + total] * sizes[0], turn
        assert sums[1].tolist() == [2 * world_size * turn - total] * sizes[1], turn


@in_gpu_ranks(on_one_gpu, fresh=True)
def test_a_replay_meets_the_same_calls_of_another_rank(rank: int) -> None:
    """One rank replays while another calls (https://github.com/vllm-project/vllm/pull/25906)."""
    world_size = dist.get_world_size()
    tensors = [torch.zeros(size, device=device()) for size in (1000, 60_000, 3000)]

    def calls() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    graph = captured(calls)
    for turn in range(6):
        for tensor in tensors:
            tensor.fill_(float(turn + rank))
        graph.replay() if (turn + rank) % 2 == 0 else calls()
        total = float(world_size * turn + world_size * (world_size - 1) // 2)
        assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors), turn
        dist.all_reduce(torch.ones(20_000, device=device()))
        time.sleep(0.05)  # the hosts compare calls every 20 ms


@in_gpu_ranks(on_one_gpu, fresh=True)
@pytest.mark.parametrize("num_elems", [1000, 300_007])
def test_a_group_ends_after_its_replays(rank: int, num_elems: int) -> None:
    """It is destroyed as one begins (https://github.com/meta-pytorch/torchcomms/pull/4201)."""
    world_size = dist.get_world_size()
    group = dist.new_group()
    tensor = torch.zeros(num_elems, device=device())
    graph = captured(lambda: dist.all_reduce(tensor, group=group))
    tensor.fill_(float(rank))
    module().synchronize()
    meet()
    time.sleep(0.3 * rank)
    graph.replay()
    dist.destroy_process_group(group)
    assert tensor.tolist() == [world_size * (world_size - 1) / 2] * num_elems
    one = torch.ones(10, device=device())
    dist.all_reduce(one)
    assert one.tolist() == [world_size] * 10


@in_gpu_ranks(on_one_gpu, fresh=True)
def test_a_call_in_a_failed_capture_is_refused(rank: int) -> None:
    """And the group goes on (https://github.com/pie-project/pie/issues/499)."""
    tensor = ones()
    dist.all_reduce(tensor)
    graph = module().CUDAGraph()
    with pytest.raises(RuntimeError), module().graph(graph):  # noqa: PT012
        dist.all_reduce(tensor)
        with pytest.raises(RuntimeError):
            module().synchronize()  # not allowed, and fails the capture
        with pytest.raises(RuntimeError, match="the capture of this stream had failed"):
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    one = ones()
    dist.all_reduce(one)
    assert holds(one, dist.get_world_size())
