"""Collectives of tensors on GPUs against exact oracles: every operation, type and reduction."""

from __future__ import annotations

import logging
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import (
    CUDA,
    Gpus,
    device,
    in_gpu_ranks,
    kind,
    module,
    on_all_gpus,
    on_each_kind,
    on_gpu,
    on_gpus,
)
from sequence_calls import COLLECTIVES, REDUCTIONS
from sequence_side import Call
from sequences import run_calls
from test_collectives import covering_calls
from torch import Tensor

# Nothing; less than a rank each; a vector and a bit; two shots; pieces, not divided by any ranks.
SIZES = [0, 1, 67, 30_011, 400_009]
COVERED = [*(kind for kind in COLLECTIVES if kind != "barrier"), "coalesced"]


def inputs_of(num_elems: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [oracle.integers(r, num_elems, dtype) for r in range(dist.get_world_size())]


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.device.type != "cpu"
    oracle.assert_equal(actual.cpu(), expected)


def transport() -> str:
    """What the device tensors of a new group go by, as the log says."""
    lines: list[str] = []
    logger, handler = logging.getLogger("ringcomm"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    group = dist.new_group()
    dist.all_reduce(on_gpu(torch.ones(4)), group=group)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    dist.destroy_process_group(group)
    (said,) = (line.partition(" go by ")[2] for line in lines if " go by " in line)
    return said.partition("; not by ")[0]


def is_in_nccl(call: Call) -> bool:
    types, bitwise = ("int16", "uint16", "uint32", "uint64"), ("band", "bor", "bxor")
    return call.kind not in REDUCTIONS or (call.dtype not in types and call.op not in bitwise)


def check_every_operation(stride: int) -> None:
    """Every `stride`-th of the calls that cover operations, types and sizes."""
    over_messages = transport().startswith("messages")
    for name in COVERED:
        calls = [c for c in covering_calls(name) if not over_messages or is_in_nccl(c)]
        assert run_calls(calls[::stride], device()) == []


@in_gpu_ranks(on_each_kind)
def test_every_operation_and_type(rank: int) -> None:
    check_every_operation(1 if kind() == CUDA else 5)


@in_gpu_ranks(on_all_gpus)
def test_any_place(rank: int) -> None:
    """Vectors that begin anywhere."""
    for offset in range(1, 9):
        inputs = inputs_of(5000 + offset, torch.bfloat16)
        tensor = on_gpu(inputs[rank])
        dist.all_reduce(tensor[offset:])
        expected = oracle.total(inputs)
        expected[:offset] = inputs[rank][:offset]
        same(tensor, expected)


def float_bits(rank: int) -> list[bytes]:
    found = []
    for num_elems in SIZES[1:]:
        tensors = [on_gpu(oracle.floats(rank, num_elems, torch.float32)) for _ in range(2)]
        for tensor in tensors:
            dist.all_reduce(tensor)
        found.append(oracle.bits(tensors[0].cpu()))
        assert oracle.bits(tensors[1].cpu()) == found[-1]
    return found


@on_all_gpus
def test_rounded_sums_have_the_same_bits_on_all_ranks_each_time(gpus: Gpus) -> None:
    results = gpus.run(float_bits)
    assert all(found == results[0] for found in results)


def send_and_receive(rank: int, num_elems: int) -> None:
    world_size = dist.get_world_size()
    inputs = inputs_of(num_elems)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    result, own = on_gpu(torch.zeros(num_elems)), on_gpu(inputs[rank])
    pair = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, result, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    same(result, inputs[before])
    if rank < 2:
        dist.send(own, 1) if rank == 0 else dist.recv(result, 0)
        same(result, inputs[0] if rank == 1 else inputs[before])


def check_operators(rank: int, num_elems: int) -> None:
    dist.barrier()
    assert (
        run_calls([Call("operators", size=num_elems), Call("all_reduce", size=num_elems)], device())
        == []
    )
    inputs = inputs_of(num_elems)
    tensor = on_gpu(inputs[rank])
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    torch.ops.ringcomm.ring_all_reduce_(tensor, name)
    dist.barrier()
    same(tensor, oracle.total(inputs))


@on_each_kind
def test_messages_barrier_and_operators(gpus: Gpus) -> None:
    for num_elems in SIZES:
        gpus.run(check_operators, num_elems)
        gpus.run(send_and_receive, num_elems)


@in_gpu_ranks(on_gpus)
def test_one_group_takes_tensors_of_the_host_too(rank: int) -> None:
    """In turn and with one in flight beside the other."""
    on_host, elsewhere = torch.ones(1000), on_gpu(torch.ones(1000))
    for _ in range(3):
        work: Any = dist.all_reduce(elsewhere, async_op=True)
        dist.all_reduce(on_host)
        work.wait()
    expected = [float(dist.get_world_size() ** 3)] * 1000
    assert on_host.tolist() == elsewhere.tolist() == expected


@in_gpu_ranks(on_all_gpus)
def test_memory_that_a_rank_frees_and_gets_again(rank: int) -> None:
    """While the other ranks have it mapped: by another tensor, and from the driver."""
    world_size, num_elems = dist.get_world_size(), 1 << 20
    values = torch.arange(num_elems, dtype=torch.int32) % 1001
    for turn in range(6):
        tensor = on_gpu(values + turn + rank)
        for i in range(3):
            dist.all_reduce(tensor)
            expected = (values + turn) * world_size + world_size * (world_size - 1) // 2
            assert torch.equal(tensor.cpu(), expected), (turn, i)
            tensor.copy_(values + turn + rank)
        del tensor
        if rank == turn // 2 % world_size or turn > 4:
            module().synchronize()
            module().empty_cache()
        if rank == 0:
            torch.full((num_elems,), -1, dtype=torch.int32, device=device())


def spoilt(rank: int) -> None:
    inputs = inputs_of(30_011)
    tensor = on_gpu(inputs[rank])
    dist.all_reduce(tensor)
    if rank == 1:
        tensor[29_999] += 1
    same(tensor, oracle.total(inputs))


@on_gpus
def test_one_wrong_element_is_seen(gpus: Gpus) -> None:
    with pytest.raises(AssertionError, match=r"1 of 30011 elements differ, the first at \[\[29999"):
        gpus.run(spoilt, fresh=True)
