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

One rank measures everything, in turn.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
from cells import Record
from gradient_watch import io_bytes_of
from harness import Bench, Options, flag
from race import OwnClock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm import ops
from ringcomm.measure.timing import Contender, open_default_group
from ringcomm.parallel import activations, get_state_dict, offload, zero
from ringcomm.parallel.offload.device_copies import host_copy
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import empty_row
from ringcomm.screen import counted

FILE_BYTES = 512 << 20
BLOCK_BYTES = 1 << 20
ADAM_SIZES = (1 << 16, 1 << 20, 1 << 24)
LAYERS, WIDTH, ROWS = 12, 1024, (64, 512, 2048)
CHECKED_STEPS = 2

Calls = dict[str, Callable[[], object] | Contender]


def compared(
    bench: Bench, part: str, name: str, calls: Calls, num_bytes: int = 0, seconds: float = 0.0
) -> tuple[Record, dict[str, float]]:
    """A record of ringcomm's call, the first one, beside a peer's if there is one.

    With `num_bytes` it has bytes per second in place of times. And the median seconds of each.
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
    }, {record["way"]: record["p50_us"] * 1e-6 for record in (mine, *others)}


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
    record, _ = compared(bench, "files", f"{direction}, threads", calls, FILE_BYTES)
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
    record, _ = compared(bench, "adam", name, calls, seconds=bench.seconds / 4)
    return record | {"num_threads": num_threads, "verified": is_right}


def measure_adam(bench: Bench) -> list[Record]:
    """A record per size and number of threads."""
    records = []
    for num_threads in dict.fromkeys((1, os.cpu_count() or 1)):
        torch.set_num_threads(num_threads)
        records += [adam_record(bench, n, num_threads) for n in ADAM_SIZES]
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


class Steps:
    """A model, its optimizer, and the two halves of a step, with the bytes that each moves."""

    def __init__(self, x: Tensor, folder: Path | None) -> None:
        """Everything is in files of a folder, or in memory."""
        self.model, self._x = Stack(), x
        self.moved = {"compute": 0, "update": 0}
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True)
        if folder is not None:
            own = offload.Offloaded(
                torch.optim.AdamW(self.model.parameters()), to="nvme", path=folder
            )
            self.optimizer = zero.shard(self.model, own, 3, offload_weights=True)
            assert isinstance(self.optimizer, zero.ZeroInfinity)

    def turn(self) -> dict[str, float]:
        """A step: the seconds of its halves, forward and backward, and the update."""
        halves: dict[str, Callable[[], Any]] = {
            "compute": lambda: self.model(self._x).square().mean().backward(),
            "update": self.optimizer.step,
        }
        seconds = {}
        for half, call in halves.items():
            before = sum(io_bytes_of(self.optimizer))
            begin = time.perf_counter()
            call()
            seconds[half] = time.perf_counter() - begin
            self.moved[half] = sum(io_bytes_of(self.optimizer)) - before
        self.optimizer.zero_grad()
        return seconds

    def values(self) -> list[Tensor]:
        """The weights, which files are read for."""
        return [*get_state_dict(self.model, full=True)[0].values()]


def flop_of(tokens: int) -> int:
    """Of a forward and backward pass, and the forward pass again."""
    return 8 * tokens * LAYERS * WIDTH**2


def phase_records(
    bench: Bench, tokens: int, bandwidth: dict[str, float], folder: Path
) -> list[Record]:
    """Two records: forward and backward, and the update after them."""
    x = torch.randn(tokens, WIDTH)
    files, plain = Steps(x, folder / f"steps{tokens}"), Steps(x, None)
    for steps in (files, plain):
        for _ in range(CHECKED_STEPS):
            steps.turn()
    is_right = all(
        torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)
        for mine, theirs in zip(files.values(), plain.model.state_dict().values(), strict=True)
    )
    records: list[Record] = []
    for phase, name in (("compute", "forward, backward"), ("update", "update")):

        def seconds_of(steps: Steps, phase: str = phase) -> float:
            return steps.turn()[phase]

        calls: Calls = {
            "files": OwnClock(partial(seconds_of, files), bench.align),
            "in memory": OwnClock(partial(seconds_of, plain), bench.align),
        }
        told = f"{name}, {tokens} tokens"
        record, took = compared(bench, "steps", told, calls, seconds=bench.seconds / 2)
        # The time in memory counts as computing; of the update that is AdamW's own.
        alone, moved = took["in memory"], files.moved[phase]
        peak = records[0]["peak_flop_per_s"] if records else flop_of(tokens) / alone
        records.append(
            record
            | {
                "predicted_efficiency": alone / (alone + moved / bandwidth[phase]),
                "peak_flop_per_s": peak,
                "bytes_per_s": bandwidth[phase],
                "moved_bytes": moved,
                "intensity": flop_of(tokens) / moved,
                "verified": is_right,
            }
        )
    files.optimizer.close()
    return records


def checkpoint_record(bench: Bench, tokens: int) -> Record:
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
            x.detach().copy_(host_copy(x.detach().view(-1))[0].view_as(x))

    def gradients(call: Callable[[], None]) -> list[Any]:
        model.zero_grad()
        call()
        return [param.grad for param in model.parameters()]

    name = f"checkpoints in host memory, {tokens} tokens"
    calls: Calls = {"host": offloaded, "in memory": plain, "move": move}
    record, took = compared(bench, "steps", name, calls)
    alone, moving = took["in memory"], took["move"]
    return record | {
        "predicted_efficiency": alone / (alone + moving),
        "peak_flop_per_s": flop_of(tokens) / alone,
        "bytes_per_s": moved_bytes / moving,
        "moved_bytes": moved_bytes,
        "intensity": flop_of(tokens) / moved_bytes,
        "verified": all(map(torch.equal, gradients(offloaded), gradients(plain))),
    }


def bandwidths(files: list[Record]) -> dict[str, float]:
    """Of the phases: the first reads two parts of three, the second as much as it writes."""
    by_name = {record["name"]: record["p50_bytes_per_s"] for record in files}
    read, write = by_name["read, threads"], by_name["write, threads"]
    return {"compute": 3 / (2 / read + 1 / write), "update": 7 / (4 / read + 3 / write)}


def check(options: Options) -> None:
    """Raises ValueError for a folder that is not there."""
    if not options.path.is_dir():
        raise ValueError(f"--path {options.path}: no such folder; name an existing one")
    options.fio = shutil.which("fio") is not None
    if not options.fio:
        print("without fio as a peer: apt-get install fio")


def run_rank(bench: Bench, options: Options) -> None:
    """All parts in turn."""
    with tempfile.TemporaryDirectory(dir=options.path, prefix="offload-") as name:
        folder = Path(name)
        files = measure_files(bench, options, folder)
        bench.report(files)
        bench.report(measure_adam(bench))
        open_default_group(bench.team, "ringcomm")
        for tokens in ROWS:
            bench.report(phase_records(bench, tokens, bandwidths(files), folder))
        bench.report([checkpoint_record(bench, tokens) for tokens in ROWS])


PROGRAM = harness.Program(
    doc=__doc__,
    kind="offload",
    rank=run_rank,
    seconds=8.0,
    per="file, size and number of tokens",
    flags=[flag("--path", Path, harness.ROOT / "build", "on the disk")],
    check=check,
    facts=lambda _: {"file_bytes": FILE_BYTES, "width": WIDTH, "layers": LAYERS},
)

if __name__ == "__main__":
    PROGRAM.run_script()
