"""Every operation with every type and reduction over each transport; what is special of tensors.

A table covers operations, types and reductions with sizes at which paths change, groups, layouts
and roots. Its calls and their model are in sequence_calls.py and sequence_side.py; combinations of
more are drawn in test_random_sequences.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import quick
from oracle import OPS
from ranks import in_ranks, run_ranks
from sequence_calls import COLLECTIVES, KINDS, REDUCTIONS
from sequence_side import MOVED, REDUCED, Call, ops_of
from sequences import FAMILY, POOLS, WAIT_S, WORLD, Case, make_marks, run_calls, run_cases
from test_errors import ENVS
from torch import Tensor

import ringcomm
from ringcomm import Options

SMALL = (0, 1, 3, 4, 5, 67)
# Where paths change: an envelope of messages, direct paths, one_shot, a slot of a link, a piece.
EDGES = (4 << 10, 8 << 10, 48 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10)
LARGE_BYTES, LARGEST = 1_200_001, 700_001  # several pieces and slices, odd; elements
CALLS_OF_A_CASE = 30

serials = itertools.count(1, 100)


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_marks(tmp_path_factory.mktemp("collectives") / "marks")


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
    """All of them in shared memory; over messages a share, for reductions are the same code."""
    stride = 1 if pool == "shm" or kind not in REDUCTIONS else 4
    check_calls(pool, covering_calls(kind)[list(POOLS).index(pool) :: stride], marks)


# ---- other worlds


# Each letter is the host of its rank; with - all goes over messages.
PLACES = ("a", "aaaaa", "aaaaaaaa", "abab", "abbccc", "-----")


@in_ranks(fresh=True)
@pytest.mark.parametrize("env", quick(PLACES, "a", "aaaaaaaa", "abbccc"))
def test_worlds_and_placements(rank: int, env: str) -> None:
    """Some of the calls that cover all on the default group; all_reduce by each algorithm."""
    kinds = list(COLLECTIVES if len(env) == 1 else KINDS)
    kinds.remove("barrier")
    calls = [call for kind in kinds for call in covering_calls(kind)[:: 12 if len(env) < 6 else 25]]
    # As many elements as the model has for eight ranks.
    wrong = run_calls([replace(call, size=min(call.size, 300_007)) for call in calls])
    for algorithm in ("one_shot", "two_shot", "ring"):
        group = group_with(algorithm, None)
        sizes = (0, 3, len(env) + 1, 8192, 8193, 300_007)
        wrong += run_calls([Call("all_reduce", size=size) for size in sizes], group=group)
    assert wrong == []


def at_level(rank: int) -> str:
    assert run_calls(covering_calls("all_reduce")) == []
    return str(ringcomm._C.simd_level())


def test_instruction_sets() -> None:
    """A rank of each that this processor has; all of them share their sums."""
    found = Path("/proc/cpuinfo").read_text()
    flags = {"baseline": "", "avx2": " avx2 ", "avx512": " avx512bw "}
    levels = [level for level, flag in flags.items() if flag in found]
    env = [{"RINGCOMM_SIMD": level} for level in levels]
    assert run_ranks(len(levels), at_level, env=env) == levels


# ---- values


@in_ranks(2)
def test_nan_of_any_rank_arrives(rank: int) -> None:
    for dtype, holder, op in itertools.product(oracle.FLOATS, range(2), ("min", "max", "sum")):
        tensor = torch.full((40,), float(rank + 1), dtype=dtype)
        if rank == holder:
            tensor[::3] = float("nan")
        dist.all_reduce(tensor, OPS[op])
        assert tensor[::3].isnan().all()
        assert not tensor[1::3].isnan().any()


@in_ranks(2)
def test_premul_sum(rank: int) -> None:
    """The product is rounded in the tensor's type; factors may be tensors."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = [oracle.floats(r, 501, dtype) for r in range(2)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(1 / 3))
        products = [value * (1 / 3) for value in inputs]
        oracle.assert_equal(tensor, (products[0].float() + products[1].float()).to(dtype))
    scaled = torch.full((6,), 4.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor([0.25], dtype=torch.float64)))
    assert (scaled == 2).all()
    refused: list[tuple[torch.dtype, Any, str]] = [
        (torch.int32, 0.5, "whole number"),
        (torch.int64, float("nan"), "whole number"),
        (torch.int64, 2.0**63, "whole number"),
        (torch.bool, 2.0, "not defined for Bool"),
        (torch.float8_e5m2, 2.0, "cannot reduce Float8_e5m2"),
        (torch.float32, torch.tensor([1j]), "real factor"),
    ]
    for dtype, factor, words in refused:
        with pytest.raises(TypeError, match=words):
            dist.all_reduce(torch.zeros(4, dtype=dtype), dist._make_nccl_premul_sum(factor))
    dist.barrier()


