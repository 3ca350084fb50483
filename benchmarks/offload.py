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

Everything takes turns, round by round.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from harness import Options, Report, flag
from race import Weather
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm import ops
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.timing import percentiles
from ringcomm.parallel import activations, get_state_dict, offload, zero
from ringcomm.parallel.offload.device_copies import host_copy
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import empty_row
from ringcomm.screen import counted

MIN_ROUNDS = 5
FILE_BYTES = 512 << 20
BLOCK_BYTES = 1 << 20
ADAM_SIZES = (1 << 16, 1 << 20, 1 << 24)
LAYERS, WIDTH, ROWS = 12, 1024, (64, 512, 2048)

Record = dict[str, Any]


def rounds(turns: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    """Values by name of some rounds; every second one has its turns in reverse order."""
    names = list(turns)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # first touches
        turns[name]()
    begin, number = time.monotonic(), 0
    while number < MIN_ROUNDS or time.monotonic() - begin < seconds:
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(turns[name]())
        number += 1
    return found


def timed(call: Callable[[], Any]) -> float:
    """Its seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _compared(
    part: str, name: str, mine: list[float], peer: str, theirs: list[float] | None, unit: str = "us"
) -> Record:
    """The fields of seconds, or of rates, beside a peer's if there is one."""
    is_time = unit == "us"
    scale, ratio = 1e6 if is_time else 1, None
    if theirs:  # of neighbours, more than 1 where ringcomm is faster
        pairs = zip(mine, theirs, strict=True)
        found = percentiles((b / a if is_time else a / b for a, b in pairs), "ratio")
        ratio = {name: found[f"{name}_ratio"] for name in ("p50", "p10", "p90")}
    return {
        "part": part,
        "name": name,
        **percentiles((scale * value for value in mine), unit),
        "peer": peer,
        f"peer_p50_{unit}": scale * median(theirs) if theirs else None,
        "ratio": ratio,
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


def file_record(store: FileStore, direction: str, with_fio: bool, seconds: float) -> Record:
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
    found, name = rounds(turns, seconds), f"{direction}, threads"
    return {
        **_compared("files", name, found["ringcomm"], "fio", found.get("fio"), "bytes_per_s"),
        "is_direct": store.is_direct,
        "verified": torch.equal(row, expected),
    }


def measure_files(options: Options, folder: Path) -> list[Record]:
    """A record per direction."""
    store = FileStore(folder, block_bytes=BLOCK_BYTES)
    records = [file_record(store, name, options.fio, options.seconds) for name in ("write", "read")]
    store.close()
    return records


# ---- AdamW


def adam_record(num_elems: int, num_threads: int, seconds: float) -> Record:
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
    num_calls = max(1, (1 << 22) // num_elems)

    def repeated(call: Callable[[], Any]) -> float:
        return timed(lambda: [call() for _ in range(num_calls)]) / num_calls

    turns = {"ringcomm": partial(repeated, mine), "torch": partial(repeated, theirs.step)}
    found = rounds(turns, seconds)
    name = f"{num_elems:,} weights, {counted(num_threads, 'thread')}"
    return {
        **_compared("adam", name, found["ringcomm"], "torch fused", found["torch"]),
        "num_threads": num_threads,
        "verified": torch.allclose(param, other, rtol=1e-5, atol=1e-6),
    }


def measure_adam(options: Options) -> list[Record]:
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
            before = self._io_bytes()
            seconds[half] = timed(call)
            self.moved[half] = self._io_bytes() - before
        self.optimizer.zero_grad()
        return seconds

    def values(self) -> list[Tensor]:
        """The weights, which files are read for."""
        return [*get_state_dict(self.model, full=True)[0].values()]

    def _io_bytes(self) -> int:
        return sum(getattr(self.optimizer, "io_bytes", ()))


def measure_steps(options: Options, folder: Path) -> list[Record]:
    """Records by number of tokens: of the phases of a step, and of checkpoints."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("ringcomm", store=store, rank=0, world_size=1)
    records = [one for tokens in ROWS for one in phase_records(tokens, options, folder)]
    records += [checkpoint_record(tokens, options.seconds) for tokens in ROWS]
    dist.destroy_process_group()
    return records


def flop_of(tokens: int) -> int:
    """Of a forward and backward pass, and the forward pass again."""
    return 8 * tokens * LAYERS * WIDTH**2


def phase_records(tokens: int, options: Options, folder: Path) -> list[Record]:
    """Two records: forward and backward, and the update after them."""
    x = torch.randn(tokens, WIDTH)
    files, plain = Steps(x, folder / f"steps{tokens}"), Steps(x, None)
    found: dict[str, list[float]] = {}

    def turn(name: str, steps: Steps) -> float:
        for half, seconds in steps.turn().items():
            found.setdefault(f"{name} {half}", []).append(seconds)
        return 0.0

    rounds(
        {n: partial(turn, n, s) for n, s in (("files", files), ("plain", plain))}, options.seconds
    )
    names = {"compute": "forward, backward", "update": "update"}
    is_right = all(
        torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)
        for mine, theirs in zip(files.values(), plain.model.state_dict().values(), strict=True)
    )
    files.optimizer.close()
    peak = flop_of(tokens) / median(found["plain compute"][1:])
    records = []
    for phase, name in names.items():
        # The time in memory counts as computing; of the update that is AdamW's own.
        alone, whole = found[f"plain {phase}"][1:], found[f"files {phase}"][1:]
        moved, bandwidth = files.moved[phase], options.bandwidth[phase]
        records.append(
            {
                **_compared("steps", f"{name}, {tokens} tokens", whole, "in memory", alone),
                "predicted_efficiency": median(alone) / (median(alone) + moved / bandwidth),
                "peak_flop_per_s": peak,
                "bytes_per_s": bandwidth,
                "moved_bytes": moved,
                "intensity": flop_of(tokens) / moved,
                "verified": is_right,
            }
        )
    return records


def checkpoint_record(tokens: int, seconds: float) -> Record:
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

    turns = {"plain": plain, "host": offloaded, "move": move}
    found = rounds({name: partial(timed, call) for name, call in turns.items()}, seconds)
    alone, moving = median(found["plain"]), median(found["move"])
    name = f"checkpoints in host memory, {tokens} tokens"
    return {
        **_compared("steps", name, found["host"], "in memory", found["plain"]),
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


def measure(options: Options, report: Report) -> None:
    """All parts in turn."""
    with tempfile.TemporaryDirectory(dir=options.path, prefix="offload-") as folder:

        def watched(measure: Callable[[], list[Record]]) -> list[Record]:
            others = OthersWatch([os.getpid()])
            records = measure()
            weather = Weather(others.percent()).record()
            report.add([record | weather for record in records])
            return records

        files = watched(lambda: measure_files(options, Path(folder)))
        options.bandwidth = bandwidths(files)
        watched(lambda: measure_adam(options))
        watched(lambda: measure_steps(options, Path(folder)))


PROGRAM = harness.Program(
    doc=__doc__,
    kind="offload",
    measure=measure,
    seconds=8.0,
    per="file, size and number of tokens",
    flags=[flag("--path", Path, harness.ROOT / "build", "on the disk")],
    check=check,
    facts=lambda _: {"file_bytes": FILE_BYTES, "width": WIDTH, "layers": LAYERS},
)

if __name__ == "__main__":
    PROGRAM.run_script()
