"""The calls of sequences: every collective, messages and objects, each as one rank makes it.

What a call is and what it must give: sequence_side.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sequence_side import Expectation, Side, fill
from torch import Tensor

import ringcomm
from ringcomm import ops
from ringcomm.backend import resolve_group

# ---- collectives; each returns what is to be waited for: a work, several, or None


def all_reduce(s: Side) -> Any:
    size = s.call.size
    tensor = s.tensor(s.value(s.rank, size), s.reduced(size))
    return dist.all_reduce(tensor, s.reduce_op, group=s.group, async_op=s.is_async)


def reduce(s: Side) -> Any:
    size = s.call.size
    tensor = s.tensor(s.value(s.rank, size), s.reduced(size) if s.is_root else None)
    root = s.members[s.root]
    return dist.reduce(tensor, root, s.reduce_op, group=s.group, async_op=s.is_async)


def broadcast(s: Side) -> Any:
    size = s.call.size
    tensor = s.tensor(s.value(s.rank, size), s.model(s.root, size))
    return dist.broadcast(tensor, s.members[s.root], group=s.group, async_op=s.is_async)


def slots(s: Side, sizes: list[int], is_in_place: bool) -> list[Tensor]:
    """For each rank's share; in place, this rank's has what it gives."""
    return [
        s.tensor(s.value(r, size) if is_in_place and r == s.rank else size, s.model(r, size))
        for r, size in enumerate(sizes)
    ]


def all_gather(s: Side) -> Any:
    sizes, is_in_place = s.sizes(), s.in_place()
    outputs = slots(s, sizes, is_in_place)
    given = outputs[s.rank] if is_in_place else s.own(sizes[s.rank])
    return dist.all_gather(outputs, given, group=s.group, async_op=s.is_async)


def all_gather_into_tensor(s: Side) -> Any:
    size = s.call.size
    whole = np.concatenate([s.model(r, size) for r in range(s.n)])
    if s.is_in_place:
        s.has_layouts = False
        before = np.zeros_like(whole)
        before[s.rank * size : (s.rank + 1) * size] = s.value(s.rank, size)
        output = s.tensor(before, whole)
        given = output[s.rank * size : (s.rank + 1) * size]
    else:
        output, given = s.tensor(s.n * size, whole), s.own(size)
    return dist.all_gather_into_tensor(output, given, group=s.group, async_op=s.is_async)


def reduce_scatter(s: Side) -> Any:
    sizes, is_in_place = s.sizes(), s.in_place()
    result = s.reduced(sizes[s.rank], s.rank)
    inputs = [
        s.tensor(s.value(s.rank, size, r), result if is_in_place and r == s.rank else None)
        for r, size in enumerate(sizes)
    ]
    output = inputs[s.rank] if is_in_place else s.tensor(sizes[s.rank], result)
    return dist.reduce_scatter(output, inputs, s.reduce_op, group=s.group, async_op=s.is_async)


def reduce_scatter_tensor(s: Side) -> Any:
    size, total = s.call.size, s.n * s.call.size
    mine = slice(s.rank * size, (s.rank + 1) * size)
    given, result = s.value(s.rank, total), s.reduced(total)[mine]
    if s.is_in_place:
        s.has_layouts = False
        after = given.copy()
        after[mine] = result
        source = s.tensor(given, after)
        output = source[mine]
    else:
        source, output = s.tensor(given), s.tensor(size, result)
    return dist.reduce_scatter_tensor(
        output, source, s.reduce_op, group=s.group, async_op=s.is_async
    )


def all_to_all(s: Side) -> Any:
    rows = [s.sizes(row) for row in range(s.n)]
    given = [s.value(s.rank, size, r) for r, size in enumerate(rows[s.rank])]
    taken = [s.model(r, rows[r][s.rank], s.rank) for r in range(s.n)]
    if s.call.uneven == 0 and s.in_place():
        inputs = outputs = [s.tensor(*pair) for pair in zip(given, taken, strict=True)]
    else:
        outputs = [s.tensor(len(values), values) for values in taken]
        inputs = [s.tensor(values) for values in given]
    return dist.all_to_all(outputs, inputs, group=s.group, async_op=s.is_async)


def all_to_all_single(s: Side) -> Any:
    rows = [s.sizes(row) for row in range(s.n)]
    splits = [rows[r][s.rank] for r in range(s.n)]
    taken = np.concatenate([s.model(r, size, s.rank) for r, size in enumerate(splits)])
    given = np.concatenate([s.value(s.rank, size, r) for r, size in enumerate(rows[s.rank])])
    if s.call.uneven == 0 and s.in_place():
        source = output = s.tensor(given, taken)
    else:
        output = s.tensor(sum(splits), taken, is_flat=True)
        source = s.tensor(given, is_flat=True)
    # Ranks may say that their splits are even or leave it out.
    is_told = s.call.uneven > 0 or s.rank % 2 == 0
    told = (splits, rows[s.rank]) if is_told else (None, None)
    return dist.all_to_all_single(output, source, told[0], told[1], s.group, s.is_async)


def gather(s: Side) -> Any:
    sizes, is_in_place = s.sizes(), s.in_place()
    outputs = slots(s, sizes, is_in_place) if s.is_root else None
    own = outputs[s.rank] if outputs and is_in_place else s.own(sizes[s.rank])
    return dist.gather(own, outputs, s.members[s.root], group=s.group, async_op=s.is_async)


def scatter(s: Side) -> Any:
    sizes, is_in_place = s.sizes(), s.in_place()
    given = [s.value(s.root, size, r) for r, size in enumerate(sizes)]
    result = s.model(s.root, sizes[s.rank], s.rank)
    inputs = None
    if s.is_root:
        results = [result if is_in_place and r == s.rank else None for r in range(s.n)]
        inputs = [s.tensor(*pair) for pair in zip(given, results, strict=True)]
    output = inputs[s.rank] if inputs and is_in_place else s.tensor(sizes[s.rank], result)
    return dist.scatter(output, inputs, s.members[s.root], group=s.group, async_op=s.is_async)


def barrier(s: Side) -> Any:
    """No rank leaves before all have come."""
    s.marks[s.members[s.rank]] = s.number

    def check() -> None:
        s.expect(all(s.marks[m] >= s.number for m in s.members), "left before all had come")

    s.checks.append(check)
    if s.call.uneven > 0 and not s.is_async:
        return ringcomm.monitored_barrier(s.group)
    return dist.barrier(group=s.group, async_op=s.is_async)


def coalesced(s: Side) -> Any:
    """Three calls of one kind through torch's manager."""
    collective = (all_reduce, all_gather_into_tensor, reduce_scatter_tensor)[s.call.uneven % 3]
    is_async, s.is_async = s.is_async, False
    with dist._coalescing_manager(group=s.group, async_ops=is_async) as manager:
        for size in (s.call.size, 0, 3):
            s.call = replace(s.call, size=size)
            collective(s)
    return manager if is_async else None


