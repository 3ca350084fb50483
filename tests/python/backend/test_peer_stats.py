"""Counters: ringcomm.stats(), and peer_stats(), which ranks the others have waited for.

In the engine: tests/cpp/test_recorder.cc.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import CALLS, Tensors
from failures import TRANSPORTS, in_threads
from ranks import in_ranks
from torch import Tensor

import ringcomm

NUM_CALLS = 20
DELAY_S = 0.02


def own_group() -> Any:
    """A group of all ranks, whose counters are 0."""
    group = dist.new_group(backend="ringcomm")
    assert all(set(counts.values()) == {0} for counts in ringcomm.peer_stats(group).values())
    return group


def come_late(rank: int, turn: int = 0, delay_s: float = DELAY_S) -> None:
    """Rank 2 comes a while after the others, however busy the machine is."""
    store = dist.distributed_c10d._get_default_store()
    if rank < 2:
        store.set(f"{turn} {rank}", "comes")
    else:
        store.wait([f"{turn} 0", f"{turn} 1"])
        time.sleep(delay_s)


# ---- calls and bytes

ELEMS = 1200  # of each rank's share; a multiple of 2 and 3


def call(op: str, group: Any) -> None:
    CALLS[op](Tensors(dist.get_rank()), ELEMS, group)


# What a rank sends and receives in messages, in shares, on the root and elsewhere; (N-1) is n.
MESSAGES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), ("n",) * 4),
    **dict.fromkeys(("reduce", "gather"), (0, "n", 1, 0)),
    "scatter": ("n", 0, 0, 1),
    "barrier": (0, 0, 0, 0),
}


@in_ranks((2, 3), TRANSPORTS)
def test_calls_and_bytes_of_each_collective(rank: int) -> None:
    size = dist.get_world_size()
    over_messages = os.environ.get("RINGCOMM_TRANSPORT") == "messages"
    for op in (*MESSAGES, "broadcast"):
        group = own_group()
        for turn in range(1, 4):
            call(op, group)
            counts = ringcomm.stats(group)
            assert [name for name, _ in counts] == [op]
            assert sum(entry["num_calls"] for entry in counts.values()) == turn
        peers = ringcomm.peer_stats(group)
        assert sorted(peers) == [peer for peer in range(size) if peer != rank]
        sent = sum(counts["sent_bytes"] for counts in peers.values())
        received = sum(counts["received_bytes"] for counts in peers.values())
        if not over_messages:
            assert sent == received == 0
            continue
        assert sent == sum(entry["sent_bytes"] for entry in ringcomm.stats(group).values())
        if op in MESSAGES:  # a broadcast goes down a tree
            shares = [size - 1 if n == "n" else n for n in MESSAGES[op][2 * (rank > 0) :][:2]]
            assert [sent, received] == [3 * 4 * ELEMS * n for n in shares], op
        total = torch.tensor([sent, received])
        dist.all_reduce(total)
        assert total[0] == total[1]
        dist.destroy_process_group(group)


@in_ranks(3)
def test_a_ring_has_bytes_for_its_neighbours(rank: int) -> None:
    group: Any = dist.new_group(
        backend="ringcomm", pg_options=ringcomm.Options(algorithm="ring", transport="messages")
    )
    dist.all_reduce(torch.ones(3_000_000), group=group)
    peers = ringcomm.peer_stats(group)
    to, frm = (rank + 1) % 3, (rank + 2) % 3
    assert [peers[to]["sent_bytes"], peers[to]["received_bytes"]] == [16_000_000, 0]
    assert [peers[frm]["sent_bytes"], peers[frm]["received_bytes"]] == [0, 16_000_000]
    dist.destroy_process_group(group)


@in_ranks(3, TRANSPORTS)
def test_messages(rank: int) -> None:
    """Bytes by peer, also of a receive from any source, and the wait for a late sender."""
    group = own_group()
    x = torch.ones(1000)
    come_late(rank, delay_s=25 * DELAY_S)
    if rank == 2:
        dist.send(x, 0, group=group)
        dist.send(x[:10], 1, group=group)
    elif rank == 0:
        assert dist.recv(x, group=group) == 2  # from any source
        dist.send(x[:7], 1, group=group)
    else:
        dist.recv(x[:10], 2, group=group)
        dist.recv(x[:7], 0, group=group)
    dist.barrier(group)
    expected = {
        0: {1: (28, 0), 2: (0, 4000)},
        1: {0: (0, 28), 2: (0, 40)},
        2: {0: (4000, 0), 1: (40, 0)},
    }[rank]
    peers = ringcomm.peer_stats(group)
    found = {p: (counts["sent_bytes"], counts["received_bytes"]) for p, counts in peers.items()}
    assert found == expected
    if rank < 2:
        assert peers[2]["num_waits"] >= 1
        assert peers[2]["waited_s"] > 0
    dist.destroy_process_group(group)


# ---- who was late


@in_ranks(3, TRANSPORTS)
@pytest.mark.parametrize(
    "op", ["all_reduce", "asynchronous all_reduce", "all_gather", "barrier", "all_to_all"]
)
def test_a_straggler_is_named(rank: int, op: str) -> None:
    """Rank 2 comes late. Over messages the rank behind it in the ring sees it in every call."""
    group = own_group()
    for turn in range(NUM_CALLS):
        come_late(rank, turn)
        call(op, group)
    assert sum(entry["num_calls"] for entry in ringcomm.stats(group).values()) == NUM_CALLS
    peers = ringcomm.peer_stats(group)
    sees = rank == 0 or (rank == 1 and os.environ.get("RINGCOMM_TRANSPORT") != "messages")
    if sees:
        assert NUM_CALLS * 0.7 <= peers[2]["num_late"] <= NUM_CALLS
        assert peers[2]["num_waits"] >= peers[2]["num_late"]
        assert peers[2]["waited_s"] > 0
    assert sum(counts["num_late"] for counts in peers.values()) <= NUM_CALLS
    dist.destroy_process_group(group)


@in_ranks(2)
def test_each_group_counts_its_own(rank: int) -> None:
    """While both are used; None adds them up. Rank 0 is late in the first, rank 1 in the second."""
    before = ringcomm.peer_stats().get(1 - rank, {}).get("num_late", 0)
    groups = [own_group() for _ in range(3)]

    def use(late: int) -> None:
        for _ in range(NUM_CALLS):
            time.sleep(DELAY_S * (rank == late))
            dist.all_reduce(torch.ones(10), group=groups[late])
            ringcomm.peer_stats(groups[late])

    in_threads(use, range(2))
    first, second, unused = (ringcomm.peer_stats(group)[1 - rank] for group in groups)
    mine, others = (first, second) if rank == 0 else (second, first)
    assert NUM_CALLS * 0.5 <= others["num_late"] <= NUM_CALLS
    assert mine["num_late"] < others["num_late"]
    assert set(unused.values()) == {0}
    total = ringcomm.peer_stats()[1 - rank]["num_late"] - before
    assert total == mine["num_late"] + others["num_late"]
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


@in_ranks(3)
def test_peers_have_their_ranks_in_the_job(rank: int) -> None:
    group: Any = dist.new_group([1, 2])
    if rank > 0:
        assert set(ringcomm.peer_stats(group)) == {3 - rank}
    alone: Any = dist.new_group([rank], use_local_synchronization=True)
    assert ringcomm.peer_stats(alone) == {}
    assert set(ringcomm.peer_stats()) == {0, 1, 2} - {rank}


# ---- whatever the way that a call is made in


def at_once(call: Callable[..., Any]) -> None:
    assert call() is None


def by_future(call: Callable[..., Any]) -> None:
    call(async_op=True).get_future().wait()


def profiled(call: Callable[..., Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert call() is None
    assert any(event.key.startswith("ringcomm:") for event in profiler.key_averages())


MADE: dict[str, Callable[[Tensor, Tensor], Callable[..., Any]]] = {
    "all_reduce": lambda part, whole: partial(dist.all_reduce, whole),
    "broadcast": lambda part, whole: partial(dist.broadcast, whole, 2),
    "all_gather": lambda part, whole: partial(dist.all_gather_into_tensor, whole, part),
    "reduce_scatter": lambda part, whole: partial(dist.reduce_scatter_tensor, part, whole),
    "all_to_all": lambda part, whole: partial(dist.all_to_all_single, torch.empty(6), whole),
}
# What differs between the records of equal calls: when and where, and what had to be waited for.
PASSING = {"number", "group", "begin_ns", "end_ns", "waits_for"} | {
    *("step", "num_steps", "slice", "num_slices"),
}


@in_ranks(3, TRANSPORTS)
def test_counters_and_the_recorder_see_the_same(rank: int, tmp_path: Path) -> None:
    """The counters of the process have those of groups that have ended."""
    for name, make in MADE.items():
        seen = []
        for run in (at_once, by_future, profiled):
            group: Any = dist.new_group(backend="ringcomm")
            whole = ringcomm.stats()
            run(partial(make(torch.ones(2), torch.ones(6)), group=group))
            counts = ringcomm.stats(group)
            path = ringcomm.flight_dump(f"{tmp_path}/{name}-")
            recorded = pickle.loads(path.read_bytes())["processes"][0]["calls"][-1]
            seen.append((counts, {k: v for k, v in recorded.items() if k not in PASSING}))
            dist.destroy_process_group(group)
            ((key, of_group),) = counts.items()
            of_process = ringcomm.stats()[key]
            for what, before in whole.get(key, dict.fromkeys(of_group, 0)).items():
                assert of_process[what] == before + of_group[what], (name, key, what)
        assert seen == [seen[0]] * len(seen), name
        assert seen[0][1]["op"] == name
