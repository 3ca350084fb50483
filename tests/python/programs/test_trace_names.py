"""Names in a trace: those of calls are those of torch's profiler and of NVTX ranges."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import buildconfig
import pytest
import torch
import torch.distributed as dist
from test_trace import merged, of, record

from ringcomm import _C

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
