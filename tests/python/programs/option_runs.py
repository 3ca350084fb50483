"""Commands in this process, with everything that they would measure made repeatable.

One rank makes the calls of rank 0, and its clock goes on by reading it, a little further each time:
the same calls have the same times, and more calls have others.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import collectives
import cores
import cross_entropy
import placement
import pytest
import report
import systems
import torch
import torch.distributed as dist
import workload

import _ringcomm.command
from _ringcomm import start as cli
from ringcomm.measure import bench, doctor, job, machine, ranks, timing

VERSIONS = functools.cache(machine.versions)
# Less than commands measure by default.
LESS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (bench, {"SIZES": (1024, 2048), "WIDTH": 8, "HEADS": 1, "LAYERS": 1, "BATCH": 1, "TOKENS": 2}),
    (doctor, {"ALL_REDUCE_BYTES": (1024, 2048)}),
    (timing, {"WARMUP_CALLS": (1, 1), "MIN_ROUNDS": 2}),
)
# What differs from run to run.
NOISE: tuple[tuple[Any, dict[str, Any]], ...] = (
    (machine, {"versions": VERSIONS}),
    (machine, {"memory": lambda: {"total_bytes": 2 << 30, "available_bytes": 1 << 30}}),
    (machine, {"mapped_memory": lambda: dict.fromkeys(("mapped_bytes", "share_bytes"), 0)}),
    (job, {"_sample": lambda ranks: ranks, "_stack_of": lambda rank: []}),
    (os, {"getloadavg": lambda: (1.0, 1.0, 1.0)}),
    (report, {"_commit_facts": lambda: {"commit": None, "dirty": None}}),
    (cross_entropy, {"peak_extra_bytes": lambda call, device: 0}),
)
# Of one rank where there are several, of a GPU where there is none, and of this process.
STANDS_FOR: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch, {"set_num_threads": lambda number: print(f"{number} threads")}),
    (os, {"sched_setaffinity": lambda pid, cpus: None}),
    (signal, {"alarm": lambda seconds: 0}),
    (os, {"execv": lambda path, words: sys.exit(f"again with {os.environ['LD_PRELOAD']}")}),
    (cores, {"modelled": lambda record, *_: record}),
    (systems, {"LEAST_PLANNED": 1, "measured": lambda *_: print("measured")}),
    (workload.Workload, {"plan": lambda self, name, hardware=None: None}),
    (placement, {"count_devices": lambda kind: 2, "find_control": lambda: "mps"}),
    (placement, {"nccl_variables": lambda ranks: {}}),
    (placement, {"Mps": lambda: contextlib.nullcontext(print("MPS"))}),
    (placement.Placement, {"take": lambda self, rank: torch.device("cpu")}),
)


def one_rank(
    world_size: int, main: Callable[[ranks.Team], None], on_message: Callable[[Any], None]
) -> None:
    print(f"{world_size} ranks")
    store = dist.HashStore()
    main(ranks.Team(0, 1, [], on_message, lambda name: dist.PrefixStore(name, store)))


class Others:
    """Other programs, which use a percent less whenever they are looked at."""

    left = 0

    def __init__(self, pids: Any) -> None:
        pass

    def percent(self) -> float:
        Others.left -= 1
        return float(Others.left)


def device_point(bench: Any, where: Any, point: Any) -> list[dict[str, Any]]:
    """What would be measured on a device, and a record for its table."""
    print(where, point)
    ones = ("algbw_gb_per_s", "busbw_gb_per_s", "share_of_floor", "p50_us", "p99_us", "world_size")
    words = {"op": point.name, "type": "float", "reduction": "sum", "clock": point.method.clock}
    words |= {"mode": "eager", "backend": "ringcomm", "dtype": "float32"}
    facts = {"bytes": 8, "count": 2, "algorithms": [], "ratio": None, "wrong_elems": 0}
    return [{**dict.fromkeys(ones, 1.0), **words, **facts, "quiet": True, "verified": True}]


def clock() -> Callable[[], float]:
    ticks, now = 0, 0.0

    def read() -> float:
        nonlocal ticks, now
        ticks += 1
        now += 0.01 + ticks / 1e5
        return now

    return read


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, changes in (*LESS, *NOISE, *STANDS_FOR):
            for name, value in changes.items():
                patch.setattr(module, name, value)
        patch.setattr(collectives, "measure_device_point", device_point)
        read = clock()
        times = SimpleNamespace(**vars(time))
        times.perf_counter = times.monotonic = read
        times.sleep = lambda seconds: None
        benchmarks = str(_ringcomm.command.BENCHMARKS)
        for name, module in list(sys.modules.items()):
            own = name.startswith("ringcomm.measure.") or name == "ringcomm.screen"
            if not own and not str(getattr(module, "__file__", "")).startswith(benchmarks):
                continue
            if getattr(module, "time", None) is time and module is not job:
                patch.setattr(module, "time", times)
            for function, value in (
                ("run_ranks", one_rank),
                ("utc_now", lambda: datetime.datetime(2026, 1, 1)),
                ("OthersWatch", Others),
            ):
                if hasattr(module, function):
                    patch.setattr(module, function, value)
        Others.left = 90
        yield


def seen(argv: list[str], folder: Path, ignored: tuple[str, Any] | None = None) -> tuple[Any, ...]:
    """The status of a command, what it prints, and the files that it leaves in a new folder.

    Of `doctor --job`, whose times are real, numbers of seconds and contents of files are left out.
    `ignored` is the name of an option, and the value that the command sees.
    """
    read = _ringcomm.command.read

    def read_and_ignore(argv: list[str]) -> Any:
        options = read(argv)
        if ignored is not None:
            setattr(options, *ignored)
        return options

    folder.mkdir()
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        repeatable(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        patch.setenv("LD_PRELOAD", "")
        patch.setattr(cli, "read", read_and_ignore)
        try:
            status: Any = cli.run(argv)
        except SystemExit as ended:
            status = ended.code
    text, files = out.getvalue(), sorted(folder.rglob("*"))
    contents = [path.read_bytes() if path.is_file() else None for path in files]
    if "--job" in argv:
        text, contents = re.sub(r"\d+\.\d+|\d+ s\b", "some", text), []
    return status, text, [path.name for path in files], contents
