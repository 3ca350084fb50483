#!/usr/bin/env python3
"""Measures offload: files against fio, and the CPU's AdamW against torch's.

    python benchmarks/offload.py --path /mnt/nvme --seconds 10

    files   FileStore's reads and writes past the page cache, and fio's (where it is installed) with
            the same engine, block size and queue depth on the same file system
    adam    optimizer_update_ and torch.optim.AdamW(fused=True), one thread and all

One rank measures everything, in turn. `ringcomm bench systems` has steps of ZeRO-Infinity in files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import harness  # before torch: it sets the number of threads
import torch
from cells import Record
from harness import Bench, Options, flag
from race import OwnClock

from ringcomm import ops
from ringcomm.measure.timing import Contender
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import empty_row
from ringcomm.screen import counted

FILE_BYTES = 512 << 20
BLOCK_BYTES = 1 << 20
ADAM_SIZES = (1 << 16, 1 << 20, 1 << 24)
CHECKED_STEPS = 2

Calls = dict[str, Callable[[], object] | Contender]


def compared(
    bench: Bench, part: str, name: str, calls: Calls, num_bytes: int = 0, seconds: float = 0.0
) -> Record:
    """A record of ringcomm's call, the first one, beside a peer's if there is one.

    With `num_bytes` it has bytes per second in place of times.
    """
    mine, *others = bench.race(calls, next(iter(calls)), seconds=seconds or bench.seconds)
    unit, peer = ("bytes_per_s" if num_bytes else "us"), next(iter(others), None)

    def value(time_us: float) -> float:
        return 1e6 * num_bytes / time_us if num_bytes else time_us

    points = {"p10": "p90", "p50": "p50", "p90": "p10"} if num_bytes else {}
    points = points or {point: point for point in ("p10", "p50", "p90", "p99")}
    ratio = peer["ratio"] if peer else None  # more than 1 where ringcomm is faster
    return {
        "part": part,
        "name": name,
        **{f"{point}_{unit}": value(mine[f"{of}_us"]) for point, of in points.items()},
        "peer": peer["way"] if peer else None,
        f"peer_p50_{unit}": value(peer["p50_us"]) if peer else None,
        "ratio": ratio and {point: ratio[point] for point in ("p50", "p10", "p90")},
        **{key: mine[key] for key in ("others_busy_percent", "quiet", "num_attempts")},
    }


# ---- files


def fio(folder: Path, direction: str) -> float:
    """fio's bytes per second, with as many threads as a FileStore has."""
    share, output = FILE_BYTES // 4, folder / "fio.json"
    sizes = f"--bs={BLOCK_BYTES} --size={share} --offset_increment={share} --rw={direction}"
    how = "--numjobs=4 --thread=1 --group_reporting=1 --direct=1 --ioengine=psync"
    command = f"fio --name=job {sizes} {how} --output-format=json".split()
    command += [f"--filename={folder / 'fio'}", f"--output={output}"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    found = json.loads(output.read_text(encoding="utf-8"))["jobs"][0]
    return float(found[direction]["bw_bytes"])


def file_record(bench: Bench, store: FileStore, direction: str, with_fio: bool) -> Record:
    """One direction, ringcomm's and fio's in turn."""
    row = empty_row(FILE_BYTES, torch.uint8)
    row.copy_((torch.arange(FILE_BYTES // 8) * 2654435761).view(torch.uint8))
    expected = row.clone()
    store.put("row", row).wait()
    move = store.put if direction == "write" else store.get
    calls: Calls = {"ringcomm": lambda: move("row", row).wait()}
    if with_fio:
        calls["fio"] = OwnClock(lambda: FILE_BYTES / fio(store.path, direction), bench.align)
    record = compared(bench, "files", f"{direction}, threads", calls, FILE_BYTES)
    return record | {
        "peer": "fio",
        "is_direct": store.is_direct,
        "verified": torch.equal(row, expected),
    }


def measure_files(bench: Bench, options: Options, folder: Path) -> list[Record]:
    """A record per direction."""
    store = FileStore(folder, block_bytes=BLOCK_BYTES)
    records = [file_record(bench, store, name, options.fio) for name in ("write", "read")]
    store.close()
    return records


# ---- AdamW


def adam_record(bench: Bench, num_elems: int, num_threads: int) -> Record:
    """Both optimizers on separate weights."""
    param, grad = torch.randn(num_elems), torch.randn(num_elems)
    state = {name: torch.zeros(num_elems) for name in ("exp_avg", "exp_avg_sq")}
    other = param.clone()
    other.grad = grad.clone()
    rule = ops.AdamWStep(lr=1e-3)
    num_steps = 0

    def mine() -> None:
        nonlocal num_steps
        num_steps += 1
        ops.optimizer_update_(param, grad, state, optimizer=rule, step=num_steps)

    theirs = torch.optim.AdamW([other], lr=1e-3, fused=True)
    for _ in range(CHECKED_STEPS):
        mine()
        theirs.step()
    is_right = torch.allclose(param, other, rtol=1e-5, atol=1e-6)
    name = f"{num_elems:,} weights, {counted(num_threads, 'thread')}"
    calls: Calls = {"ringcomm": mine, "torch fused": theirs.step}
    record = compared(bench, "adam", name, calls, seconds=bench.seconds / 4)
    return record | {"num_threads": num_threads, "verified": is_right}


def measure_adam(bench: Bench) -> list[Record]:
    """A record per size and number of threads."""
    records = []
    for num_threads in dict.fromkeys((1, os.cpu_count() or 1)):
        torch.set_num_threads(num_threads)
        records += [adam_record(bench, n, num_threads) for n in ADAM_SIZES]
    torch.set_num_threads(1)
    return records


def check(options: Options) -> None:
    """Raises ValueError for a folder that is not there."""
    if not options.path.is_dir():
        raise ValueError(f"--path {options.path}: no such folder; name an existing one")
    options.fio = shutil.which("fio") is not None
    if not options.fio:
        print("without fio as a peer: apt-get install fio")


def run_rank(bench: Bench, options: Options) -> None:
    """Both parts in turn."""
    with tempfile.TemporaryDirectory(dir=options.path, prefix="offload-") as name:
        bench.report(measure_files(bench, options, Path(name)))
        bench.report(measure_adam(bench))


PROGRAM = harness.Program(
    doc=__doc__,
    kind="offload",
    rank=run_rank,
    seconds=8.0,
    per="file, a quarter of it per size of AdamW",
    flags=[flag("--path", Path, harness.ROOT / "build", "on the disk")],
    check=check,
    facts=lambda _: {"file_bytes": FILE_BYTES},
)

if __name__ == "__main__":
    PROGRAM.run_script()
