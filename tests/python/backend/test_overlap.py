"""Inputs and outputs that share memory: right in place, refused in any other form.

On every transport. https://github.com/NVIDIA/nccl-tests/issues/357 asks it of an all_to_all. Gloo
copies most inputs, and so accepts more forms; an all_to_all_single in place it gets wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from test_errors import ENVS
from torch import Tensor

import ringcomm

WORLD = 3
# In an envelope, in one message, and with a share above every limit for messages.
SIZES = (8, 20_000, 300_000)
Make = Callable[[int], Tensor]


def of(rank: int, share: int) -> float:
    return 10.0 * rank + share


def filled(x: Tensor, size: int, value: Callable[[int], float]) -> Tensor:
    """Share q of x is value(q)."""
    for q in range(WORLD):
        x[q * size : (q + 1) * size] = value(q)
    return x


def shares(make: Make, size: int, value: Callable[[int], float]) -> list[Tensor]:
    return list(filled(make(WORLD * size), size, value).split(size))


def check(actual: list[Tensor], value: Callable[[int], float]) -> None:
    for q, share in enumerate(actual):
        assert bool((share == value(q)).all()), (q, share, value(q))


def in_place(rank: int, make: Make, size: int) -> None:
    own = slice(rank * size, (rank + 1) * size)

    def sent(q: int) -> float:
        return of(rank, q)

    def received(q: int) -> float:
        return of(q, rank)

    summed = sum(of(q, rank) for q in range(WORLD))

    x = filled(make(WORLD * size), size, lambda q: of(rank, 0) if q == rank else -1.0)
    dist.all_gather_into_tensor(x, x[own])
    check(list(x.split(size)), lambda q: of(q, 0))
    slots = shares(make, size, lambda q: of(rank, 0) if q == rank else -1.0)
    dist.all_gather(slots, slots[rank])
    check(slots, lambda q: of(q, 0))

    x = filled(make(WORLD * size), size, sent)
    dist.reduce_scatter_tensor(x[own], x)
    check([x[own]], lambda _: summed)
    slots = shares(make, size, sent)
    dist.reduce_scatter(slots[rank], slots)
    check([slots[rank]], lambda _: summed)

    x = filled(make(WORLD * size), size, sent)
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
    x = make(WORLD * size + 1).zero_()
    head, tail = x[:-1], x[1:]
    other = (rank + 1) % WORLD
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
    given, taken = [size] * WORLD, [size] * WORLD
    for sizes, more in ((given, 1), (taken, -1)):
        sizes[other] += more
        sizes[(rank + 2) % WORLD] -= more
    refused(dist.all_to_all_single, head, head, taken, given)
    assert not bool(x.any())


@in_ranks(WORLD, ENVS)
def test_in_place_is_right_and_other_overlaps_are_refused(rank: int) -> None:
    for make in (torch.empty, ringcomm.empty_shared):
        for size in SIZES:
            in_place(rank, make, size)
            overlapping(rank, make, size)
    # Inputs that share memory with each other are no results.
    same = torch.full((4,), float(rank))
    out = torch.empty(12)
    dist.all_to_all(list(out.split(4)), [same] * WORLD)
    check(list(out.split(4)), float)
    columns = torch.full((4, WORLD), float(rank))
    dist.all_to_all([columns[:, q] for q in range(WORLD)], [columns[:, q] for q in range(WORLD)])
    check(list(columns.T), float)
