"""What ranks record, and the trace that is made of it.

The command, and names as in torch's profiler: test_trace_names.py. The recorder alone:
tests/cpp/test_trace.cc.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import buildconfig
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ringcomm import Options, RingcommError, shrink, stats, testing
from ringcomm.trace import recordings
from ringcomm.trace.layout import TRACE_HEADER
from ringcomm.trace.merge import Totals, merge

Event = dict[str, Any]
RING = Options(algorithm="ring")
ENVS: dict[str, list[dict[str, str]]] = {
    "shm": [{}] * 3,
    "messages": [{"RINGCOMM_TRANSPORT": "messages"}] * 3,
    "hosts": [{"RINGCOMM_HOST_ID": host} for host in "aab"],
}
PAGES = """
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <unistd.h>

template <class F>
static F* next(F*, const char* name) { return (F*)dlsym((void*)-1L, name); }

extern "C" long sysconf(int name) noexcept {
  return name == _SC_PAGESIZE ? PAGE_BYTES : next(sysconf, "sysconf")(name);
}
extern "C" void* mmap(void* at, size_t size, int prot, int flags, int fd, long offset) noexcept {
  if (offset % PAGE_BYTES == 0) return next(mmap, "mmap")(at, size, prot, flags, fd, offset);
  errno = EINVAL;
  return (void*)-1L;
}
"""
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
    summary = merge([folder], folder / "trace.json")
    events: list[Event] = json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    assert summary.num_events == len(events)
    check_format(events)
    return events, summary.notes


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


def come_too_late(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="waited for rank 1"):
            dist.all_reduce(torch.ones(4))
    else:
        time.sleep(2.0)


@pytest.mark.slow
def test_a_time_out_is_there(tmp_path: Path) -> None:
    record(tmp_path, come_too_late, world_size=2, group_timeout_s=1.0)
    events, _ = merged(tmp_path)
    assert titles(events) == ["rank 0 (failed)", "rank 1"]
    (failure,) = [e for e in events if e.get("cat") == "note"]
    assert "waited for rank 1" in failure["name"]
    waits = [e for e in of(events, "wait", 0) if e["args"].get("seq") == 1]
    assert [e["name"] for e in waits] == ["wait for rank 1"]
    assert waits[0]["ts"] + waits[0]["dur"] <= failure["ts"]


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


def shared_library(source: Path, library: Path, *options: str) -> str:
    """Compiles one from C++."""
    compiler = buildconfig.compiler()
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C++ compiler")
    command = [*compiler, "-shared", "-fPIC", str(source), *options, "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return str(library)


def meet(rank: int, num_times: int) -> None:
    for _ in range(num_times):
        dist.barrier()


def test_pages_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB, as on some arm64 systems: events are recorded, and read on any machine.

    By a library that pretends such pages, and refuses to map a file at another offset.
    """
    (tmp_path / "pages.cc").write_text(PAGES)
    library = shared_library(tmp_path / "pages.cc", tmp_path / "pages.so", "-DPAGE_BYTES=65536")
    folder = tmp_path / "recorded"
    env = {"LD_PRELOAD": library, "RINGCOMM_TRACE": str(folder), "RINGCOMM_TRACE_EVENTS": "64"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    testing.run_ranks(2, meet, 3)
    processes = recordings.read([folder])
    assert len(processes) == 2
    for process in processes:
        assert len([*recordings.collectives(process)]) == 3


def test_a_recording_of_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    record(tmp_path, meet, 1, world_size=2)
    for path in tmp_path.glob("*.events"):
        path.write_bytes(b"RINGTRC2" + path.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"is a recording of format 'RINGTRC2', and this ringcomm"):
        merge([tmp_path], tmp_path / "trace.json")


def move_to_another_host(log: Path, shift_ns: int) -> None:
    """Makes a recording one of a host whose clock is ahead by `shift_ns`."""
    entries = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    for entry in entries:
        entry["anchor"][1] += shift_ns
    entries[0]["clock"] = f"another {entries[0]['clock']}"
    entries[0]["host"] = f"another-{entries[0]['host']}"
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")


def test_clocks_of_hosts_are_aligned_by_common_calls(tmp_path: Path) -> None:
    """Within what the note says; nothing in common, or clocks that drift: they are not merged."""
    record(tmp_path, meet, 20, world_size=2)
    (log,) = [log for log in tmp_path.glob("*.log") if '"rank": 1' in log.read_text("utf-8")]
    shift_ns = 5_000_000_000
    move_to_another_host(log, shift_ns)
    events, notes = merged(tmp_path)
    (note,) = notes
    within_us = float(note.partition("±")[2].split()[0])
    processes = recordings.read([tmp_path])
    recordings.align(processes)
    assert abs(processes[1].shift_ns + shift_ns) <= within_us * 1000 + 100
    for seq in range(20):
        first, second = (
            e
            for e in sorted(of(events, "collective"), key=lambda e: e["pid"])
            if e["args"]["seq"] == seq
        )
        assert first["ts"] <= second["ts"] + second["dur"] + 0.001
        assert second["ts"] <= first["ts"] + first["dur"] + 0.001
    path = log.with_name(f"{log.name[:-4]}.events")
    path.write_bytes(path.read_bytes()[: TRACE_HEADER.size])
    with pytest.raises(ValueError, match="have no all_reduce or barrier in common"):
        merge([tmp_path], tmp_path / "trace.json")


def test_the_middle_of_what_common_calls_allow_is_taken() -> None:
    """One clock is 1000 ahead; each rank has begun a barrier 40 before the other's end."""

    def process(clock: str, *calls: tuple[int, int]) -> recordings.Process:
        made = recordings.Process({"clock": clock, "host": clock, "pid": 1}, 0)
        made.groups = {0: {"name": "g", "ranks": [0, 1], "rank": int(clock == "ahead")}}
        of_all = {"kind": "collective", "group": 0, "op": "barrier"}
        made.events = {
            0: [
                {**of_all, "seq": seq, "begin_ns": begin, "end_ns": end}
                for seq, (begin, end) in enumerate(calls)
            ]
        }
        return made

    early = process("early", (100, 300), (500, 540))
    ahead = process("ahead", (1100, 1300), (1500, 1540))
    for first, second, shift in ((early, ahead, -1000), (ahead, early, 1000)):
        assert "within ±0.0 µs" in recordings.align([first, second])[1]
        assert second.shift_ns == shift


def test_calls_on_a_device_are_not_those_on_cpus() -> None:
    """They have numbers of their own, and it is known only when they were enqueued."""

    def process(rank: int, *calls: tuple[bool, int]) -> recordings.Process:
        made = recordings.Process({"clock": str(rank), "host": str(rank), "pid": rank}, 0)
        made.groups = {0: {"name": "g", "ranks": [0, 1], "rank": rank}}
        of_all = {"kind": "collective", "group": 0, "op": "barrier", "seq": 0}
        made.events = {
            row: [{**of_all, "on_device": on_device, "begin_ns": at, "end_ns": at + 100}]
            for row, (on_device, at) in enumerate(calls)
        }
        return made

    processes = [process(0, (False, 50), (True, 200)), process(1, (False, 100), (True, 9000))]
    keys = [{key for key, *_ in recordings.collectives(each)} for each in processes]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 2
    assert "within ±0.1 µs" in recordings.align(processes)[1]


def test_a_recording_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    record(folder, meet, 3, world_size=2)
    link = tmp_path / "link"
    link.symlink_to(folder)
    whole = merge([folder], tmp_path / "one.json")
    assert merge([folder, folder, link], tmp_path / "two.json") == whole


def end_log_early(log: Path) -> None:
    """Makes a recording that of a killed process: all lines are of its first millisecond."""
    entries = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    entries = [entry for entry in entries if not {"end", "left"} & entry.keys()]
    ticks, ns = entries[0]["anchor"]
    for entry in entries[1:]:
        entry["anchor"] = [ticks + 1_000_000, ns + 700_000]  # which is wrong
    entries[0]["clock"] = f"another {entries[0]['clock']}"  # the reader's clock adds no moment
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")


def meet_late(rank: int) -> None:
    dist.barrier()
    time.sleep(0.5)
    dist.barrier()


def test_times_of_a_killed_process_are_right_by_the_late_moment(tmp_path: Path) -> None:
    """Though its log ends early: the events' file has a moment by both clocks."""
    record(tmp_path, meet_late, world_size=2)

    def last_begins() -> list[int]:
        found = recordings.read([tmp_path])
        return [max(e["begin_ns"] for _, _, e in recordings.collectives(p)) for p in found]

    expected = last_begins()
    for log in tmp_path.glob("*.log"):
        end_log_early(log)
    assert last_begins() == pytest.approx(expected, abs=1e5)
    for path in tmp_path.glob("*.events"):  # without the moments the line is wrong
        data = path.read_bytes()
        end = TRACE_HEADER.size
        path.write_bytes(data[: end - 32] + bytes(32) + data[end:])
    assert last_begins() != pytest.approx(expected, abs=1e5)


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
    head, *rows, others, longest = totals.lines()
    assert head.split() == [
        "collectives",
        "time",
        "in",
        "them",
        "of",
        "it",
        "waiting",
        "most",
        "for",
    ]
    assert rows[1].split() == ["rank", "1", "1", "2.00", "ms", "500", "µs", "rank", "0"]
    assert others == "the others waited longest for rank 0: 1.00 ms in all"
    assert longest.startswith("the longest: all_reduce #4 of rank 2 3.00 ms, ")
    assert Totals().lines() == []