# ---- deterministic="rank_order": every reduction is the left-to-right one, to the last bit


@cache
def group_with(algorithm: Any, deterministic: Any = "rank_order") -> Any:
    options = Options(algorithm=algorithm, deterministic=deterministic)
    return dist.new_group(backend="ringcomm", pg_options=options)


@in_ranks(3, ENVS)
def test_order(rank: int) -> None:
    """Rounded once. Sizes: nothing; fewer than ranks; many; several slots of the ring."""
    calls = [("auto", op) for op in oracle.NUMBER_OPS]
    calls += [(algorithm, "sum") for algorithm in ("one_shot", "two_shot", "ring")]
    for (algorithm, op), dtype in itertools.product(calls, (torch.float32, torch.bfloat16)):
        group, reduce_op = group_with(algorithm), oracle.OPS[op]
        for num_elems in (0, 1, 2, 129, 5003, *([300_007] if algorithm == "ring" else [])):
            inputs = [oracle.floats(r, num_elems, dtype) for r in range(3)]
            expected = oracle.left_to_right(inputs, op)
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, reduce_op, group=group)
            oracle.assert_equal(tensor, expected)
            if algorithm != "auto":
                continue
            tensor = inputs[rank].clone()
            dist.reduce(tensor, 0, reduce_op, group=group)
            oracle.assert_equal(tensor, expected if rank == 0 else inputs[rank])
            sizes = [num_elems // 4, num_elems // 4, num_elems - 2 * (num_elems // 4)]
            output = torch.empty(sizes[rank], dtype=dtype)
            dist.reduce_scatter(output, list(inputs[rank].split(sizes)), reduce_op, group=group)
            oracle.assert_equal(output, expected.split(sizes)[rank])


@in_ranks(4)
def test_a_ring_has_another_order(rank: int) -> None:
    """In rank order two_shot runs instead, with the same bytes; and the test would see another."""
    inputs = [oracle.floats(r, 1000, torch.float32) for r in range(4)]
    for deterministic, algorithm in (("rank_order", "two_shot"), (None, "ring")):
        group = group_with("ring", deterministic)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, group=group)
        is_ordered = oracle.bits(tensor) == oracle.bits(oracle.left_to_right(inputs, "sum"))
        assert is_ordered == (deterministic is not None)
        assert ringcomm.stats(group)["all_reduce", algorithm]["sent_bytes"] == 6000


# ---- tensors


@in_ranks(2)
def test_parameters_and_views(rank: int) -> None:
    """Parameters of any layout, inference mode.

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


@in_ranks(2)
def test_views_with_a_negative_bit_are_refused(rank: int) -> None:
    """torch's dispatcher would hand a backend copies, and drop what it writes there."""
    view, plain = torch.tensor([1 + 2j, 3 - 1j]).conj().imag, torch.zeros(2)
    for call in (
        lambda: dist.all_reduce(view),
        lambda: dist.broadcast(view, rank),
        lambda: dist.all_gather([plain, view], plain),
        lambda: dist.all_gather_into_tensor(torch.zeros(4), view),
        lambda: dist.send(view, 1 - rank),
        lambda: dist.recv(view, 1 - rank),
    ):
        with pytest.raises(NotImplementedError, match=r"negative bit.*resolve_neg"):
            call()
    value = torch.tensor([-2.0, 1.0])
    oracle.assert_equal(view.resolve_neg(), value)
    dist.all_reduce(value)
    oracle.assert_equal(value, torch.tensor([-4.0, 2.0]))


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


