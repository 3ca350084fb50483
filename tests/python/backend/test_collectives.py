"""Reductions against numpy: every type, the sizes at which paths change, layouts of tensors.

Any two parameters' values meet; combinations of three are drawn in test_random_sequences.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from ringcomm import Options

WORLDS = [2, 3, 4]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
TYPES = [*oracle.FLOATS, *oracle.INTS, torch.bool]
ALGORITHMS = ["one_shot", "two_shot", "ring"]
MIB = 1 << 20


def one_shot_limit(world_size: int) -> int:
    """Bytes up to which "auto" takes one_shot."""
    return (256 if world_size == 2 else 48) << 10


@cache
def group_with(algorithm: str) -> Any:
    """A group of all ranks that always uses `algorithm`; made once in each pool."""
    return dist.new_group(backend="ringcomm", pg_options=Options(algorithm=algorithm))  # type: ignore[arg-type]


def inputs_of(num_elems: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [oracle.integers(r, num_elems, dtype, seed) for r in range(dist.get_world_size())]


# ---- all_reduce


def check_all_reduce(
    rank: int, op: str, dtype: torch.dtype, sizes: list[int], algorithm: str
) -> None:
    group = None if algorithm == "auto" else group_with(algorithm)
    for num_elems in sizes:
        inputs = inputs_of(num_elems, dtype)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, OPS[op], group=group)
        oracle.assert_equal(tensor, oracle.reduced(inputs, op))


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_floating_point:
        return oracle.NUMBER_OPS
    # An average of truth values has no meaning: test_errors.py.
    return [op for op in OPS if (op, dtype) != ("avg", torch.bool)]


@pytest.mark.parametrize("dtype", TYPES)
def test_all_reduce_types(dtype: torch.dtype) -> None:
    for turn, op in enumerate(ops_of(dtype), TYPES.index(dtype)):
        world_size = WORLDS[turn % 3]
        # One vector and a bit; then two_shot.
        sizes = [67, one_shot_limit(world_size) // dtype.itemsize + 5]
        run_ranks(world_size, check_all_reduce, op, dtype, sizes, "auto")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_all_reduce_sizes(world_size: int, algorithm: str) -> None:
    limit = one_shot_limit(world_size) // 4
    sizes = [
        *(0, 1),  # nothing; less than one element per rank
        *(world_size - 1, world_size, world_size + 1),  # chunks of one element, some empty
        *(limit - 1, limit, limit + 1),  # where auto changes from one_shot to two_shot
        *(MIB // 4 - 32, MIB // 4 - 1, MIB // 4, MIB // 4 + 1),  # one piece of a board, and two
        world_size * (64 << 10) + 1,  # a slot of the ring for each chunk, and an element
        777_777,  # odd: several pieces, several slices, chunks of different sizes
    ]
    run_ranks(world_size, check_all_reduce, "sum", torch.float32, sizes, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_algorithms_types(algorithm: str) -> None:
    """Elements of 1, 2 and 8 bytes, where offsets in bytes and in elements differ most."""
    dtypes = [torch.bool, torch.int8, torch.bfloat16, torch.float64]
    for turn, dtype in enumerate(dtypes, ALGORITHMS.index(algorithm)):
        op = ("sum", "product", "max")[turn % 3]
        run_ranks(3, check_all_reduce, op, dtype, [10, 300_001], algorithm)


def random_result(rank: int, dtype: torch.dtype, num_elems: int, algorithm: str) -> bytes:
    tensor = oracle.floats(rank, num_elems, dtype)
    dist.all_reduce(tensor, group=group_with(algorithm))
    inputs = [oracle.floats(r, num_elems, dtype).double() for r in range(dist.get_world_size())]
    exact = torch.stack(inputs).sum(0)
    # Rounded at most once per addition, to half a unit in the last place of at most 2^3.
    bound = dist.get_world_size() * 8 * torch.finfo(dtype).eps
    assert (tensor.double() - exact).abs().max().item() <= bound
    return oracle.bits(tensor)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_get_the_same_bits(algorithm: str) -> None:
    for turn, dtype in enumerate(oracle.FLOATS, ALGORITHMS.index(algorithm)):
        for num_elems in (1001, 150_001):
            results = run_ranks(WORLDS[turn % 3], random_result, dtype, num_elems, algorithm)
            assert len(set(results)) == 1


def check_complex(rank: int, op: str, dtype: torch.dtype) -> None:
    inputs = [
        torch.complex(*(oracle.integers(r, 50, torch.float64, seed) for seed in (1, 2))).to(dtype)
        for r in range(dist.get_world_size())
    ]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, OPS[op])
    oracle.assert_equal(tensor, oracle.reduced(inputs, op))
    strided = torch.stack([inputs[rank]] * 2, dim=1)[:, 0]
    dist.all_reduce(strided, OPS[op])
    oracle.assert_equal(strided, oracle.reduced(inputs, op))
    scattered = torch.empty(50 // 2, dtype=dtype)
    if dist.get_world_size() == 2:
        dist.reduce_scatter_tensor(scattered, inputs[rank], OPS[op])
        oracle.assert_equal(scattered, oracle.reduced(inputs, op).chunk(2)[rank])


@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", torch.complex64), ("avg", torch.complex64), ("sum", torch.complex128)]
)
def test_complex(op: str, dtype: torch.dtype) -> None:
    run_ranks(2, check_complex, op, dtype)


def check_nan(rank: int, dtype: torch.dtype) -> None:
    for holder in range(2):
        for op in ("min", "max", "sum"):
            tensor = torch.full((40,), float(rank + 1), dtype=dtype)
            if rank == holder:
                tensor[::3] = float("nan")
            dist.all_reduce(tensor, OPS[op])
            assert tensor[::3].isnan().all()
            assert not tensor[1::3].isnan().any()


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_nan_of_any_rank_arrives(dtype: torch.dtype) -> None:
    run_ranks(2, check_nan, dtype)


# ---- layouts


def layouts() -> dict[str, Tensor]:
    """Views whose elements do not lie one after another, or that have none."""
    base = torch.zeros(6, 8, 10)
    return {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1::3, ::4],
        "offset": base[2],  # contiguous, but not at its storage's start
        "odd_offset": torch.zeros(101, dtype=torch.int16)[1:],  # aligned to 2 bytes only
        "channels_last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(0.0),
        "one_row_of_columns": base.view(60, 8)[:, 3],
        "empty": torch.zeros(3, 0, 5),
    }


def check_layout(rank: int, name: str) -> None:
    world_size = dist.get_world_size()
    template = layouts()[name]
    values = [
        oracle.integers(r, template.numel(), template.dtype).view(template.shape)
        for r in range(world_size)
    ]

    def own() -> Tensor:
        view = layouts()[name]
        return view.copy_(values[rank])

    for is_async in (False, True):
        tensor = own()
        strides = tensor.stride()
        work = dist.all_reduce(tensor, async_op=is_async)
        _ = work.wait() if work is not None else None
        oracle.assert_equal(tensor, oracle.reduced(values, "sum").view(template.shape))
        assert tensor.stride() == strides
        tensor = own()
        work = dist.broadcast(tensor, world_size - 1, async_op=is_async)
        _ = work.wait() if work is not None else None
        oracle.assert_equal(tensor, values[-1])
        outputs = [layouts()[name] for _ in range(world_size)]
        source = own()
        work = dist.all_gather(outputs, source, async_op=is_async)
        _ = work.wait() if work is not None else None
        for output, expected in zip(outputs, values, strict=True):
            oracle.assert_equal(output, expected)
        oracle.assert_equal(source, values[rank])
        output = layouts()[name]
        work = dist.reduce_scatter(output, [own()] * world_size, async_op=is_async)
        _ = work.wait() if work is not None else None
        oracle.assert_equal(output, oracle.reduced(values, "sum").view(template.shape))
        tensor = own()
        work = dist.reduce(tensor, 1, async_op=is_async)
        _ = work.wait() if work is not None else None
        expected = oracle.reduced(values, "sum").view(template.shape) if rank == 1 else values[rank]
        oracle.assert_equal(tensor, expected)
        outputs = [layouts()[name] for _ in range(world_size)]
        work = dist.gather(own(), outputs if rank == 0 else None, 0, async_op=is_async)
        _ = work.wait() if work is not None else None
        for output, expected in zip(outputs if rank == 0 else [], values, strict=False):
            oracle.assert_equal(output, expected)
        output = layouts()[name]
        work = dist.scatter(output, outputs if rank == 0 else None, 0, async_op=is_async)
        _ = work.wait() if work is not None else None
        oracle.assert_equal(output, values[rank])
        outputs = [layouts()[name] for _ in range(world_size)]
        work = dist.all_to_all(outputs, [own() for _ in range(world_size)], async_op=is_async)
        _ = work.wait() if work is not None else None
        for output, expected in zip(outputs, values, strict=True):
            oracle.assert_equal(output, expected)


@pytest.mark.parametrize("name", sorted(layouts()))
def test_layouts(name: str) -> None:
    run_ranks(3, check_layout, name)


def check_surroundings(rank: int) -> None:
    """A strided output is written where its elements are, and nowhere else."""
    base = torch.full((20, 4), 7.0)
    dist.all_reduce(base[:, 1])
    assert (base[:, 1] == 7.0 * dist.get_world_size()).all()
    assert (base[:, [0, 2, 3]] == 7.0).all()


def test_surroundings_are_left_alone() -> None:
    run_ranks(3, check_surroundings)


def check_leaf(rank: int) -> None:
    """Parameters are collective's arguments too (broadcast of a model), whatever their layout."""
    for is_async in (False, True):
        for channels_last in (False, True):
            weight = torch.full((2, 3, 4, 5), float(rank))
            if channels_last:
                weight = weight.to(memory_format=torch.channels_last)
            parameter = torch.nn.Parameter(weight)
            work = dist.broadcast(parameter, 1, async_op=is_async)
            _ = work.wait() if work is not None else None
            assert (parameter == 1).all()
            assert parameter.is_leaf
            assert parameter.grad_fn is None


