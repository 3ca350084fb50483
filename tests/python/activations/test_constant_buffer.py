"""Collectives through a buffer of a constant size: exact results, bytes on the wire, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import peak_bytes, record_allocations
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ringcomm
from ringcomm.parallel.constant_buffer import all_reduce_mean_, broadcast_


def make(rank: int) -> list[Tensor]:
    """Whole numbers, so that means are exact where they are multiples of the number of ranks."""

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.arange(torch.Size(shape).numel()).remainder(40).add(rank)
        return (12 * values).view(shape).to(dtype)

    return [
        numbers(7, 5),
        numbers(0, 3),
        numbers(1),
        numbers(3, 333, dtype=torch.float64),
        numbers(13, 11).t(),
        numbers(9, dtype=torch.bfloat16),
        numbers(4, 6, 5, 3).to(memory_format=torch.channels_last),
        numbers(6, 10)[:, ::3],
        numbers(5, 4, 3).permute(1, 2, 0)[:, 1:, :4],
        numbers(70, dtype=torch.bfloat16)[1:],
        numbers(),
        torch.complex(numbers(5), -numbers(5)),
        nn.Parameter(numbers(1001)),
    ]


def mean(num_ranks: int) -> list[Tensor]:
    by_rank = [make(rank) for rank in range(num_ranks)]
    wide = [
        [t.detach().to(torch.complex128) for t in alike] for alike in zip(*by_rank, strict=True)
    ]
    means = [torch.stack(alike).sum(0) / num_ranks for alike in wide]
    return [m if t.is_complex() else m.real for m, t in zip(means, by_rank[0], strict=True)]


def sent_bytes() -> int:
    return sum(entry["sent_bytes"] for entry in ringcomm.stats().values())


def more(rank: int) -> list[Tensor]:
    ints = torch.arange(30).view(5, 6).t() * (rank + 1)
    return [*make(rank), ints, ints > 40, ints.to(torch.uint8)[1:]]


def check(rank: int, buffer_bytes: int, source: int | None) -> tuple[int, int]:
    """The mean, or a broadcast; bytes sent, and those of all tensors."""
    tensors = make(rank) if source is None else more(rank)
    strides, before = [tensor.stride() for tensor in tensors], sent_bytes()
    if source is None:
        all_reduce_mean_(tensors, None, buffer_bytes)
        expected = mean(dist.get_world_size())
    else:
        broadcast_(tensors, None, buffer_bytes, group_src=source)
        expected = more(source)
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.detach(), value.to(tensor.dtype))
    assert [tensor.stride() for tensor in tensors] == strides
    return sent_bytes() - before, sum(tensor.nbytes for tensor in tensors)


# Neither a tensor nor a row of one fills a buffer of these exactly.
@pytest.mark.parametrize(
    ("world_size", "buffer_bytes", "source"),
    [
        *((1, 100, None), (2, 16, None), (3, 100, None), (3, 4096, None), (4, 1 << 20, None)),
        *((2, 16, 1), (3, 100, 2), (4, 4096, 0)),
    ],
)
def test_means_and_broadcasts(world_size: int, buffer_bytes: int, source: int | None) -> None:
    options = ringcomm.Options(algorithm="two_shot")
    by_rank = run_ranks(world_size, check, buffer_bytes, source, pg_options=options)
    # Whatever the buffer, each byte is reduced once and gathered once, or sent to each other rank.
    times = (world_size - 1) * (2 if source is None else 1)
    assert sum(sent for sent, _ in by_rank) == times * by_rank[0][1]


@in_ranks(3, backend="gloo")
def test_another_backend(rank: int) -> None:
    tensors = [t for t in make(rank) if t.dtype != torch.bfloat16]
    expected = [m for m, t in zip(mean(3), make(0), strict=True) if t.dtype != torch.bfloat16]
    all_reduce_mean_(tensors, None, 100)
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.detach(), value.to(tensor.dtype))
    broadcast_(tensors, None, 100)


# ---- memory


def check_memory(rank: int, num_elems: int, buffer_bytes: int) -> tuple[int, int, int]:
    """Peaks of both, and of the plain way: one copy of everything."""
    # Few sizes, none of which divides the buffer; one is not contiguous.
    sizes = [num_elems // 2, num_elems // 3]
    sizes += [num_elems - sum(sizes) - 1011 * 7, 1011 * 7]
    tensors = [torch.full([size], float(rank)) for size in sizes[:-1]]
    tensors.append(torch.full([1011, 9], float(rank))[:, :7])
    peaks = []
    for run in (
        lambda: all_reduce_mean_(tensors, None, buffer_bytes),
        lambda: broadcast_(tensors, None, buffer_bytes),
        lambda: torch.cat([tensor.reshape(-1) for tensor in tensors]),
    ):
        with record_allocations() as trace:
            run()
        assert sum(trace) == 0
        peaks.append(peak_bytes(trace))
    assert all(bool((tensor == 0.5).all()) for tensor in tensors)
    with record_allocations() as trace:  # slices travel from where they are
        all_reduce_mean_(tensors[:1], None, 1 << 16)
    assert trace == []
    return peaks[0], peaks[1], peaks[2]


def test_memory_is_that_of_the_buffer() -> None:
    small = run_ranks(2, check_memory, 1_000_000, 1 << 20)
    large = run_ranks(2, check_memory, 12_000_000, 1 << 20)
    for peaks in small + large:
        assert peaks[:2] == (1 << 20, 1 << 20)
    # Otherwise it is that of the model, which this way of counting sees.
    assert small[0][2] >= 4 * 1_000_000
    assert large[0][2] >= 4 * 12_000_000


# ---- what is refused, and what costs nothing


@in_ranks(2)
def test_edges(rank: int) -> None:
    def calls() -> int:
        return sum(entry["num_calls"] for entry in ringcomm.stats().values())

    before = calls()
    for nothing in ([], [torch.empty(0), torch.empty(3, 0)]):
        all_reduce_mean_(nothing)
        broadcast_(nothing)
    assert calls() == before
    good = torch.full([3], float(rank))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(2, dtype=torch.int64), TypeError, "floating-point or complex .* torch.int64"),
        (torch.ones(1).expand(4), ValueError, "elements that share memory"),
        (torch.eye(2).to_sparse(), ValueError, "must be strided"),
        (torch.ones(1, dtype=torch.complex64).conj(), ValueError, "strided and have values"),
        (
            torch.ones(2, dtype=torch.float64),
            ValueError,
            "at least one element of torch.float64, got 7",
        ),
    ]
    for tensor, kind, match in wrong:
        with pytest.raises(kind, match=match):
            all_reduce_mean_([good, tensor], None, 7 if tensor.dtype == torch.float64 else 8)
    with pytest.raises(ValueError, match="group_src must be a rank of the group of 2, got 2"):
        broadcast_([good], group_src=2)
    assert calls() == before
    assert bool((good == rank).all())
    mesh = init_device_mesh("cpu", (2,))
    all_reduce_mean_([good, good[:2].clone()], None, 8, mesh=mesh)  # calls of 2, 1 and 2 elements
    assert calls() == before + 3
    assert bool((good == 0.5).all())
