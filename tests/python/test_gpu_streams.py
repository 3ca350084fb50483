"""Streams, events, works and memory as users of NCCL know them; graphs that replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import Gpus, device, held, module, on_gpus, on_gpus_in_turns_too, on_some_gpus
from torch import Tensor

from ringcomm.torch_names import all_gather_single, reduce_scatter_single

NUM_ELEMS = 10_007
NUM_REPLAYS = 1000


def ones(value: float = 1.0) -> Tensor:
    return torch.full((NUM_ELEMS,), value, device=device())


def holds(tensor: Tensor, value: float) -> bool:
    return tensor.tolist() == [value] * NUM_ELEMS


# ---- the host goes on


def check_host_goes_on(rank: int, is_async: bool) -> None:
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


@on_gpus
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_calls_and_waits_do_not_block_the_host(gpus: Gpus, is_async: bool) -> None:
    gpus.skip_if_they_take_turns("the hosts meet in each call")
    gpus.run(check_host_goes_on, is_async)


def check_wait_orders(rank: int) -> None:
    """The work is made on one stream, waited for on another and read there."""
    world_size = dist.get_world_size()
    side = module().Stream()
    for turn in range(5):
        tensor = ones(float(turn + rank))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with module().stream(side):
            work.wait()
            result = tensor + 1
        side.synchronize()
        assert holds(result, sum(turn + r for r in range(world_size)) + 1)


@on_gpus_in_turns_too
def test_wait_orders_the_current_stream(gpus: Gpus) -> None:
    gpus.run(check_wait_orders)


def check_current_stream_comes_first(rank: int) -> None:
    """What the current stream has yet to do with the tensor is done before the collective."""
    world_size = dist.get_world_size()
    side = module().Stream()
    tensor = ones(-1.0)
    module().synchronize()
    with module().stream(side), held(side):
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, async_op=True).wait()
        event = side.record_event()
    module().current_stream().wait_event(event)
    assert holds(tensor, world_size * (world_size + 1) / 2)


@on_gpus_in_turns_too
def test_collectives_run_in_the_order_of_the_current_stream(gpus: Gpus) -> None:
    gpus.run(check_current_stream_comes_first)


# ---- memory


def check_memory(rank: int) -> None:
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


@on_gpus_in_turns_too
def test_tensors_live_as_long_as_they_are_used(gpus: Gpus) -> None:
    gpus.run(check_memory)


def check_works_are_dropped(rank: int) -> None:
    """Nobody waits for these; the device does."""
    tensors = [ones(float(turn)) for turn in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(ones())
    module().synchronize()
    world_size = dist.get_world_size()
    assert all(holds(tensor, turn * world_size) for turn, tensor in enumerate(tensors))


@on_some_gpus
def test_works_that_nobody_waits_for(gpus: Gpus) -> None:
    gpus.run(check_works_are_dropped)


# ---- several


def check_several(rank: int) -> None:
    """Two groups, each with a stream of its own, interleaved."""
    world_size = dist.get_world_size()
    groups = [dist.new_group(), dist.new_group()]
    streams = [module().Stream() for _ in groups]
    tensors = [[ones(turn + i) for turn in range(10)] for i in range(2)]
    module().synchronize()
    for turn in range(10):
        for group, stream, own in zip(groups, streams, tensors, strict=True):
            with module().stream(stream):
                dist.all_reduce(own[turn], group=group)
    module().synchronize()
    for i, own in enumerate(tensors):
        assert all(holds(tensor, (turn + i) * world_size) for turn, tensor in enumerate(own))
    for group in groups:
        dist.destroy_process_group(group)


@on_some_gpus
def test_several_streams_and_groups(gpus: Gpus) -> None:
    gpus.run(check_several, fresh=True)


def check_future(rank: int) -> None:
    work = dist.all_reduce(ones(), async_op=True)
    assert work is not None
    twice = work.get_future().then(lambda done: done.value()[0] * 2)
    assert holds(twice.wait(), 2.0 * dist.get_world_size())


@on_some_gpus
def test_futures(gpus: Gpus) -> None:
    gpus.run(check_future)


# ---- graphs


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


def check_replays(rank: int) -> None:
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
    for turn in range(NUM_REPLAYS):
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


@on_gpus
def test_a_thousand_replays(gpus: Gpus) -> None:
    gpus.skip_if_they_take_turns("there are no graphs")
    gpus.run(check_replays, fresh=True)


def check_every_operation_in_a_graph(rank: int) -> None:
    world_size = dist.get_world_size()
    own = ones(rank + 1.0)
    whole = torch.zeros(world_size * NUM_ELEMS, device=device())
    part, moved = ones(0.0), torch.zeros_like(whole)

    def call() -> None:
        all_gather_single(whole, own)
        dist.all_to_all_single(moved, whole)
        reduce_scatter_single(part, moved)
        dist.broadcast(part, 0)

    graph = captured(call)
    for turn in range(10):
        own.fill_(rank + turn)
        graph.replay()
        assert oracle.bits(whole.cpu()) == oracle.bits(
            torch.cat([torch.full((NUM_ELEMS,), float(r + turn)) for r in range(world_size)])
        )
        # Part j comes to rank j from every rank: it has its own value everywhere, and sums up all.
        assert holds(part, float(sum(r + turn for r in range(world_size))))


@on_some_gpus
def test_other_collectives_in_a_graph(gpus: Gpus) -> None:
    gpus.skip_if_they_take_turns("there are no graphs")
    gpus.run(check_every_operation_in_a_graph, fresh=True)


def check_side_by_side(rank: int) -> None:
    """Captured with async works and a second stream within the graph."""
    tensor, world_size = ones(), dist.get_world_size()
    side = module().Stream()

    def call() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        side.wait_stream(module().current_stream())
        with module().stream(side):
            work.wait()
            tensor.mul_(0.5)
        module().current_stream().wait_stream(side)

    graph = captured(call)
    for turn in range(20):
        tensor.fill_(float(turn))
        graph.replay()
        assert holds(tensor, turn * world_size * 0.5)


@on_some_gpus
def test_works_and_streams_in_a_graph(gpus: Gpus) -> None:
    gpus.skip_if_they_take_turns("there are no graphs")
    gpus.run(check_side_by_side, fresh=True)


SIZE_PAIRS = [(1000, 1000), (1000, 300_007), (300_007, 1000), (300_007, 300_007)]


def check_two_streams_in_a_graph(rank: int, sizes: tuple[int, int]) -> None:
    """Two calls of one group that nothing orders but the group, on two streams of one graph."""
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
    for turn in range(20):
        first.fill_(float(turn + rank))
        second.fill_(float(2 * turn - rank))
        graph.replay()
        total = world_size * (world_size - 1) // 2
        assert sums[0].tolist() == [world_size * turn + total] * sizes[0], turn
        assert sums[1].tolist() == [2 * world_size * turn - total] * sizes[1], turn


@on_gpus
@pytest.mark.parametrize("sizes", SIZE_PAIRS, ids=str)
def test_calls_on_two_streams_of_a_graph(gpus: Gpus, sizes: tuple[int, int]) -> None:
    gpus.skip_if_they_take_turns("there are no graphs")
    gpus.run(check_two_streams_in_a_graph, sizes, fresh=True)


def check_capture_between_eager_calls(rank: int, num_elems: int) -> None:
    """Eager on one stream, captured on another, eager there before and after a replay."""
    world_size = dist.get_world_size()
    tensors = [torch.zeros(num_elems, device=device()) for _ in range(5)]
    eager, other = module().Stream(), module().Stream()
    module().synchronize()

    def call(which: int) -> None:
        tensors[which].fill_(float(rank + which))
        dist.all_reduce(tensors[which])

    with module().stream(eager):
        call(0)
    graph = module().CUDAGraph()
    with module().graph(graph, stream=other):
        call(1)
    with module().stream(other):
        call(2)
        graph.replay()
        call(3)
    with module().stream(eager):
        call(4)
    module().synchronize()
    for which, tensor in enumerate(tensors):
        expected = float(sum(r + which for r in range(world_size)))
        assert tensor.tolist() == [expected] * num_elems, which


@on_gpus
@pytest.mark.parametrize("num_elems", [1000, 300_007])
def test_a_graph_captured_between_eager_calls(gpus: Gpus, num_elems: int) -> None:
    gpus.skip_if_they_take_turns("there are no graphs")
    gpus.run(check_capture_between_eager_calls, num_elems, fresh=True)


def refuse_a_capture(rank: int) -> str:
    tensor = ones()
    dist.all_reduce(tensor)
    with pytest.raises((RuntimeError, ValueError), match="take turns") as error:
        captured(lambda: dist.all_reduce(tensor))
    return str(error.value)


@on_gpus_in_turns_too
def test_no_capture_where_ranks_take_turns(gpus: Gpus) -> None:
    if not gpus.take_turns:
        pytest.skip("ranks run beside each other here")
    assert all("take turns" in said for said in gpus.run(refuse_a_capture, fresh=True))


# ---- messages


def check_batch(rank: int, order: str, sizes: tuple[int, ...]) -> None:
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


MIB_ELEMS = (1 << 20) // 4


@on_gpus
@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        ("sr", (MIB_ELEMS,)),
        ("rs", (MIB_ELEMS,)),
        ("ssrr", (100_003, MIB_ELEMS)),
        ("rrss", (MIB_ELEMS, 100_003)),
        ("srsr", (MIB_ELEMS, MIB_ELEMS)),
    ],
)
def test_batches_of_large_messages(gpus: Gpus, order: str, sizes: tuple[int, ...]) -> None:
    gpus.skip_if_they_take_turns("there are no sends and receives")
    gpus.run(check_batch, order, sizes, group_timeout_s=15.0)