def test_parameters_that_require_grad() -> None:
    run_ranks(2, check_leaf)


def check_negative_view(rank: int) -> None:
    """The imaginary part of a conjugate is a view with a bit set: its memory holds other numbers.

    (Conjugates themselves are refused by torch.distributed.)
    """

    def view() -> Tensor:
        return torch.tensor([1 + 2j, 3 - 1j]).conj().imag

    assert view().is_neg()
    value = torch.tensor([-2.0, 1.0])
    tensor = view() if rank == 1 else torch.zeros(2)
    dist.broadcast(tensor, 1)
    oracle.assert_equal(tensor.resolve_neg(), value)
    tensor = value.clone() if rank == 1 else view()
    dist.broadcast(tensor, 1)
    oracle.assert_equal(tensor.resolve_neg(), value)
    tensor = view()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    oracle.assert_equal(tensor.resolve_neg(), value)
    received = view()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    ):
        work.wait()
    oracle.assert_equal(received.resolve_neg(), value)


def test_negative_views() -> None:
    run_ranks(2, check_negative_view)


# ---- reduce, barrier


def check_reduce(rank: int, num_elems: int, dtype: torch.dtype) -> None:
    for root in range(dist.get_world_size()):
        for op in ("sum", "avg", "max") if num_elems < 1 << 16 else ("avg",):
            inputs = inputs_of(num_elems, dtype, root)
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root, OPS[op])
            oracle.assert_equal(
                tensor, oracle.reduced(inputs, op) if rank == root else inputs[rank]
            )


