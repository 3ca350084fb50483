"""Every operation with every type and reduction over each carrier, and what is special of tensors.

A table covers operations, types and reductions with sizes at which paths change, groups, layouts
and roots. Its calls and their model are in sequence_calls.py and sequence_side.py; combinations of
more are drawn in test_random_sequences.py.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import OPS
from ranks import in_ranks, run_ranks
from sequence_calls import KINDS, REDUCTIONS
from sequence_side import MOVED, REDUCED, Call, ops_of
from sequences import FAMILY, POOLS, WAIT_S, WORLD, Case, run_cases
from torch import Tensor

import ringcomm
from ringcomm import Options

MIB = 1 << 20
SMALL = (0, 1, 3, 4, 5, 67)
# Where paths change: an envelope of messages, direct paths, one_shot, a slot of a link, a piece.
EDGES = (4 << 10, 8 << 10, 48 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10)
LARGE_BYTES, LARGEST = 1_200_001, 700_001  # several pieces and slices, odd; elements
CALLS_OF_A_CASE = 30

serials = itertools.count(1, 100)


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a number for each rank, for barriers."""
    path = tmp_path_factory.mktemp("collectives") / "marks"
    np.zeros(WORLD, np.int64).tofile(path)
    return str(path)


def check_calls(pool: str, calls: list[Call], marks: str) -> None:
    cases = [
        Case(tuple(calls[i : i + CALLS_OF_A_CASE]), pool=pool)
        for i in range(0, len(calls), CALLS_OF_A_CASE)
    ]
    options: dict[str, Any] = {"env": POOLS[pool], "group_timeout_s": WAIT_S}
    assert run_ranks(WORLD, run_cases, cases, next(serials), marks, **options) == [[]] * WORLD