def operators(s: Side) -> None:
    """ringcomm.ops, which return new tensors or write `out`; always synchronous."""
    if s.call.op == "premul_sum":  # which torch.distributed has alone
        s.call = replace(s.call, op="sum")
    op, size, form = s.call.op, s.call.size, s.call.uneven % 6
    whole = s.n * size
    with torch.no_grad():
        if form == 0:
            given = s.tensor(s.value(s.rank, size), is_flat=True)
            s.returned(ops.all_reduce(given, op, s.group), s.reduced(size))
        elif form == 1:
            is_in_place = s.in_place()
            result = s.reduced(size)
            given = s.tensor(s.value(s.rank, size), result if is_in_place else None, is_flat=True)
            out = given if is_in_place else s.tensor(size, result, is_flat=True)
            s.expect(ops.all_reduce(given, op, s.group, out=out) is out, "another tensor")
        elif form == 2:
            mine = slice(s.rank * size, (s.rank + 1) * size)
            given = s.tensor(s.value(s.rank, whole), is_flat=True)
            s.returned(ops.reduce_scatter(given, op, s.group), s.reduced(whole)[mine])
        else:
            given = s.tensor(s.value(s.rank, size), is_flat=True)
            if form == 3:
                gathered = np.concatenate([s.model(r, size) for r in range(s.n)])
                s.returned(ops.all_gather(given, s.group), gathered)
            elif form == 4:
                name = resolve_group(s.group).group_name
                found = torch.ops.ringcomm.broadcast(given, s.root, name)
                s.returned(found, s.model(s.root, size))
            else:
                total = s.reduced(size) * (1 if s.is_root else 0)
                name = resolve_group(s.group).group_name
                s.returned(torch.ops.ringcomm.reduce(given, s.root, op, name), total)


# ---- messages


def messages(s: Side) -> Any:
    """Up to four messages between any ranks, each side's posted in an order of its own but for
    those of one pair and tag; one by one, or as a batch."""
    draw = random.Random(s.call.uneven)
    todo = []
    for slot in range(draw.randint(1, 4)):
        source, target = draw.sample(range(s.n), 2)
        size = draw.choice([0, 1, s.call.size, s.call.size])
        todo.append((source, target, draw.randint(0, 2), size, slot))
    keys: dict[Any, float] = {}
    mine = [m for m in todo if s.rank in m[:2]]
    if s.call.variety > 0:
        mine.sort(key=lambda m: keys.setdefault(m[:3], s.own_random.random()))
    works: list[Any] = []
    ops: list[dist.P2POp] = []
    for source, target, tag, size, slot in mine:
        function: Any
        if s.rank == source:
            function, peer, tensor = dist.isend, target, s.tensor(s.value(source, size, slot))
        else:
            function, peer = dist.irecv, source
            tensor = s.tensor(size, s.model(source, size, slot))
        if s.call.variety % 2 == 0:
            works.append(function(tensor, s.members[peer], s.group, tag))
        else:
            ops.append(dist.P2POp(function, tensor, s.members[peer], s.group, tag))
    return dist.batch_isend_irecv(ops) if ops else works