@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce(world_size: int) -> None:
    for num_elems in (0, 1, 1000):
        run_ranks(world_size, check_reduce, num_elems, torch.bfloat16)
    run_ranks(world_size, check_reduce, 600_001, torch.float32)  # three pieces of a board


def check_barrier(rank: int, path: str) -> None:
    """Nobody leaves before all have come: each sees the marks of all."""
    for turn in range(10):
        with open(path, "a") as file:
            file.write(f"{turn}\n")
        dist.barrier()
        with open(path) as file:
            assert file.read().split().count(str(turn)) == dist.get_world_size()
        dist.barrier()


def test_barrier(tmp_path: Any) -> None:
    run_ranks(3, check_barrier, str(tmp_path / "marks"))


# ---- worlds of one


def check_alone(rank: int) -> None:
    for is_async in (False, True):
        value = torch.arange(6.0)
        for op in ("sum", "avg", "product", "min", "max"):
            tensor = value.clone()
            work = dist.all_reduce(tensor, OPS[op], async_op=is_async)
            _ = work.wait() if work is not None else None
            oracle.assert_equal(tensor, value)
        strided = torch.arange(12.0)[::2]
        dist.all_reduce(strided)
        oracle.assert_equal(strided, torch.arange(12.0)[::2])
        gathered = [torch.zeros(6)]
        dist.all_gather(gathered, value)
        oracle.assert_equal(gathered[0], value)
        scattered = torch.zeros(6)
        dist.reduce_scatter_tensor(scattered, value)
        oracle.assert_equal(scattered, value)
        dist.broadcast(scattered, 0)
        dist.reduce(scattered, 0)
        dist.barrier()
        oracle.assert_equal(scattered, value)
        dist.all_reduce(torch.zeros(0))


def test_world_of_one() -> None:
    run_ranks(1, check_alone)
