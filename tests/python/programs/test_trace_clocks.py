"""Recordings of several processes: clocks, formats, pages, names, what a killed process leaves.

Names of calls are those of torch's profiler and of NVTX ranges.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import buildconfig
import pytest
import torch
import torch.distributed as dist
from test_trace import meet, merged, of, record

from ringcomm import _C, testing
from ringcomm.trace import recordings
from ringcomm.trace.layout import TRACE_HEADER
from ringcomm.trace.merge import merge

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


def process(clock: str, rank: int, *calls: dict[str, Any]) -> recordings.Process:
    """One of two ranks, with a barrier in each row."""
    made = recordings.Process({"clock": clock, "host": clock, "pid": 1}, 0)
    made.groups = {0: {"name": "g", "ranks": [0, 1], "rank": rank}}
    of_all = {"kind": "collective", "group": 0, "op": "barrier", "seq": 0}
    made.events = {row: [of_all | call] for row, call in enumerate(calls)}
    return made


def test_the_middle_of_what_common_calls_allow_is_taken() -> None:
    """One clock is 1000 ahead; each rank has begun a barrier 40 before the other's end."""

    def barriers(*times: tuple[int, int]) -> list[dict[str, int]]:
        return [
            {"seq": seq, "begin_ns": begin, "end_ns": end} for seq, (begin, end) in enumerate(times)
        ]

    early = process("early", 0, *barriers((100, 300), (500, 540)))
    ahead = process("ahead", 1, *barriers((1100, 1300), (1500, 1540)))
    for first, second, shift in ((early, ahead, -1000), (ahead, early, 1000)):
        assert "within ±0.0 µs" in recordings.align([first, second])[1]
        assert second.shift_ns == shift


def test_calls_on_a_device_are_not_those_on_cpus() -> None:
    """They have numbers of their own, and it is known only when they were enqueued."""

    def barriers(*calls: tuple[bool, int]) -> list[dict[str, int]]:
        return [
            {"on_device": on_device, "begin_ns": at, "end_ns": at + 100} for on_device, at in calls
        ]

    processes = [
        process("0", 0, *barriers((False, 50), (True, 200))),
        process("1", 1, *barriers((False, 100), (True, 9000))),
    ]
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


# ---- names

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def shared_library(source: Path, library: Path, *options: str) -> str:
    """Compiles one from C++."""
    compiler = buildconfig.compiler()
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C++ compiler")
    command = [*compiler, "-shared", "-fPIC", str(source), *options, "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return str(library)


def call_everything(rank: int) -> None:
    own, whole, parts = torch.ones(6), torch.ones(12), [torch.ones(3), torch.ones(3)]
    for is_async in (False, True):
        works = [
            dist.all_reduce(own, async_op=is_async),
            dist.broadcast(own, 0, async_op=is_async),
            dist.all_gather(parts, torch.ones(3), async_op=is_async),
            dist.all_gather_into_tensor(whole, own, async_op=is_async),
            dist.reduce_scatter_tensor(own, whole, async_op=is_async),
            dist.all_to_all_single(own, own.clone(), async_op=is_async),
            dist.barrier(async_op=is_async),
        ]
        works.append(dist.isend(own, 1) if rank == 0 else dist.irecv(own, 0))
        works.append(dist.isend(own, 0, tag=5) if rank else dist.irecv(own, tag=5))
        for work in works:
            if work is not None:
                work.wait()


def count_own(names: Iterable[str]) -> Counter[str]:
    return Counter(name for name in names if name.startswith("ringcomm:"))


def profile_everything(rank: int) -> Counter[str]:
    """The names that the profiler shows of a rank's calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call_everything(rank)
    return count_own(event.name for event in profiler.events())


def test_calls_have_the_names_of_the_profiler(tmp_path: Path) -> None:
    profiled = record(tmp_path, profile_everything, world_size=2)
    events, _ = merged(tmp_path)
    for rank in range(2):
        calls = of(events, "call", rank)
        assert Counter(e["name"] for e in calls) == profiled[rank]
        assert profiled[rank]["ringcomm:_all_gather_base"] == 2
        inside = of(events, "collective", rank)
        assert len(inside) == 14
        assert [e["args"]["seq"] for e in sorted(inside, key=lambda e: e["ts"])] == [*range(14)]
        messages = {(e["name"], e["args"]["tag"]) for e in of(events, "message", rank)}
        peer = 1 - rank
        first, second = ("send to", "recv from") if rank == 0 else ("recv from", "send to")
        assert messages == {(f"{first} rank {peer}", 0), (f"{second} rank {peer}", 5)}
        assert {e["args"]["bytes"] for e in of(events, "message", rank)} == {24}


def test_a_trace_knows_every_title() -> None:
    """Events have the place of a call's title in a table."""
    csrc = Path(__file__).resolve().parents[3] / "csrc"
    texts = [path.read_text("utf-8") for path in csrc.glob("**/bindings/*.cc")]
    table = re.compile(r"kTitles\[\] = \{.*?\};", re.S)
    calls = [table.sub("", text) for text in texts]
    used = {title for text in calls for title in re.findall(r'"(ringcomm:\w+)"', text)}
    titles = _C.recorder_names()["title"]
    assert used == set(titles)
    assert len(titles) == len(set(titles)) < 256


def put_ranges_around_everything(rank: int, library: str) -> Counter[str]:
    ranges = ctypes.CDLL(library)
    ranges.found.restype = ctypes.c_char_p
    ranges.start()
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment, misc]
    with torch.autograd.profiler.emit_nvtx(record_shapes=False):
        call_everything(rank)
    found = ranges.found().decode().splitlines()
    return count_own(name.partition(",")[0] for name in found)


def test_nvtx_ranges_have_the_names_of_the_trace(tmp_path: Path) -> None:
    """torch's own emit_nvtx(), over ranges that a library of this test keeps."""
    torch_folder = Path(torch.__file__).parent
    options = ["-std=c++20", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    options += ["-ltorch_cpu", "-lc10"]
    library = shared_library(SUPPORT / "nvtx_ranges.cc", tmp_path / "nvtx_ranges.so", *options)
    folder = tmp_path / "recorded"
    ranges = record(folder, put_ranges_around_everything, library, world_size=2)
    events, _ = merged(folder)
    for rank in range(2):
        assert Counter(e["name"] for e in of(events, "call", rank)) == ranges[rank]


def call_in_a_thread_of_odd_name(rank: int) -> None:
    """As Python 3.14 names a thread: by the first 15 bytes of a text in UTF-8."""

    def call() -> None:
        ctypes.CDLL(None).prctl(15, "Überträger für ö".encode()[:15])  # PR_SET_NAME
        dist.barrier()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)


def test_a_thread_whose_name_is_not_unicode(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/64345: the whole recording was lost."""
    record(tmp_path, call_in_a_thread_of_odd_name, world_size=2)
    assert "barrier" in {e["name"] for e in merged(tmp_path)[0]}