# ---- sparse tensors

ROWS, COLUMNS = 50, 3
# How many entries each rank has: nobody, somebody or everybody; shares are padded to the largest.
COUNTS = {1: [[6]], 2: [[0, 0], [7, 0], [30, 30]], 4: [[5, 0, 90, 2]]}


def entries(rank: int, num_entries: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers at places of which some are there twice; not coalesced."""
    generator = torch.Generator().manual_seed(rank)
    places = torch.randint(0, ROWS, (1, num_entries), generator=generator)
    numbers = torch.randint(0, 9, (num_entries, COLUMNS), generator=generator)
    return torch.sparse_coo_tensor(places, numbers.to(dtype), (ROWS, COLUMNS))


@in_ranks(tuple(COUNTS))
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sum(rank: int, dtype: torch.dtype, is_async: bool) -> None:
    for counts in COUNTS[dist.get_world_size()]:
        all_entries = [entries(r, count, dtype) for r, count in enumerate(counts)]
        total = torch.stack([own.to_dense().double() for own in all_entries]).sum(0)
        tensor = all_entries[rank].clone()
        ahead, behind = torch.ones(5), torch.ones(7)
        works = [dist.all_reduce(each, async_op=is_async) for each in (ahead, tensor, behind)]
        for work in works:
            if work is not None:
                work.wait()
        assert ahead.eq(len(counts)).all()
        assert behind.eq(len(counts)).all()
        assert tensor.is_coalesced()
        assert tensor.dtype == dtype
        assert torch.equal(tensor.to_dense().double(), total)


@in_ranks(2)
def test_sparse_dimensions_and_reductions(rank: int) -> None:
    """Several sparse dimensions; another reduction is refused, and nothing was exchanged."""
    dense = torch.arange(24.0).reshape(2, 3, 4) * (torch.arange(24).reshape(2, 3, 4) % 2 == rank)
    tensor = dense.to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), torch.arange(24.0).reshape(2, 3, 4))
    with pytest.raises(NotImplementedError, match="SUM only"):
        dist.all_reduce(entries(rank, 5, torch.float32), dist.ReduceOp.MAX)
    dist.barrier()


@in_ranks(2)
@pytest.mark.parametrize("kind", ["dtype", "shape", "layout"])
def test_mismatch_is_told_to_every_rank(rank: int, kind: str) -> None:
    group = dist.new_group()
    tensor = entries(rank, 5, torch.float64 if (kind, rank) == ("dtype", 1) else torch.float32)
    if rank == 1 and kind == "shape":
        tensor = torch.sparse_coo_tensor(tensor._indices(), tensor._values(), (ROWS + 1, COLUMNS))
    if rank == 1 and kind == "layout":
        tensor = tensor.to_dense()
    with pytest.raises(ringcomm.MismatchError):
        dist.all_reduce(tensor, group=group)


# ---- inputs and outputs that share memory: right in place, refused in any other form
#
# On every transport. https://github.com/NVIDIA/nccl-tests/issues/357 asks it of an all_to_all. Gloo
# copies most inputs, and so accepts more forms; an all_to_all_single in place it gets wrong.

RANKS = 3
# In an envelope, in one message, and with a share above every limit for messages.
OVERLAP_SIZES = (8, 20_000, 300_000)
Make = Callable[[int], Tensor]


def of(rank: int, share: int) -> float:
    return 10.0 * rank + share


def filled(x: Tensor, size: int, value: Callable[[int], float]) -> Tensor:
    """Share q of x is value(q)."""
    for q in range(RANKS):
        x[q * size : (q + 1) * size] = value(q)
    return x


def shares(make: Make, size: int, value: Callable[[int], float]) -> list[Tensor]:
    return list(filled(make(RANKS * size), size, value).split(size))


def check(actual: list[Tensor], value: Callable[[int], float]) -> None:
    for q, share in enumerate(actual):
        assert bool((share == value(q)).all()), (q, share, value(q))


def in_place(rank: int, make: Make, size: int) -> None:
    own = slice(rank * size, (rank + 1) * size)

    def sent(q: int) -> float:
        return of(rank, q)

    def received(q: int) -> float:
        return of(q, rank)

    summed = sum(of(q, rank) for q in range(RANKS))

    x = filled(make(RANKS * size), size, lambda q: of(rank, 0) if q == rank else -1.0)
    dist.all_gather_into_tensor(x, x[own])
    check(list(x.split(size)), lambda q: of(q, 0))
    slots = shares(make, size, lambda q: of(rank, 0) if q == rank else -1.0)
    dist.all_gather(slots, slots[rank])
    check(slots, lambda q: of(q, 0))

    x = filled(make(RANKS * size), size, sent)
    dist.reduce_scatter_tensor(x[own], x)
    check([x[own]], lambda _: summed)
    slots = shares(make, size, sent)
    dist.reduce_scatter(slots[rank], slots)
    check([slots[rank]], lambda _: summed)

    x = filled(make(RANKS * size), size, sent)
    dist.all_to_all_single(x, x)
    check(list(x.split(size)), received)
    slots = shares(make, size, sent)
    dist.all_to_all(slots, slots)
    check(slots, received)

    slots = shares(make, size, lambda q: of(rank, 0) if q == rank else -1.0)
    dist.gather(slots[rank], slots if rank == 1 else None, 1)
    check(slots, lambda q: of(q, 0) if rank == 1 or q == rank else -1.0)
    slots = shares(make, size, sent)
    dist.scatter(slots[rank], slots if rank == 1 else None, 1)
    check(slots, lambda q: of(1, rank) if q == rank else sent(q))


def refused(fn: Callable[..., object], *args: object) -> None:
    with pytest.raises(ValueError, match="share memory"):
        fn(*args)


def overlapping(rank: int, make: Make, size: int) -> None:
    """On every rank alike, so that no rank waits; only the root of a gather or scatter has both."""
    x = make(RANKS * size + 1).zero_()
    head, tail = x[:-1], x[1:]
    other = (rank + 1) % RANKS
    slots = list(head.split(size))
    for begin in (other * size, rank * size + 1):
        refused(dist.all_gather_into_tensor, head, x[begin : begin + size])
        refused(dist.reduce_scatter_tensor, x[begin : begin + size], head)
        refused(dist.all_gather, slots, x[begin : begin + size])
        refused(dist.reduce_scatter, x[begin : begin + size], slots)
        if rank == 1:
            refused(dist.gather, x[begin : begin + size], slots, 1)
            refused(dist.scatter, x[begin : begin + size], slots, 1)
    refused(dist.all_to_all_single, tail, head)
    refused(dist.all_to_all, slots[1:] + slots[:1], slots)
    # In place a share begins where its input does; here only the first one does.
    given, taken = [size] * RANKS, [size] * RANKS
    for sizes, more in ((given, 1), (taken, -1)):
        sizes[other] += more
        sizes[(rank + 2) % RANKS] -= more
    refused(dist.all_to_all_single, head, head, taken, given)
    assert not bool(x.any())


@in_ranks(RANKS, ENVS)
def test_in_place_is_right_and_other_overlaps_are_refused(rank: int) -> None:
    for make in (torch.empty, ringcomm.empty_shared):
        for size in OVERLAP_SIZES:
            in_place(rank, make, size)
            overlapping(rank, make, size)
    # Inputs that share memory with each other are no results.
    same = torch.full((4,), float(rank))
    out = torch.empty(12)
    dist.all_to_all(list(out.split(4)), [same] * RANKS)
    check(list(out.split(4)), float)
    columns = torch.full((4, RANKS), float(rank))
    dist.all_to_all([columns[:, q] for q in range(RANKS)], [columns[:, q] for q in range(RANKS)])
    check(list(columns.T), float)
