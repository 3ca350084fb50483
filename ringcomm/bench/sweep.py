"""A sweep: operations and sizes in turn, on fresh ranks or on those that torchrun has started."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.bench.interleave import labelled, open_groups
from ringcomm.bench.mpi import MPI, started_world_size
from ringcomm.bench.operations import OPERATIONS
from ringcomm.bench.point import RINGCOMM, make_bench, measure_point
from ringcomm.bench.ranks import MAX_WORLD_SIZE, Team, run_ranks
from ringcomm.bench.report import Report
from ringcomm.bench.wording import as_option, byte_counts, comparison, microseconds

DEFAULT_SIZES = "1k,16k,256k,4m,64m"
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
DEVICES = ("cpu", "cuda")
AVAILABLE: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": dist.is_nccl_available,
    "ucc": dist.is_ucc_available,
}


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        ops: names of ``OPERATIONS``.
        backends: of c10d; one may be given twice.
        sizes: bytes of the larger buffer of a rank.
        seconds: per size and operation, for all backends.
        repeats: how often a point is measured again, at most, while the machine is disturbed.
    """

    ops: list[str]
    backends: list[str]
    world_size: int
    sizes: list[int]
    dtype: str
    device: str
    seconds: float
    repeats: int

    @property
    def subject(self) -> str:
        """The backend that the others are compared with."""
        return RINGCOMM if RINGCOMM in self.backends else self.backends[0]

    def check(self) -> None:
        """Raises ValueError that says what cannot be measured here."""
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"the world size is 1 to {MAX_WORLD_SIZE}, got {self.world_size}")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError("sizes are at least 1 byte")
        if self.seconds < 0 or self.repeats < 0:
            raise ValueError("seconds and repeats are not negative")
        if "sendrecv" in self.ops and self.world_size == 1:
            raise ValueError("sendrecv needs two ranks at least")
        for name in set(self.ops) - set(OPERATIONS):
            raise ValueError(f"unknown operation {name!r}: there are {', '.join(OPERATIONS)}")
        if "nccl" in self.backends and self.device != "cuda":
            raise ValueError("nccl has no CPU tensors: add --device cuda")
        if MPI in self.backends and started_world_size() is None:
            raise ValueError(f"{MPI} wants ranks that mpiexec has started: mpiexec -n 2 python ...")
        for name in self.backends:
            if name == MPI:
                continue
            if name not in dist.Backend.backend_list:
                raise ValueError(f"torch knows no backend {name!r}")
            if not AVAILABLE.get(name, lambda: True)():
                raise ValueError(f"this torch was built without {name}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("this torch has no CUDA device here")


def add_arguments(parser: ArgumentParser, seconds: float, repeats: int) -> None:
    """Adds the options that every sweep's command line has, with these defaults."""
    add = parser.add_argument
    add(
        "--sizes",
        type=as_option(byte_counts),
        default=DEFAULT_SIZES,
        help="bytes of the larger buffer of a rank, such as 4096,64k,4m",
    )
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=DEVICES, default="cpu", help="nccl needs cuda")
    add("--seconds", type=float, default=seconds, help="per size and operation, for all backends")
    add("--repeats", type=int, default=repeats, help="at most, while the machine is disturbed")


def _run_rank(team: Team, sweep: Sweep) -> None:
    """One rank: every point in turn; rank 0 reports each point's records."""
    device = torch.device("cpu")
    if sweep.device == "cuda":
        device = torch.device("cuda", team.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    bench = make_bench(team, open_groups(team, labelled(sweep.backends)), device)
    dtype = getattr(torch, sweep.dtype)
    versions = {"mpi": bench.groups[MPI].version} if MPI in bench.groups else {}
    for name in sweep.ops:
        for num_bytes in sweep.sizes if OPERATIONS[name].has_data else [0]:
            records = measure_point(bench, name, num_bytes, dtype, sweep.seconds, sweep.repeats)
            if records:
                team.report([{**versions, **record} for record in records])
    dist.destroy_process_group()


def _progress_line(records: list[dict[str, Any]]) -> str:
    """One finished point in a line."""
    first = records[0]
    times = ", ".join(f"{r['backend']} {microseconds(r['p50_us'])} µs" for r in records)
    ratios = " ".join(filter(None, map(comparison, records)))
    state = "" if first["quiet"] else f"; not quiet ({first['others_busy_percent']:.0f} % others)"
    return f"{first['op']} {first['bytes']:,} bytes: {times}; {ratios}{state}"


def run_sweep(sweep: Sweep, path: Path | None) -> int:
    """Measures and prints; appends the records to ``path`` if there is one.

    Under torchrun rank 0 prints and writes.

    Returns:
        The exit code: EXIT_WRONG_RESULTS when any result was wrong.

    Raises:
        RankError: a rank failed.
        OSError: the records cannot be written.
    """
    from ringcomm.bench.screen import sweep_tables  # which needs rich; options do not

    dimensions = {"world_size": sweep.world_size, "dtype": sweep.dtype, "device": sweep.device}
    report = Report("collective", path, **dimensions)

    def on_message(records: list[dict[str, Any]]) -> None:
        report.add(records)
        report.console.print(_progress_line(records))

    run_ranks(sweep.world_size, lambda team: _run_rank(team, sweep), on_message)
    title = f"{sweep.world_size} ranks, {sweep.dtype}, {sweep.device}"
    return report.finish(title, *sweep_tables(report.records, sweep.subject))