def covering_calls(kind: str) -> list[Call]:
    """Each type with each reduction, in small and at an edge; every eighth also in large."""
    calls = []
    pairs = [
        (dtype, op)
        for dtype in (REDUCED if kind in REDUCTIONS else MOVED)
        for op in (ops_of(dtype) if kind in REDUCTIONS else ("sum",))
    ]
    for number, (dtype, op) in enumerate(pairs):
        itemsize = getattr(torch, dtype).itemsize
        sizes = [SMALL[number % 6], EDGES[number % 7] // itemsize + number % 3 - 1]
        sizes += [min(LARGE_BYTES // itemsize, LARGEST)] * (number % 8 == 0)
        for turn, size in enumerate(sizes):
            draw = random.Random(f"{kind} {number} {turn}")
            uneven, variety = draw.choice([0, draw.randint(1, 99)]), draw.randint(0, 99)
            group, wait = (number * 5 + turn) % len(FAMILY), draw.choice([0, 0, 2])
            calls.append(
                Call(kind, group, dtype, op, size, uneven, draw.randint(0, 3), wait, variety)
            )
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", POOLS)
def test_every_operation_and_type(pool: str, kind: str, marks: str) -> None:
    check_calls(pool, covering_calls(kind), marks)


@pytest.mark.parametrize("pool", POOLS)
def test_sizes_at_which_all_reduce_changes_its_path(pool: str, marks: str) -> None:
    """In each group: chunks of one element; one_shot, a piece and a slot, and one more."""
    calls = []
    for group, (members, options) in enumerate(FAMILY):
        n = len(members)
        limit = (256 if n == 2 else 48) << 8  # elements of fp32 up to which auto takes one_shot
        sizes = [n - 1, n, n + 1, limit, limit + 1, MIB // 4, MIB // 4 + 1, n * (64 << 10) + 1]
        if pool != "shm":
            sizes = sizes[:5]  # the others are slices of messages, some 1,000 a second
        calls += [Call("all_reduce", group, size=size) for size in sizes]
        if pool == "shm" and "slot_bytes" not in options:
            calls.append(Call("all_reduce", group, size=777_777))
    check_calls(pool, calls, marks)


# ---- other worlds


def check_world(rank: int) -> None:
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
    token = torch.tensor([rank])
    for _ in range(world_size):
        received = torch.empty_like(token)
        work = dist.isend(token, (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        assert work is not None
        work.wait()
        token = received
    assert token.item() == rank


# Each letter is the host of its rank.
@pytest.mark.parametrize("hosts", ["aaaaa", "aaaaaaaa", "abab", "abbccc", "p2p"])
def test_worlds_and_placements(hosts: str) -> None:
    if hosts == "p2p":
        run_ranks(5, check_world, fresh=True, env={"RINGCOMM_TRANSPORT": "p2p"})
        return
    env = [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in hosts]
    run_ranks(len(hosts), check_world, fresh=True, env=env)


@in_ranks(1)
def test_world_of_one(rank: int) -> None:
    value = torch.arange(6.0)
    for is_async in (False, True):
        for op in ("sum", "avg", "product", "min", "max"):
            tensor = value.clone()
            work = dist.all_reduce(tensor, OPS[op], async_op=is_async)
            assert work is None or work.wait()
            oracle.assert_equal(tensor, value)
    output = torch.zeros(6)
    outputs = [output]
    for call in (
        lambda: dist.all_gather(outputs, value),
        lambda: dist.reduce_scatter_tensor(output, value),
        lambda: dist.gather(value, outputs, 0),
        lambda: dist.scatter(output, [value], 0),
        lambda: dist.all_to_all(outputs, [value]),
        lambda: dist.all_to_all_single(output, value),
    ):
        output.zero_()
        call()
        oracle.assert_equal(output, value)
    dist.broadcast(output, 0)
    dist.reduce(output, 0)
    dist.barrier()
    dist.all_reduce(torch.zeros(0))
    oracle.assert_equal(output, value)


# ---- values


def random_bits(rank: int, algorithm: str) -> list[bytes]:
    options: Any = Options(algorithm=algorithm)  # type: ignore[arg-type]
    group = dist.new_group(backend="ringcomm", pg_options=options)
    world_size, found = dist.get_world_size(), []
    for dtype, num_elems in itertools.product(oracle.FLOATS, (1001, 150_001)):
        tensor = oracle.floats(rank, num_elems, dtype)
        dist.all_reduce(tensor, group=group)
        inputs = [oracle.floats(r, num_elems, dtype).double() for r in range(world_size)]
        # Rounded at most once per addition, to half a unit in the last place of at most 2^3.
        bound = world_size * 8 * torch.finfo(dtype).eps
        assert (tensor.double() - torch.stack(inputs).sum(0)).abs().max().item() <= bound
        found.append(oracle.bits(tensor))
    return found


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_all_ranks_get_the_same_bits(algorithm: str) -> None:
    results = run_ranks(3, random_bits, algorithm)
    assert all(found == results[0] for found in results)


@in_ranks(2)
def test_nan_of_any_rank_arrives_and_complex_numbers_are_summed(rank: int) -> None:
    for dtype, holder, op in itertools.product(oracle.FLOATS, range(2), ("min", "max", "sum")):
        tensor = torch.full((40,), float(rank + 1), dtype=dtype)
        if rank == holder:
            tensor[::3] = float("nan")
        dist.all_reduce(tensor, OPS[op])
        assert tensor[::3].isnan().all()
        assert not tensor[1::3].isnan().any()
    for op, dtype in itertools.product(("sum", "avg"), (torch.complex64, torch.complex128)):
        inputs = [
            torch.complex(*(oracle.integers(r, 50, torch.float64, s) for s in (1, 2))).to(dtype)
            for r in range(2)
        ]
        expected = oracle.reduced(inputs, op)
        strided = torch.stack([inputs[rank]] * 2, dim=1)[:, 0]
        dist.all_reduce(strided, OPS[op])
        oracle.assert_equal(strided, expected)
        for output in (torch.empty(25, dtype=dtype), torch.empty(50 * rank, dtype=dtype)):
            sizes = [25, 25] if len(output) == 25 else [0, 50]
            dist.reduce_scatter(output, list(inputs[rank].split(sizes)), OPS[op])
            oracle.assert_equal(output, expected.split(sizes)[rank])


@in_ranks(2)
def test_premul_sum(rank: int) -> None:
    """The product is rounded in the tensor's type; factors may be tensors, and of complex ones."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = [oracle.floats(r, 501, dtype) for r in range(2)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(1 / 3))
        products = [value * (1 / 3) for value in inputs]
        oracle.assert_equal(tensor, (products[0].float() + products[1].float()).to(dtype))
    for factor in (0.25, torch.tensor([0.25], dtype=torch.float64)):
        scaled = torch.full((6,), 4 + 8j)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(factor))
        assert (scaled == 2 + 4j).all()
    refused: list[tuple[torch.dtype, Any, str]] = [
        (torch.int32, 0.5, "whole number"),
        (torch.int64, float("nan"), "whole number"),
        (torch.int64, 2.0**63, "whole number"),
        (torch.bool, 2.0, "no meaning for Bool"),
        (torch.float8_e5m2, 2.0, "cannot reduce Float8_e5m2"),
        (torch.float32, torch.tensor([1j]), "real factor"),
    ]
    for dtype, factor, words in refused:
        with pytest.raises(TypeError, match=words):
            dist.all_reduce(torch.zeros(4, dtype=dtype), dist._make_nccl_premul_sum(factor))
    dist.barrier()


# ---- tensors


@in_ranks(2)
def test_parameters_and_views(rank: int) -> None:
    """Parameters of any layout, negative views (their memory holds other numbers), inference mode.

    (Conjugates themselves are refused by torch.distributed.)
    """
    for is_async in (False, True):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            weight = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=memory_format)
            parameter = torch.nn.Parameter(weight)
            work = dist.broadcast(parameter, 1, async_op=is_async)
            assert work is None or work.wait()
            assert (parameter == 1).all()
            assert parameter.is_leaf
            assert parameter.stride() == weight.stride()
        with torch.inference_mode():
            tensor = torch.ones(4, 6).t()
            work = dist.all_reduce(tensor, async_op=is_async)
            assert work is None or work.wait()
            assert (tensor == 2).all()

    def view() -> Tensor:
        return torch.tensor([1 + 2j, 3 - 1j]).conj().imag

    value = torch.tensor([-2.0, 1.0])
    for tensor in ((view() if rank == 1 else torch.zeros(2)), value.clone() if rank else view()):
        dist.broadcast(tensor, 1)
        oracle.assert_equal(tensor.resolve_neg(), value)
    tensor, received = view(), view()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    oracle.assert_equal(tensor.resolve_neg(), value)
    batch = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for each in dist.batch_isend_irecv(batch):
        each.wait()
    oracle.assert_equal(received.resolve_neg(), value)


@in_ranks(2)
def test_coalesced_blocks(rank: int) -> None:
    """The work of a block: done when all are, with all results; an exception leaves no block."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="without startCoalescing"):
        backend._end_coalescing()
    tensors = [torch.full((n,), rank + 1.0) for n in (2, 70_000)]
    backend._start_coalescing()
    dist.broadcast(tensors[0], 1, async_op=True)
    dist.reduce(tensors[1], 0, async_op=True)
    work = backend._end_coalescing()
    future = work.get_future()
    future.wait()
    assert work.is_completed()
    assert work.is_success()
    assert len(future.value()) == 2
    for result, value in zip(work.result(), (2.0, 3.0 if rank == 0 else 2.0), strict=True):
        assert (result == value).all()
    backend._start_coalescing()
    dist.barrier()
    backend._start_coalescing()
    assert backend._end_coalescing().result() == []
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        received = torch.zeros(1000)
        dist.isend(torch.full((1000,), float(rank)), 1 - rank)
        dist.irecv(received, 1 - rank)
    manager.wait()
    assert (received == 1 - rank).all()
    values = [torch.full((3,), float(rank)), torch.full((2, 2), rank + 10.0)]
    lists = [[torch.empty_like(value) for value in values] for _ in range(2)]
    dist.all_gather_coalesced(lists, values)
    assert [[part.max().item() for part in of_rank] for of_rank in lists] == [[0, 10], [1, 11]]
    with pytest.raises(ValueError, match="all_gather_coalesced"):
        dist.all_gather_coalesced(lists[1:], values)


# ---- environment


def reduce_all_types(rank: int) -> str:
    for dtype in oracle.FLOATS + oracle.INTS:
        for op in ("sum", "product", "max", "avg"):
            inputs = [oracle.integers(r, 1003, dtype) for r in range(2)]
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, OPS[op])
            oracle.assert_equal(tensor, oracle.reduced(inputs, op))
    return str(ringcomm._C.simd_level())


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_instruction_sets(level: str) -> None:
    flag = {"baseline": "", "avx2": " avx2 ", "avx512": " avx512bw "}[level]
    if flag not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {level}")
    assert run_ranks(2, reduce_all_types, fresh=True, env={"RINGCOMM_SIMD": level}) == [level] * 2
