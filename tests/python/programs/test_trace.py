"""What ranks record, and the trace that is made of it.

The command, and names as in torch's profiler: test_trace_clocks.py. The recorder alone:
tests/cpp/test_recorder.cc.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ringcomm import Options, RingcommError, shrink, stats
from ringcomm.trace import recordings
from ringcomm.trace.merge import Totals, merge

Event = dict[str, Any]
RING = Options(algorithm="ring")
ENVS: dict[str, list[dict[str, str]]] = {
    "shm": [{}] * 3,
    "messages": [{"RINGCOMM_TRANSPORT": "messages"}] * 3,
    "hosts": [{"RINGCOMM_HOST_ID": host} for host in "aab"],
}
# Chunks of two slices and a half.
CHUNK_ELEMS = {"shm": 5 * (256 << 10) // 8, "messages": 5 * (1 << 20) // 8}
NUM_SLICES = 3


def record(
    folder: Path, body: Callable[..., Any], *args: Any, world_size: int = 3, **options: Any
) -> list[Any]:
    """Runs `body` in ranks that record to a folder; their results."""
    env = options.pop("env", [{}] * world_size)
    env = [{"RINGCOMM_TRACE": str(folder), **rank_env} for rank_env in env[:world_size]]
    return run_ranks(world_size, body, *args, fresh=True, env=env, **options)


def merged(folder: Path) -> tuple[list[Event], list[str]]:
    """The events of a folder's trace, which keep the format's rules, and the notes."""
    notes, totals = merge([folder], folder / "trace.json")
    events: list[Event] = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    assert totals[-1].endswith(f", {len(events)} events")
    check_format(events)
    return events, notes


def check_format(events: list[Event]) -> None:
    """Of a row events contain each other or follow each other; halves have a second half."""
    rows: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        assert {"name", "ph", "pid"} <= event.keys(), event
        if event["ph"] != "M":
            assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            place = (event["ts"], -event["dur"])
            rows.setdefault((event["pid"], event["tid"]), []).append(place)
    for places in rows.values():
        around: list[float] = []
        for begin, minus_dur in sorted(places):
            while around and around[-1] <= begin + 0.001:
                around.pop()
            assert not around or begin - minus_dur <= around[-1] + 0.001
            around.append(begin - minus_dur)
    halves = [Counter(e["id"] for e in events if e["ph"] == phase) for phase in "be"]
    assert halves[0] == halves[1]
    assert all(count == 1 for count in halves[0].values())
    arrows = [Counter(e["id"] for e in events if e["ph"] == phase) for phase in "sf"]
    assert arrows[0] == arrows[1]


def titles(events: Iterable[Event]) -> list[str]:
    return [e["args"]["name"] for e in events if e["name"] == "process_name"]


def of(events: Iterable[Event], category: str, rank: int | None = None) -> list[Event]:
    found = [e for e in events if e.get("cat") == category and e["ph"] in "Xb"]
    return [e for e in found if rank in (None, e["pid"])]


# ---- rings


def reduce_around_a_ring(rank: int, num_elems: int) -> int:
    """The bytes that the ring has sent."""
    total = torch.full((num_elems,), float(rank + 1))
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    assert torch.equal(total, torch.full((num_elems,), world_size * (world_size + 1) / 2))
    return stats()["all_reduce", "ring"]["sent_bytes"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("env", ["shm", "messages"])
def test_every_step_of_a_ring_is_there_once(env: str, world_size: int, tmp_path: Path) -> None:
    """2(N-1) steps of each slice: each receives a chunk of the rank before, all but the last send
    it on. Which chunk, written down here once more."""
    args: dict[str, Any] = {"world_size": world_size, "env": ENVS[env], "pg_options": RING}
    num_elems = world_size * CHUNK_ELEMS[env]
    sent = record(tmp_path, reduce_around_a_ring, num_elems, **args)
    events, notes = merged(tmp_path)
    assert notes == []
    for rank in range(world_size):
        found = [e | e["args"] for e in of(events, "step", rank)]
        expected: Counter[tuple[Any, ...]] = Counter()
        before, behind = (rank - 1) % world_size, (rank + 1) % world_size
        for idx in range(1, NUM_SLICES + 1):
            expected["reduce_scatter first send", idx, before, None, behind] += 1
            for step in range(1, world_size):
                chunk = (rank - step - 1) % world_size
                expected[f"reduce_scatter step {step}", idx, chunk, before, behind] += 1
                chunk = (rank - step) % world_size
                to = behind if step < world_size - 1 else None
                expected[f"all_gather step {step}", idx, chunk, before, to] += 1
        keys = ("name", "slice", "chunk", "from", "to")
        assert Counter(tuple(e.get(key) for key in keys) for e in found) == expected
        assert len(found) == NUM_SLICES * (1 + 2 * (world_size - 1))
        assert sum(e["bytes"] for e in found if "to" in e) == sent[rank]
        (call,) = of(events, "collective", rank)
        about = {"op": "sum", "dtype": "float32", "bytes": 4 * num_elems, "algorithm": "ring"}
        assert call["name"] == "all_reduce"
        assert call["args"] == {"group": call["args"]["group"], "seq": 0, **about}
        assert {(e["group"], e["seq"]) for e in found} == {(call["args"]["group"], 0)}
    assert len([e for e in events if e["ph"] in "stf"]) == world_size  # one arrow through all


def gather_around_a_ring(rank: int, num_elems: int) -> None:
    world_size = dist.get_world_size()
    parts = torch.empty(world_size * num_elems)
    dist.all_gather_into_tensor(parts, torch.full((num_elems,), float(rank)))
    assert torch.equal(parts, torch.arange(float(world_size)).repeat_interleave(num_elems))


def test_a_ring_of_an_all_gather_passes_on_only(tmp_path: Path) -> None:
    """Over messages, from 1 MiB in all."""
    record(tmp_path, gather_around_a_ring, 100_000, env=ENVS["messages"])
    for rank in range(3):
        found = of(merged(tmp_path)[0], "step", rank)
        names = [f"all_gather {what}" for what in ("first send", "step 1", "step 2")]
        assert [e["name"] for e in found] == names
        assert [e["args"]["chunk"] for e in found] == [rank, (rank - 1) % 3, (rank - 2) % 3]


# ---- waiting, hanging, dying


def start_without_rank_1(rank: int, folder: Path, expected: set[tuple[int, str]]) -> Any:
    """Rank 1 is late: it waits until the trace has what is expected of the others, and names them.

    Before a rank waits for rank 1, it may wait for others.
    """
    if rank != 1:
        works = [dist.all_reduce(torch.ones(4), async_op=True)]
        if rank == 0:
            works.append(dist.irecv(torch.ones(1), 1))
        for work in works:
            work.wait()
        return None
    deadline = time.monotonic() + 20.0
    found: set[tuple[int, str]] = set()
    names: list[str] = []
    while not expected <= found and time.monotonic() < deadline:
        time.sleep(0.05)
        events, _ = merged(folder)
        unfinished = [e for e in events if "unfinished" in e.get("args", {})]
        found, names = {(e["pid"], e["name"]) for e in unfinished}, titles(events)
    dist.all_reduce(torch.ones(4))
    dist.send(torch.ones(1), 0)
    return found, names


@pytest.mark.parametrize("env", list(ENVS))
def test_a_hang_shows_for_whom_each_rank_waits(env: str, tmp_path: Path) -> None:
    # On several hosts rank 2 waits for the leader of the other host.
    last = "wait for rank 0" if env == "hosts" else "wait for rank 1"
    expected = {(0, "wait for rank 1"), (0, "recv from rank 1"), (2, last)}
    args = (tmp_path, expected)
    found, names = record(tmp_path, start_without_rank_1, *args, env=ENVS[env])[1]
    assert expected <= found
    assert {"rank 0 (still running)", "rank 2 (still running)"} <= set(names)
    events, notes = merged(tmp_path)
    assert notes == []
    assert titles(events) == ["rank 0", "rank 1", "rank 2"]
    assert not [e for e in events if "unfinished" in e.get("args", {})]


def die_in_the_middle(rank: int) -> str:
    dist.barrier()
    if rank == 1:
        dist.irecv(torch.ones(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        meet(rank, 2)
    return str(caught.value)


@pytest.mark.parametrize("env", ["shm", "messages"])
def test_a_killed_rank_leaves_what_it_has_recorded(env: str, tmp_path: Path) -> None:
    errors = record(tmp_path, die_in_the_middle, may_die=[1], env=ENVS[env])
    events, notes = merged(tmp_path)
    assert titles(events) == ["rank 0 (failed)", "rank 1 (ended early)", "rank 2 (failed)"]
    assert any(note.startswith("rank 1 (ended early): pid ") for note in notes)
    assert "barrier" in [e["name"] for e in of(events, "collective", 1)]
    (message,) = of(events, "message", 1)
    assert message["name"] == "recv from rank 0"
    assert "unfinished" in message["args"]
    for rank in (0, 2):
        (failure,) = [e for e in events if e.get("cat") == "note" and e["pid"] == rank]
        assert failure["name"] == errors[rank]
        assert "rank 1" in failure["name"]


# ---- several groups, several hosts


def reduce_in_groups(rank: int) -> None:
    group = dist.new_group([2, 1], pg_options=RING)
    if rank:
        dist.all_reduce(torch.ones(40), group=group)
    if rank == 2:
        dist.send(torch.ones(1), 1, group=group)
    elif rank == 1:
        dist.recv(torch.ones(1), group=group)
    dist.barrier()


def test_ranks_of_a_group_have_their_numbers_in_the_job(tmp_path: Path) -> None:
    record(tmp_path, reduce_in_groups, pg_options=RING)
    events, _ = merged(tmp_path)
    assert titles(events) == ["rank 0", "rank 1", "rank 2"]
    own = of(events, "step", 1)
    assert {e["args"].get("from", 2) for e in own} == {2}
    assert {e["args"].get("to", 2) for e in own} == {2}
    assert len({e["args"]["group"] for e in of(events, "collective", 1)}) == 2
    assert [e["name"] for e in of(events, "message", 1)] == ["recv from rank 2"]
    arrows = Counter(e["id"] for e in events if e["ph"] in "stf")
    assert sorted(arrows.values()) == [2, 3]


def shrink_after_a_death(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RingcommError):
        while True:
            dist.all_reduce(torch.ones(4))
    shrink()
    dist.all_reduce(torch.ones(4))


def test_a_shrunk_group_has_a_name_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, shrink_after_a_death, may_die=[0])
    events, _ = merged(tmp_path)
    groups = [e["args"]["group"] for e in of(events, "collective", 1)]
    assert groups[-1] != groups[0]
    assert groups[-1].startswith(groups[0])


def meet(rank: int, num_times: int) -> None:
    for _ in range(num_times):
        dist.barrier()


# ---- limits


def test_dropped_events_are_counted(tmp_path: Path) -> None:
    env = [{"RINGCOMM_TRACE_EVENTS": "64"}] * 2
    record(tmp_path, meet, 100, world_size=2, env=env)
    events, notes = merged(tmp_path)
    for rank in range(2):
        (process,) = [p for p in recordings.read([tmp_path]) if p.rank == rank]
        dropped = process.num_dropped
        # Of each barrier a call and a collective at least.
        assert dropped >= 200 - 64
        own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert len(own) == 64
        assert max(e["args"]["seq"] for e in own) == 99
        (note,) = [e["name"] for e in events if e.get("cat") == "note" and e["pid"] == rank]
        assert note == f"{dropped} events before this were dropped"
        assert any(f"the oldest {dropped} events were dropped" in note for note in notes)


def record_to(rank: int, folder: Path, is_locked: bool) -> str:
    user = os.geteuid()
    if is_locked and user == 0:  # for whom nothing is locked
        os.seteuid(65534)
    store = dist.HashStore()
    try:
        with pytest.raises((OSError, ValueError)) as caught:
            dist.init_process_group("ringcomm", store=store, rank=0, world_size=1)
    finally:
        os.seteuid(user)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["file", "locked", "number"])
def test_what_cannot_be_recorded_to_is_an_error(kind: str, tmp_path: Path) -> None:
    env = {}
    folder = tmp_path / "folder"
    if kind == "file":
        folder.write_text("")
        expected = "FileExistsError: [Errno 17] RINGCOMM_TRACE: cannot record to the folder"
    elif kind == "locked":
        tmp_path.chmod(0o755)
        folder.mkdir(mode=0o500)
        expected = "PermissionError: [Errno 13] RINGCOMM_TRACE: cannot record to the folder"
    else:
        env = {"RINGCOMM_TRACE_EVENTS": "many"}
        expected = "ValueError: the environment variable RINGCOMM_TRACE_EVENTS must be a whole"
    args: dict[str, Any] = {"world_size": 1, "env": [env], "backend": None}
    (error,) = record(folder, record_to, folder, kind == "locked", **args)
    assert error.startswith(expected)
    assert not folder.is_dir() or not list(folder.iterdir())


def list_files(rank: int) -> list[str]:
    meet(rank, 3)
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [name for name in map(os.readlink, links) if name.endswith(".events")]


def test_off_writes_nothing() -> None:
    assert run_ranks(2, list_files, fresh=True, env={"RINGCOMM_TRACE": ""}) == [[], []]


def test_totals_name_the_rank_that_the_others_wait_for() -> None:
    totals = Totals()
    for rank in range(3):
        totals.add({"name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        about = {"cat": "collective", "pid": rank, "args": {"seq": 4}}
        totals.add({"name": "all_reduce", "dur": 1000.0 * (rank + 1)} | about)
        if rank:
            waited = {"cat": "wait", "pid": rank, "args": {"seq": 4, "rank": 0}}
            totals.add({"name": "wait for rank 0", "dur": 500.0} | waited)
    _, *rows, others, longest = totals.lines()
    assert rows[1].split() == ["rank", "1", "1", "2.00", "ms", "500", "µs", "rank", "0"]
    assert others == "the others waited longest for rank 0: 1.00 ms in all"
    assert longest.startswith("the longest: all_reduce #4 of rank 2 3.00 ms, ")
    assert Totals().lines() == []
