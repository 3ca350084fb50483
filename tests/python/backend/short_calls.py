"""A table of calls, each with a table of tensors and ways of calling, for test_short_calls.py.

Results are sums of small integers, so that they are exact in every type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import oracle
import torch
import torch.distributed as dist
from torch import Tensor

import ringcomm

Fill = Callable[[list[int]], Tensor]  # a tensor of these numbers
# What to call, with async_op= and group=; where its result is; the result.
Made = tuple[Callable[..., Any], Tensor, list[int]]


def number(rank: int, share: int = 0) -> int:
    return 10 * rank + share + 1


# ---- the calls of one rank, with `rows` for each other one


def all_reduce(fill: Fill, rank: int, world: int, rows: int) -> Made:
    x = fill([number(rank)] * rows)
    return partial(dist.all_reduce, x), x, [sum(map(number, range(world)))] * rows


def all_gather(fill: Fill, rank: int, world: int, rows: int) -> Made:
    out = fill([0] * (rows * world))
    call = partial(dist.all_gather_into_tensor, out, fill([number(rank)] * rows))
    return call, out, [number(q) for q in range(world) for _ in range(rows)]


def shares(rank: int, world: int, rows: int) -> list[int]:
    return [number(rank, q) for q in range(world) for _ in range(rows)]


def reduce_scatter(fill: Fill, rank: int, world: int, rows: int) -> Made:
    out = fill([0] * rows)
    call = partial(dist.reduce_scatter_tensor, out, fill(shares(rank, world, rows)))
    return call, out, [sum(number(q, rank) for q in range(world))] * rows


def all_to_all(fill: Fill, rank: int, world: int, rows: int) -> Made:
    out = fill([0] * (rows * world))
    call = partial(dist.all_to_all_single, out, fill(shares(rank, world, rows)))
    return call, out, [number(q, rank) for q in range(world) for _ in range(rows)]


def uneven_all_to_all(fill: Fill, rank: int, world: int, rows: int) -> Made:
    """Between some ranks nothing, as tokens that no expert gets."""

    def size(a: int, b: int) -> int:
        return rows * ((2 * a + b) % world)

    given, taken = [size(rank, q) for q in range(world)], [size(q, rank) for q in range(world)]
    out = fill([0] * sum(taken))
    x = fill([number(rank, q) for q in range(world) for _ in range(given[q])])
    call = partial(dist.all_to_all_single, out, x, taken, given)
    return call, out, [number(q, rank) for q in range(world) for _ in range(taken[q])]


def broadcast(fill: Fill, rank: int, world: int, rows: int) -> Made:
    x = fill([number(rank)] * rows)
    root = world - 1
    return partial(dist.broadcast, x, group_src=root), x, [number(root)] * rows


CALLS = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "uneven all_to_all": uneven_all_to_all,
    "broadcast": broadcast,
}


# ---- tensors of numbers


class Sub(Tensor):
    """A subclass whose operators are torch's."""


def plain(numbers: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def shared(numbers: list[int]) -> Tensor:
    return ringcomm.empty_shared(len(numbers)).copy_(plain(numbers))


def inference(numbers: list[int]) -> Tensor:
    with torch.inference_mode():
        return plain(numbers)


TENSORS: dict[str, Fill] = {
    "float32": plain,
    "bfloat16": partial(plain, dtype=torch.bfloat16),
    "int64": partial(plain, dtype=torch.int64),
    # All ranks' numbers for one share are odd, or all are even: the sum is odd where any is.
    "bool": lambda numbers: plain(numbers, torch.int64) % 2 == 1,
    "complex": lambda numbers: torch.complex(plain(numbers), -2 * plain(numbers)),
    "rows": lambda numbers: plain(numbers).reshape(-1, 1).expand(-1, 5).contiguous(),
    "a column": lambda numbers: torch.stack([plain(numbers), plain(numbers)], 1)[:, 1],
    "behind another": lambda numbers: plain([7, *numbers])[1:],
    "a parameter": lambda numbers: torch.nn.Parameter(plain(numbers)),
    "a view of one": lambda numbers: torch.nn.Parameter(plain([7, *numbers])).detach()[1:],
    "inference": inference,
    "a subclass": lambda numbers: plain(numbers).as_subclass(Sub),
    "shared": shared,
    "a lazy clone": lambda numbers: torch._lazy_clone(plain(numbers)),
}


def same(actual: Tensor, expected: Tensor) -> bool:
    one, other = (x.detach().as_subclass(Tensor) for x in (actual, expected))
    return one.shape == other.shape and oracle.bits(one) == oracle.bits(other)


# ---- ways of calling


def at_once(call: Callable[..., Any]) -> None:
    assert call() is None


def later(call: Callable[..., Any]) -> None:
    assert call(async_op=True).wait()


def by_future(call: Callable[..., Any]) -> None:
    call(async_op=True).get_future().wait()


def profiled(call: Callable[..., Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert call() is None
    assert any(event.key.startswith("ringcomm:") for event in profiler.key_averages())


WAYS = {"at once": at_once, "later": later, "by future": by_future, "profiled": profiled}


def check_all(rank: int, world: int, group: Any = None, ways: Any = WAYS) -> None:
    for name, make in CALLS.items():
        for kind, fill in TENSORS.items():
            for rows in (2, 0) if kind == "float32" else (2,):
                for way, run in ways.items():
                    if way == "profiled" and kind not in ("float32", "a column"):
                        continue  # each takes milliseconds
                    call, result, expected = make(fill, rank, world, rows)
                    run(partial(call, group=group))
                    assert same(result, fill(expected)), (name, kind, rows, way, result)