def send_and_receive(s: Side) -> Any:
    """From the root's neighbour to the root, one of the two blocking, or both."""
    source, size, tag = (s.root + 1) % s.n, s.call.size, s.call.uneven % 3
    blocks = (s.call.variety + s.rank) % 3 > 0
    if s.rank == source:
        tensor = s.tensor(s.value(source, size))
        return (dist.send if blocks else dist.isend)(tensor, s.members[s.root], s.group, tag)
    if not s.is_root:
        return None
    tensor = s.tensor(size, s.model(source, size))
    if not blocks:
        return dist.irecv(tensor, s.members[source], s.group, tag)
    s.expect(dist.recv(tensor, s.members[source], s.group, tag) == s.members[source], "source")
    return None


def from_any_source(s: Side) -> Any:
    """Each rank sends the root up to two messages, which it takes as they come."""
    draw = random.Random(s.call.uneven)
    counts = [0 if r == s.root else draw.randint(0, 2) for r in range(s.n)]
    size, tag = s.call.size, 100 + s.number
    if not s.is_root:
        return [
            dist.isend(s.tensor(s.value(s.rank, size, slot)), s.members[s.root], s.group, tag)
            for slot in range(counts[s.rank])
        ]
    buffers = [s.tensor(size) for _ in range(sum(counts))]
    sources: list[int] = []
    works: list[Any] = []
    for buffer in buffers:
        if s.is_async:
            works.append(dist.irecv(buffer, None, s.group, tag))
        else:
            source = dist.recv(buffer, None, s.group, tag)
            sources.append(s.members.index(source) if source in s.members else -1)

    def check() -> None:
        found = sources or [work._source_rank() for work in works]
        s.expect([found.count(r) for r in range(s.n)] == counts, f"sources {found}")
        for idx, source in enumerate(found):
            expected = s.model(source, size, found[:idx].count(source))
            expectation = s.expectations[idx]
            layout = _strides_like(buffers[idx], expectation)
            fill(layout, expected)

    s.checks.append(check)
    return works


def _strides_like(view: Tensor, expectation: Expectation) -> Tensor:
    """The part of what is expected that is where `view` is in its base."""
    return expectation.expected.as_strided(view.size(), view.stride(), view.storage_offset())


# ---- objects, always synchronous


def objects(s: Side) -> None:
    """Each form of collectives of objects, and of messages of them."""
    sizes = [1 + draw for draw in s.sizes()]

    def thing(rank: int) -> Any:
        return {"rank": rank, "call": s.number, "text": "ä" * min(sizes[rank], 5000)}

    order = [1, 0, *range(2, s.n)] if s.is_swapped else list(range(s.n))
    given, todo = thing(s.rank), [thing(rank) for rank in range(s.n)]
    modelled = [todo[rank] for rank in order]
    root = s.members[s.root]
    form = s.call.uneven % 5
    expected: Any = modelled
    found: list[Any] = [None] * s.n
    if form == 0:
        dist.all_gather_object(found, given, s.group)
    elif form == 1:
        dist.gather_object(given, found if s.is_root else None, root, s.group)
        expected = modelled if s.is_root else found
    elif form == 2:
        found = list(todo) if s.is_root else found
        dist.broadcast_object_list(found, root, s.group)
    elif form == 3:
        found, expected = [None], [modelled[s.rank]]
        dist.scatter_object_list(found, todo if s.is_root else None, root, s.group)
    elif s.is_root:
        dist.send_object_list(todo, s.members[(s.root + 1) % s.n], s.group)
        return
    elif s.rank == (s.root + 1) % s.n:
        dist.recv_object_list(found, root, s.group)
    else:
        return
    s.expect(found == expected, f"objects {found} instead of {expected}"[:500])


_COLLECTIVES = (
    *(all_reduce, broadcast, all_gather, reduce_scatter_tensor, all_gather_into_tensor),
    *(reduce_scatter, reduce, gather, scatter, all_to_all, all_to_all_single, barrier),
)
COLLECTIVES: dict[str, Callable[[Side], Any]] = {each.__name__: each for each in _COLLECTIVES}
_OTHERS = (coalesced, operators, messages, send_and_receive, from_any_source, objects)
KINDS = COLLECTIVES | {each.__name__: each for each in _OTHERS}
REDUCTIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced", "operators"),
)
