"""ringcomm.peer_stats(): which ranks the others have waited for."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import TRANSPORTS
from ranks import in_ranks

import ringcomm

LIMIT_S = 120
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
    """One collective, in which each rank has a share of ELEMS float32."""
    one = torch.ones(ELEMS)
    many = [torch.ones(ELEMS) for _ in range(dist.get_world_size(group))]
    at_root = many if dist.get_rank(group) == 0 else None
    args: tuple[Any, ...] = {
        "all_gather": (many, one),
        "reduce_scatter": (one, many),
        "all_to_all": ([torch.empty(ELEMS) for _ in many], many),
        "gather": (one, at_root, 0),
        "scatter": (one, at_root, 0),
        "broadcast": (one, 0),
        "reduce": (one, 0),
        "barrier": (),
    }.get(op, (one,))
    getattr(dist, op)(*args, group=group)


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
@pytest.mark.parametrize("op", ["all_reduce", "async", "all_gather", "barrier", "all_to_all"])
def test_a_straggler_is_named(rank: int, op: str) -> None:
    """Rank 2 comes late. Over messages the rank behind it in the ring sees it in every call."""
    group = own_group()
    for turn in range(NUM_CALLS):
        come_late(rank, turn)
        if op == "async":
            work: Any = dist.all_reduce(torch.ones(10), group=group, async_op=True)
            work.wait()
        else:
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
def test_nobody_is_named_where_nobody_is_late(rank: int) -> None:
    """Once in ten times: another process may have the processor of a rank."""
    group = own_group()
    for _ in range(10):
        before = ringcomm.peer_stats(group)[1 - rank]["num_late"]
        for _ in range(10 * NUM_CALLS):
            dist.all_reduce(torch.ones(10), group=group)
        late = ringcomm.peer_stats(group)[1 - rank]["num_late"] - before
        most = torch.tensor([late])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most.item() < 5 * NUM_CALLS:  # each rank's share of the calls
            break
    else:
        raise AssertionError(late)
    dist.destroy_process_group(group)


@in_ranks(2)
def test_threads_on_several_groups(rank: int) -> None:
    """Each group counts its own; None adds them up."""
    before = ringcomm.peer_stats().get(1 - rank, {}).get("num_late", 0)
    groups = [own_group() for _ in range(3)]
    failures: list[BaseException] = []

    def run(late: int, group: Any) -> None:
        try:
            for _ in range(NUM_CALLS):
                if rank == late:
                    time.sleep(DELAY_S)
                dist.all_reduce(torch.ones(10), group=group)
                ringcomm.peer_stats(group)
        except BaseException as error:
            failures.append(error)

    # Rank 0 is late in the first group, rank 1 in the second; the third is not used.
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(groups[:2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not failures
    counts = [ringcomm.peer_stats(group)[1 - rank] for group in groups]
    assert NUM_CALLS * 0.5 <= counts[1 - rank]["num_late"] <= NUM_CALLS
    assert counts[rank]["num_late"] < counts[1 - rank]["num_late"]
    assert set(counts[2].values()) == {0}
    total = ringcomm.peer_stats()[1 - rank]["num_late"] - before
    assert total == sum(each["num_late"] for each in counts)
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
