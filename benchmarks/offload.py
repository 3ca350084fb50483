#!/usr/bin/env python3
"""Measures offload: files against fio, the CPU's AdamW against torch's, steps against a formula.

    python benchmarks/offload.py --path /mnt/nvme --seconds 10

    files   FileStore's reads and writes past the page cache, and fio's (where it is installed) with
            the same engine, block size and queue depth on the same file system
    adam    optimizer_update_ and torch.optim.AdamW(fused=True), one thread and all
    steps   a step of one process with ZeRO-Infinity in files, in two phases, and one with its
            checkpoints in host memory, beside the same in memory: the share of time that is
            computing, and the share that the paper's formula gives for the bandwidth and the
            speed measured here
    checks  the same step with the checksums of its files, and without

Everything takes turns, round by round. JSON lines are appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from report import Report, table_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weather import Weather

from ringcomm import ops
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.ranks import run_main
from ringcomm.measure.timing import percentiles
from ringcomm.parallel import activations, get_state_dict, offload, zero
from ringcomm.parallel.activations.partition import host_copy
from ringcomm.parallel.offload import transfers
from ringcomm.parallel.offload.transfers import empty_row

MIN_ROUNDS = 5
FILE_BYTES = 512 << 20
BLOCK_BYTES, QUEUE_DEPTH = 1 << 20, 16
ADAM_SIZES = (1 << 16, 1 << 20, 1 << 24)
LAYERS, WIDTH, ROWS = 12, 1024, (64, 512, 2048)

Round = dict[str, float]


def rounds(once: Callable[[bool], Round], seconds: float) -> dict[str, list[float]]:
    """Values by name of some rounds, whose order of turns changes."""
    once(False)  # first touches
    found: dict[str, list[float]] = {}
    begin = time.monotonic()
    number = 0
    while number < MIN_ROUNDS or time.monotonic() - begin < seconds:
        for name, value in once(number % 2 == 1).items():
            found.setdefault(name, []).append(value)
        number += 1
    return found


def timed(call: Callable[[], Any]) -> float:
    """Its seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ratio_of(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """Of neighbours."""
    found = percentiles((a / b for a, b in zip(mine, theirs, strict=True)), "ratio")
    return {name: found[f"{name}_ratio"] for name in ("p50", "p10", "p90")}


# ---- files


def fio(folder: Path, direction: str) -> float:
    """fio's bytes per second, with as many threads as a FileStore has."""
    options = {
        "name": "job",
        "filename": str(folder / "fio"),
        "rw": direction,
        "bs": str(BLOCK_BYTES),
        "size": str(FILE_BYTES // 4),
        "offset_increment": str(FILE_BYTES // 4),
        "numjobs": "4",
        "thread": "1",
        "group_reporting": "1",
        "direct": "1",
        "ioengine": "psync",
        "output-format": "json",
    }
    output = folder / "fio.json"
    command = ["fio", f"--output={output}", *(f"--{k}={v}" for k, v in options.items())]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    found = json.loads(output.read_text(encoding="utf-8"))["jobs"][0]
    return float(found[direction]["bw_bytes"])


def file_record(
    store: offload.FileStore, direction: str, with_fio: bool, seconds: float
) -> dict[str, Any]:
    """One direction, ringcomm's and fio's in turn."""
    row = empty_row(FILE_BYTES, torch.uint8)
    row.copy_((torch.arange(FILE_BYTES // 8) * 2654435761).view(torch.uint8))
    expected = row.clone()
    store.put("row", row).wait()
    move = store.put if direction == "write" else store.get

    def mine() -> float:
        return FILE_BYTES / timed(lambda: move("row", row).wait())

    turns: dict[str, Callable[[], float]] = {"ringcomm": mine}
    if with_fio:
        turns["fio"] = partial(fio, store.path, direction)

    def once(is_swapped: bool) -> Round:
        names = list(turns)[::-1] if is_swapped else list(turns)
        return {name: turns[name]() for name in names}

    found = rounds(once, seconds)
    return {
        "part": "files",
        "name": f"{direction}, threads",
        "is_direct": store.is_direct,
        **percentiles(found["ringcomm"], "bytes_per_s"),
        "peer": "fio",
        "peer_p50_bytes_per_s": median(found["fio"]) if with_fio else None,
        "ratio": ratio_of(found["ringcomm"], found["fio"]) if with_fio else None,
        "verified": torch.equal(row, expected),
    }


def measure_files(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A record per direction."""
    store = offload.FileStore(folder, keep=False, block_bytes=BLOCK_BYTES, queue_depth=QUEUE_DEPTH)
    records = [
        file_record(store, direction, options.fio, options.seconds)
        for direction in ("write", "read")
    ]
    store.close()
    return records


# ---- AdamW


def adam_record(num_elems: int, num_threads: int, seconds: float) -> dict[str, Any]:
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
    turns: dict[str, Callable[[], Any]] = {"ringcomm": mine, "torch": theirs.step}
    num_calls = max(1, (1 << 22) // num_elems)

    def repeated(call: Callable[[], Any]) -> None:
        for _ in range(num_calls):
            call()

    def once(is_swapped: bool) -> Round:
        names = list(turns)[::-1] if is_swapped else list(turns)
        return {name: 1e6 * timed(partial(repeated, turns[name])) / num_calls for name in names}

    found = rounds(once, seconds)
    return {
        "part": "adam",
        "name": f"{num_elems:,} weights, {num_threads} thread{'s' if num_threads > 1 else ''}",
        "num_threads": num_threads,
        **percentiles(found["ringcomm"], "us"),
        "peer": "torch fused",
        "peer_p50_us": median(found["torch"]),
        "ratio": ratio_of(found["torch"], found["ringcomm"]),
        "verified": torch.allclose(param, other, rtol=1e-5, atol=1e-6),
    }


def measure_adam(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record per size and number of threads."""
    records = []
    for num_threads in dict.fromkeys((1, os.cpu_count() or 1)):
        torch.set_num_threads(num_threads)
        seconds = options.seconds / 4
        records += [adam_record(n, num_threads, seconds) for n in ADAM_SIZES]
    torch.set_num_threads(1)
    return records


# ---- steps


class Stack(nn.Module):
    """Layers whose inputs alone are saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
        return x


def measure_steps(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Two records per number of tokens: forward and backward, and the update after them."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("ringcomm", store=store, rank=0, world_size=1)
    records = []
    for tokens in ROWS:
        model, plain = Stack(), Stack()
        own = offload.AdamW(model.parameters(), to="nvme", path=folder / f"steps{tokens}")
        optimizer = zero.shard(model, own, 3, offload_weights=True)
        assert isinstance(optimizer, zero.ZeroInfinity)
        other = torch.optim.AdamW(plain.parameters(), fused=True)
        x = torch.randn(tokens, WIDTH)
        moved: Round = {}

        def compute(model: nn.Module, x: Tensor = x) -> None:
            model(x).square().mean().backward()

        def once(
            is_swapped: bool,
            model: Stack = model,
            plain: Stack = plain,
            optimizer: zero.ZeroInfinity = optimizer,
            other: Any = other,
            moved: Round = moved,
        ) -> Round:
            found: Round = {}
            for name in ("plain", "files") if is_swapped else ("files", "plain"):
                trained, stepper = (model, optimizer) if name == "files" else (plain, other)
                before = sum(optimizer.io_bytes)
                found[f"{name} compute"] = timed(lambda trained=trained: compute(trained))  # type: ignore[misc]
                middle = sum(optimizer.io_bytes)
                found[f"{name} update"] = timed(stepper.step)
                if name == "files":
                    moved.update(compute=middle - before, update=sum(optimizer.io_bytes) - middle)
                stepper.zero_grad()
            return found

        found = rounds(once, options.seconds)
        flop = 8 * tokens * LAYERS * WIDTH**2
        peak = flop / median(found["plain compute"])
        for phase in ("compute", "update"):
            # The time in memory counts as computing; of the update that is AdamW's own.
            alone, whole = found[f"plain {phase}"], found[f"files {phase}"]
            bandwidth = options.bandwidth[phase]
            moving_s = moved[phase] / bandwidth
            predicted = median(alone) / (median(alone) + moving_s)
            records.append(
                {
                    "part": "steps",
                    "name": f"{'forward, backward' if phase == 'compute' else 'update'},"
                    f" {tokens} tokens",
                    **percentiles((1e6 * s for s in whole), "us"),
                    "peer": "in memory",
                    "peer_p50_us": 1e6 * median(alone),
                    "ratio": ratio_of(alone, whole),
                    "predicted_efficiency": predicted,
                    "peak_flop_per_s": peak,
                    "bytes_per_s": bandwidth,
                    "moved_bytes": moved[phase],
                    "intensity": flop / moved[phase],
                    "verified": all(
                        torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)
                        for mine, theirs in zip(
                            get_state_dict(model, full=True)[0].values(),
                            plain.state_dict().values(),
                            strict=True,
                        )
                    ),
                }
            )
        optimizer.close()
    records += [checks_record(tokens, folder, options.seconds) for tokens in ROWS]
    records += [checkpoint_record(tokens, options.seconds) for tokens in ROWS]
    dist.destroy_process_group()
    return records


def checks_record(tokens: int, folder: Path, seconds: float) -> dict[str, Any]:
    """A whole step in files with checksums, and one whose store computes none."""
    x = torch.randn(tokens, WIDTH)
    sums = {"with": transfers.checksum, "without": lambda _: 0}
    models: dict[str, Stack] = {}
    optimizers: dict[str, zero.ZeroInfinity] = {}

    def step(name: str) -> None:
        models[name](x).square().mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def once(is_swapped: bool) -> Round:
        found: Round = {}
        for name in reversed(sums) if is_swapped else sums:
            with mock.patch.object(transfers, "checksum", sums[name]):
                found[name] = timed(partial(step, name))
        return found

    values = {}
    for name, own_sum in sums.items():
        with mock.patch.object(transfers, "checksum", own_sum):
            model = models[name] = Stack()
            own = offload.AdamW(model.parameters(), to="nvme", path=folder / f"{name}{tokens}")
            optimizer = zero.shard(model, own, 3, offload_weights=True)
            assert isinstance(optimizer, zero.ZeroInfinity)
            optimizers[name] = optimizer
    times = rounds(once, seconds)
    for name, own_sum in sums.items():
        with mock.patch.object(transfers, "checksum", own_sum):
            values[name] = [*get_state_dict(models[name], full=True)[0].values()]
            optimizers[name].close()
    return {
        "part": "checks",
        "name": f"step with checksums, {tokens} tokens",
        **percentiles((1e6 * s for s in times["with"]), "us"),
        "peer": "without",
        "peer_p50_us": 1e6 * median(times["without"]),
        "ratio": ratio_of(times["without"], times["with"]),
        "verified": all(map(torch.equal, values["with"], values["without"])),
    }


def checkpoint_record(tokens: int, seconds: float) -> dict[str, Any]:
    """Forward and backward with activation checkpoints in host memory, and without offload."""
    model = Stack()
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    moved_bytes = 2 * LAYERS * x.nbytes

    def plain() -> None:
        model(x).square().mean().backward()

    def offloaded() -> None:
        with activations.partition(offload="cpu", min_elems=0):
            loss = model(x).square().mean()
        loss.backward()

    def move() -> None:
        for _ in range(LAYERS):
            x.detach().copy_(host_copy(x.detach().view(-1)).view_as(x))

    turns = {"plain": plain, "host": offloaded, "move": move}

    def once(is_swapped: bool) -> Round:
        names = list(turns)[::-1] if is_swapped else list(turns)
        return {name: timed(turns[name]) for name in names}

    found = rounds(once, seconds)
    alone, moving = median(found["plain"]), median(found["move"])
    model.zero_grad()
    plain()
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    offloaded()
    grads = [param.grad for param in model.parameters()]
    flop = 8 * tokens * LAYERS * WIDTH**2
    return {
        "part": "steps",
        "name": f"checkpoints in host memory, {tokens} tokens",
        **percentiles((1e6 * s for s in found["host"]), "us"),
        "peer": "in memory",
        "peer_p50_us": 1e6 * alone,
        "ratio": ratio_of(found["plain"], found["host"]),
        "predicted_efficiency": alone / (alone + moving),
        "peak_flop_per_s": flop / alone,
        "bytes_per_s": moved_bytes / moving,
        "moved_bytes": moved_bytes,
        "intensity": flop / moved_bytes,
        "verified": all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(grads, expected, strict=True)
        ),
    }


def bandwidths(files: list[dict[str, Any]]) -> dict[str, float]:
    """Of the phases: the first reads two parts of three, the second as much as it writes."""
    by_name = {record["name"]: record["p50_bytes_per_s"] for record in files}
    read, write = by_name["read, threads"], by_name["write, threads"]
    return {"compute": 3 / (2 / read + 1 / write), "update": 7 / (4 / read + 3 / write)}


def row_of(record: dict[str, Any]) -> list[str]:
    """Formats a record as a table row."""
    if record["part"] == "files":
        mine, theirs = record["p50_bytes_per_s"], record["peer_p50_bytes_per_s"]
        values = [f"{v / 1e9:.2f} GB/s" if v else "–" for v in (mine, theirs)]
    else:
        values = [f"{record[key] / 1e3:.3f} ms" for key in ("p50_us", "peer_p50_us")]
    ratio = record["ratio"]
    shown = f"{ratio['p50']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})" if ratio else "–"
    predicted = record.get("predicted_efficiency")
    return [
        record["part"],
        record["name"],
        values[0],
        record["peer"],
        values[1],
        shown,
        f"{predicted:.2f}" if predicted is not None else "",
        f"{record['others_busy_percent']:.1f}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = harness.make_parser(__doc__, seconds=8.0, per="file, size and number of tokens")
    parser.add_argument("--path", type=Path, default=harness.ROOT / "build", help="on the disk")
    options = parser.parse_args(argv)
    if not options.path.is_dir():
        parser.error(f"--path {options.path}: no such folder; name an existing one")
    options.fio = shutil.which("fio") is not None
    if not options.fio:
        print("without fio as a peer: apt-get install fio")
    options.json = options.json or harness.default_path("offload")
    return options


def main(argv: list[str]) -> int:
    """Measures everything; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    report = Report("offload", options.json, file_bytes=FILE_BYTES, width=WIDTH, layers=LAYERS)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="offload-") as folder:

        def watched(measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
            others = OthersWatch([os.getpid()])
            records = measure()
            weather = Weather(others.percent()).record()
            report.add([record | weather for record in records])
            return records

        files = watched(lambda: measure_files(options, Path(folder)))
        options.bandwidth = bandwidths(files)
        watched(lambda: measure_adam(options))
        watched(lambda: measure_steps(options, Path(folder)))
    headers = [
        "part",
        "what",
        "ringcomm",
        "peer",
        "its",
        "of it (10–90 %)",
        "predicted",
        "others %",
    ]
    caption = (
        "Ratio: for files, the rate / fio's; for adam, torch's time / ringcomm's; for steps, the"
        " time in memory / the time with files. Predicted: by the formula, without overlap."
    )
    table = table_of(headers, caption, report.records, row_of, ("part",))
    return report.finish("offload", table)


if __name__ == "__main__":
    sys.exit(run_main("offload.py", main))
