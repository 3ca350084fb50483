"""Collectives of tensors on GPUs against exact oracles: every operation, type and reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import Gpus, on_gpu, on_gpus
from test_collectives import OPS
from torch import Tensor

from ringcomm import ops
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

# Nothing; less than a rank each; a vector and a bit; two shots; pieces, not divided by any ranks.
SIZES = [0, 1, 67, 30_011, 400_009]


def inputs_of(num_elems: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [oracle.integers(r, num_elems, dtype, seed) for r in range(dist.get_world_size())]


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.device.type != "cpu"
    oracle.assert_equal(actual.cpu(), expected)


# ---- all_reduce


def check_types(rank: int, op: str) -> None:
    dtypes = oracle.INTS if op in oracle.BIT_OPS else oracle.FLOATS + oracle.INTS
    for dtype in [*dtypes, *([] if op == "avg" else [torch.bool])]:
        inputs = inputs_of(1003, dtype)
        tensor = on_gpu(inputs[rank])
        dist.all_reduce(tensor, OPS[op])
        same(tensor, oracle.reduced(inputs, op))


@on_gpus
@pytest.mark.parametrize("op", [*oracle.NUMBER_OPS, *oracle.BIT_OPS])
def test_types_and_reductions(gpus: Gpus, op: str) -> None:
    gpus.run(check_types, op)


def check_sizes(rank: int, dtype: torch.dtype) -> None:
    for num_elems in SIZES:
        for turn in range(2):
            inputs = inputs_of(num_elems, dtype, turn)
            tensor = on_gpu(inputs[rank])
            dist.all_reduce(tensor)
            same(tensor, oracle.reduced(inputs, "sum"))


@on_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_sizes(gpus: Gpus, dtype: torch.dtype) -> None:
    gpus.run(check_sizes, dtype)


def check_places(rank: int) -> None:
    """Vectors that begin anywhere, and tensors with holes."""
    for offset in range(1, 9):
        inputs = inputs_of(5000 + offset, torch.bfloat16)
        tensor = on_gpu(inputs[rank])
        dist.all_reduce(tensor[offset:])
        expected = oracle.reduced(inputs, "sum")
        expected[:offset] = inputs[rank][:offset]
        same(tensor, expected)
    inputs = [value.reshape(60, 50) for value in inputs_of(3000)]
    columns = on_gpu(inputs[rank]).t()
    dist.all_reduce(columns)
    same(columns.t().contiguous(), oracle.reduced(inputs, "sum"))


@on_gpus
def test_any_place_and_layout(gpus: Gpus) -> None:
    gpus.run(check_places)


def float_bits(rank: int) -> list[bytes]:
    found = []
    for num_elems in SIZES[1:]:
        tensor = on_gpu(oracle.floats(rank, num_elems, torch.float32))
        dist.all_reduce(tensor)
        again = on_gpu(oracle.floats(rank, num_elems, torch.float32))
        dist.all_reduce(again)
        assert oracle.bits(tensor.cpu()) == oracle.bits(again.cpu())
        found.append(oracle.bits(tensor.cpu()))
    return found


@on_gpus
def test_rounded_sums_have_the_same_bits_on_all_ranks_each_time(gpus: Gpus) -> None:
    results = gpus.run(float_bits)
    assert all(found == results[0] for found in results)


def check_premul(rank: int) -> None:
    inputs = inputs_of(1003)
    tensor = on_gpu(inputs[rank])
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same(tensor, oracle.reduced(inputs, "sum") * 0.5)


@on_gpus
def test_premul_sum(gpus: Gpus) -> None:
    gpus.run(check_premul)


# ---- the others


def broadcast(rank: int, num_elems: int) -> None:
    for root in range(dist.get_world_size()):
        inputs = inputs_of(num_elems, seed=root)
        tensor = on_gpu(inputs[rank])
        dist.broadcast(tensor, root)
        same(tensor, inputs[root])


def reduce(rank: int, num_elems: int) -> None:
    for root in range(dist.get_world_size()):
        inputs = inputs_of(num_elems, seed=root)
        tensor = on_gpu(inputs[rank])
        dist.reduce(tensor, root)
        if rank == root:
            same(tensor, oracle.reduced(inputs, "sum"))


def all_gather(rank: int, num_elems: int) -> None:
    inputs = inputs_of(num_elems)
    own = on_gpu(inputs[rank])
    gathered = own.new_empty(len(inputs) * num_elems)
    all_gather_single(gathered, own)
    same(gathered, torch.cat(inputs))
    parts = [torch.empty_like(own) for _ in inputs]
    dist.all_gather(parts, own)
    for part, expected in zip(parts, inputs, strict=True):
        same(part, expected)


def reduce_scatter(rank: int, num_elems: int) -> None:
    world_size = dist.get_world_size()
    inputs = inputs_of(world_size * num_elems)
    expected = oracle.reduced(inputs, "sum")[rank * num_elems : (rank + 1) * num_elems]
    own = on_gpu(inputs[rank])
    part = own.new_empty(num_elems)
    reduce_scatter_single(part, own)
    same(part, expected)
    part.zero_()
    dist.reduce_scatter(part, [piece.clone() for piece in own.split(num_elems or 1)][:world_size])
    same(part, expected)


def all_to_all(rank: int, num_elems: int) -> None:
    world_size = dist.get_world_size()
    inputs = inputs_of(world_size * num_elems)
    own = on_gpu(inputs[rank])
    result = torch.empty_like(own)
    dist.all_to_all_single(result, own)
    same(result, torch.cat([x[rank * num_elems : (rank + 1) * num_elems] for x in inputs]))


def uneven_all_to_all(rank: int, num_elems: int) -> None:
    """Rank i sends i + j + num_elems elements to rank j."""
    world_size = dist.get_world_size()
    counts = [[i + j + num_elems for j in range(world_size)] for i in range(world_size)]
    inputs = [oracle.integers(i, sum(counts[i]), torch.float32) for i in range(world_size)]
    arrives = [counts[i][rank] for i in range(world_size)]
    result = on_gpu(torch.empty(sum(arrives)))
    dist.all_to_all_single(result, on_gpu(inputs[rank]), arrives, counts[rank])
    same(result, torch.cat([inputs[i].split(counts[i])[rank] for i in range(world_size)]))


def gather_and_scatter(rank: int, num_elems: int) -> None:
    inputs = inputs_of(num_elems)
    own = on_gpu(inputs[rank])
    parts = [torch.empty_like(own) for _ in inputs] if rank == 1 else None
    dist.gather(own, parts, 1)
    for part, expected in zip(parts or [], inputs, strict=bool(parts)):
        same(part, expected)
    result = torch.empty_like(own)
    dist.scatter(result, [on_gpu(x) for x in inputs] if rank == 1 else None, 1)
    same(result, inputs[rank])


def send_and_receive(rank: int, num_elems: int) -> None:
    world_size = dist.get_world_size()
    inputs = inputs_of(num_elems)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    result = on_gpu(torch.zeros(num_elems))
    own = on_gpu(inputs[rank])
    pair = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, result, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    same(result, inputs[before])
    if rank < 2:
        dist.send(own, 1) if rank == 0 else dist.recv(result, 0)
        same(result, inputs[0] if rank == 1 else inputs[before])


def coalesced(rank: int, num_elems: int) -> None:
    inputs = [inputs_of(num_elems + extra) for extra in range(3)]
    tensors = [on_gpu(per_rank[rank]) for per_rank in inputs]
    with dist._coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, per_rank in zip(tensors, inputs, strict=True):
        same(tensor, oracle.reduced(per_rank, "sum"))


def barrier(rank: int, num_elems: int) -> None:
    dist.barrier()
    tensor = on_gpu(torch.ones(num_elems))
    dist.all_reduce(tensor)
    dist.barrier()
    assert tensor.tolist() == [dist.get_world_size()] * num_elems


def own_operators(rank: int, num_elems: int) -> None:
    inputs = inputs_of(num_elems)
    expected = oracle.reduced(inputs, "sum")
    same(ops.all_reduce(on_gpu(inputs[rank])), expected)
    tensor = on_gpu(inputs[rank])
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    torch.ops.ringcomm.ring_all_reduce_(tensor, name, 2, 0)
    same(tensor, expected)


OTHERS: list[Callable[[int, int], Any]] = [
    *(broadcast, reduce, all_gather, reduce_scatter, all_to_all, uneven_all_to_all),
    *(gather_and_scatter, send_and_receive, coalesced, barrier, own_operators),
]


def check_sizes_of(rank: int, number: int) -> None:
    for num_elems in SIZES[1:]:
        OTHERS[number](rank, num_elems)


@on_gpus
@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[fn.__name__ for fn in OTHERS])
def test_collective(gpus: Gpus, number: int) -> None:
    gpus.run(check_sizes_of, number)


def check_of_host_and_gpu(rank: int) -> None:
    """One group takes both, in turn and with one in flight beside the other."""
    on_host, elsewhere = torch.ones(1000), on_gpu(torch.ones(1000))
    for _ in range(3):
        work = dist.all_reduce(elsewhere, async_op=True)
        dist.all_reduce(on_host)
        assert work is not None
        work.wait()
    expected = [float(dist.get_world_size() ** 3)] * 1000
    assert on_host.tolist() == elsewhere.tolist() == expected


@on_gpus
def test_one_group_takes_tensors_of_the_host_too(gpus: Gpus) -> None:
    gpus.run(check_of_host_and_gpu)


# ---- a negative control


def spoilt(rank: int) -> None:
    inputs = inputs_of(30_011)
    tensor = on_gpu(inputs[rank])
    dist.all_reduce(tensor)
    if rank == 1:
        tensor[29_999] += 1
    same(tensor, oracle.reduced(inputs, "sum"))


@on_gpus
def test_one_wrong_element_is_seen(gpus: Gpus) -> None:
    with pytest.raises(AssertionError, match=r"1 of 30011 elements differ, the first at \[\[29999"):
        gpus.run(spoilt, fresh=True)
