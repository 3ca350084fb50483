"""ringcomm.peer_stats(), and the report of stragglers at destroy_process_group."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, init_group, run_ranks
from test_errors import TRANSPORTS

import _ringcomm_autoload
import ringcomm
from ringcomm import stragglers

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


# ---- the report


def train(rank: int, folder: Path, backend: str, case: str) -> None:
    """A program of three ranks, of which each writes to a file of its own."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    if os.environ.get("RINGCOMM_AS_GLOO"):  # which the import of torch looks at
        _ringcomm_autoload._serve_gloo(dist.distributed_c10d)
    init_group(rank, 3, folder / "store", backend=backend)
    pair = dist.new_group([1, 2])
    try:
        for i in range(20):
            is_dead = case == "dead" and i >= 15
            if rank == 0 and is_dead:
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / f"{i}-{rank}").touch()
            others = [folder / f"{i}-{peer}" for peer in ([1] if is_dead else [0, 1])]
            while rank == 2 and not all(path.exists() for path in others):
                time.sleep(0.001)
            if rank == 2:
                time.sleep(0.02)
            dist.all_reduce(torch.ones(100))
            if case == "groups" and rank > 0:
                dist.barrier(pair)
    except dist.DistBackendError:
        assert case == "dead"
    dist.destroy_process_group()


def run_program(folder: Path, case: str, backend: str = "ringcomm", **env: str) -> list[str]:
    """What each rank writes to stderr."""
    given = {"RINGCOMM_REPORT_STRAGGLERS": "1", **env}
    options: Any = {"may_die": [0]} if case == "dead" else {}
    run_ranks(3, train, folder, backend, case, backend=None, fresh=True, env=given, **options)
    return [(folder / str(rank)).read_text() for rank in range(3)]


def reports(text: str) -> list[str]:
    return re.findall(r"^ringcomm group .*$", text, re.MULTILINE)


LATE = r"rank \d was the last to arrive in \d+ of (1\d|20) collectives; the others waited"


@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("case", ["slow", "dead"])
def test_one_rank_reports_the_straggler(tmp_path: Path, transport: str, case: str) -> None:
    said = run_program(tmp_path, case, **TRANSPORTS[transport] or {})
    lines = [reports(text) for text in said]
    reporter = 1 if case == "dead" else 0
    assert [len(found) for found in lines] == [int(rank == reporter) for rank in range(3)], said
    assert re.search(LATE, lines[reporter][0]), said
    # What all ranks counted, the dead one among them.
    rows = re.findall(r"^ +([012]) +(\d+) .* ([\d.]+) m?s$", said[reporter], re.MULTILINE)
    assert sorted(rank for rank, *_ in rows) == ["0", "1", "2"]
    for rank, num_late, waited in rows:  # a busy machine may stop any rank for longer, once
        assert int(num_late) >= 10 if rank == "2" else float(waited) > 0, said


def test_each_group_reports_where_it_was_used(tmp_path: Path) -> None:
    said = run_program(tmp_path, "groups", "gloo", RINGCOMM_AS_GLOO="1")
    assert [len(reports(text)) for text in said] == [1, 1, 0], said
    assert re.search(r"^ +2 +(1\d|20) ", said[0], re.MULTILINE), said
    assert re.search(r"^ +[12] .*\n +[12] .*\n", said[1], re.MULTILINE), said


def test_nothing_is_reported_unasked(tmp_path: Path) -> None:
    assert not any(map(reports, run_program(tmp_path, "slow", RINGCOMM_REPORT_STRAGGLERS="0")))


def view(*peers: tuple[float, int]) -> list[dict[str, Any]]:
    return [{"waited_s": waited_s, "num_late": num_late} for waited_s, num_late in peers]


def test_the_words_of_the_report() -> None:
    nobody = view((0, 0), (0, 0), (0, 0))
    late = [view((0, 0), (0.5, 9), (20.6, 811)), view((0.001, 1), (0, 0), (20.6, 812)), nobody]
    assert stragglers.text("0", [4, 5, 7], 1000, late) == (
        "ringcomm group 0: rank 7 was the last to arrive in 812 of 1,000 collectives; "
        "the others waited 41.2 s for it\n"
        "  rank  last to arrive  others waited  it waited\n"
        "     7             812         41.2 s     0.0 ms\n"
        "     5               9       500.0 ms     20.6 s\n"
        "     4               1         1.0 ms     21.1 s\n"
    )
    assert stragglers.text("0", [0, 1, 2], 1, [nobody] * 3) == (
        "ringcomm group 0: no rank has waited for another for as long as 100 µs, in 1 collective\n"
    )
    assert stragglers.text("0", [0, 1, 2], 0, [nobody] * 3) == ""
    # Over messages rank 0 waits for rank 1, which waits for rank 2.
    chain = [view((0, 0), (9, 9), (0, 0)), view((0, 0), (0, 0), (9, 9)), []]
    text = stragglers.text("0", [0, 1, 2], 9, chain)
    assert text.startswith("ringcomm group 0: rank 2 was the last to arrive in 9 of 9")
    assert "without what rank 2 counted" in text
