"""Collectives of tensors on GPUs against exact oracles: every operation, type and reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import Gpus, device, module, on_all_gpus, on_gpu, on_gpus
from sequence_calls import COLLECTIVES, KINDS
from sequence_side import Side
from test_collectives import covering_calls
from torch import Tensor

from ringcomm import ops

# Nothing; less than a rank each; a vector and a bit; two shots; pieces, not divided by any ranks.
SIZES = [0, 1, 67, 30_011, 400_009]
COVERED = [*(kind for kind in COLLECTIVES if kind != "barrier"), "coalesced"]


def inputs_of(num_elems: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [oracle.integers(r, num_elems, dtype, seed) for r in range(dist.get_world_size())]


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.device.type != "cpu"
    oracle.assert_equal(actual.cpu(), expected)


# ---- every operation, type and reduction


def check_kind(rank: int, kind: str, stride: int = 1) -> None:
    """Every `stride`-th of the calls that cover operations, types and sizes."""
    members = range(dist.get_world_size())
    for number, call in enumerate(covering_calls(kind)[::stride]):
        side = Side(call, number, rank, members, None, None, device=device())
        works = KINDS[kind](side)
        for work in works if isinstance(works, list) else [works]:
            assert work is None or work.wait() is not False
        module().synchronize()
        assert side.wrong() == [], call


@on_all_gpus
@pytest.mark.parametrize("kind", COVERED)
def test_every_operation_and_type(gpus: Gpus, kind: str) -> None:
    gpus.run(check_kind, kind, 1 if kind == "all_reduce" else 3)


def check_places(rank: int) -> None:
    """Vectors that begin anywhere, and large ones; factors of PREMUL_SUM."""
    for offset in range(1, 9):
        inputs = inputs_of(5000 + offset, torch.bfloat16)
        tensor = on_gpu(inputs[rank])
        dist.all_reduce(tensor[offset:])
        expected = oracle.reduced(inputs, "sum")
        expected[:offset] = inputs[rank][:offset]
        same(tensor, expected)
    for num_elems in SIZES:
        inputs = inputs_of(num_elems)
        tensor = on_gpu(inputs[rank])
        dist.all_reduce(tensor)
        same(tensor, oracle.reduced(inputs, "sum"))
    scaled = torch.ones(1003, dtype=torch.complex64, device=device())
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert (scaled.cpu() == 0.5 * dist.get_world_size()).all()


@on_all_gpus
def test_any_place_and_size(gpus: Gpus) -> None:
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


@on_all_gpus
def test_rounded_sums_have_the_same_bits_on_all_ranks_each_time(gpus: Gpus) -> None:
    results = gpus.run(float_bits)
    assert all(found == results[0] for found in results)


# ---- the others


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


OTHERS: list[Callable[[int, int], Any]] = [send_and_receive, barrier, own_operators]


def check_sizes_of(rank: int, number: int) -> None:
    for num_elems in SIZES[1:]:
        OTHERS[number](rank, num_elems)


@on_all_gpus
@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[fn.__name__ for fn in OTHERS])
def test_collective(gpus: Gpus, number: int) -> None:
    if OTHERS[number] is send_and_receive:
        gpus.skip_if_they_take_turns("there are no sends and receives")
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
