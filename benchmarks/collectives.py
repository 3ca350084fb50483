"""Times a collective with several backends on the same buffers, in turn.

Results are verified with exact integers before and after. The time of a call is that of its slowest
rank. Several collectives, separated by commas, are measured in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from device_point import CLOCKS
from groups import MPI, labelled, open_groups, run_ranks
from mps import Mps, find_control
from operations import OPERATIONS, RINGCOMM
from placement import LAYOUTS, count_devices, preload
from point import make_bench, measure_point
from report import BUSY, Report, before_after, comparison, make_table, state_of

from ringcomm.measure.ranks import Team, joined_world_size, mpi_world_size
from ringcomm.measure.screen import (
    as_option,
    byte_counts,
    check_writable,
    microseconds,
    words,
)
from ringcomm.tuning import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_SIZES = "1k,16k,256k,4m,64m"
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
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
        backends: c10d's backends, ringcomm first; one may be given twice.
        sizes: bytes of the larger buffer of a rank.
        dtypes: torch's names.
        seconds: per size and operation, for all backends together.
        repeats: the maximum number of repeats of a point while the machine is disturbed.
        device: "cpu", or torch's name of another type.
        layout: one of ``LAYOUTS``; like the following, only for devices that are not the CPU.
        clock: of ``CLOCKS``.
        graph: calls per CUDA graph, measured besides the eager ones; 0 for none.
        mps: start NVIDIA's Multi-Process Service for the ranks.
        plot: the file for a plot of the bandwidths.
        html: the file for a page of all points.
    """

    ops: list[str]
    backends: list[str]
    world_size: int
    sizes: list[int]
    dtypes: list[str]
    seconds: float
    repeats: int
    device: str = "cpu"
    layout: str = "all"
    clock: str = "events"
    graph: int = 0
    mps: bool = False
    plot: Path | None = None
    html: Path | None = None

    def points(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Operation, type and bytes of what is measured, in order."""
        for name in self.ops:
            for dtype in self.dtypes:
                for num_bytes in self.sizes if OPERATIONS[name].has_data else [0]:
                    yield name, getattr(torch, dtype), num_bytes

    def check(self) -> None:
        """Raises ValueError for options that cannot be measured here."""
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"the world size must be 1 to {MAX_WORLD_SIZE}, got {self.world_size}")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError("sizes must be 1 byte or more")
        if self.seconds < 0 or self.repeats < 0:
            raise ValueError("seconds and repeats must not be negative")
        if "sendrecv" in self.ops and self.world_size == 1:
            raise ValueError("sendrecv needs at least two ranks")
        for name in set(self.ops) - set(OPERATIONS):
            raise ValueError(f"unknown operation {name!r}: choose from {', '.join(OPERATIONS)}")
        for name in set(self.dtypes) - set(DTYPES):
            raise ValueError(f"unknown type {name!r}: choose from {', '.join(DTYPES)}")
        if self.device == "cpu":
            self._check_on_cpu()
        else:
            self._check_on_devices()

    def _check_on_cpu(self) -> None:
        if self.mps or self.graph or self.plot:
            raise ValueError("--mps, --graph and --plot are for GPUs only: add --device cuda")
        if "nccl" in self.backends:
            raise ValueError("nccl does not support CPU tensors: add --device cuda")
        if MPI in self.backends and mpi_world_size() is None:
            raise ValueError(f"{MPI} needs ranks that mpiexec has started: mpiexec -n 2 python ...")
        self._check_names()
        for name in self.backends:
            if not AVAILABLE.get(name, lambda: True)():
                raise ValueError(f"this torch was built without {name}")

    def _check_on_devices(self) -> None:
        self._check_names()
        if self.graph < 0 or (self.graph and self.device != "cuda"):
            raise ValueError("--graph must be 0 or more calls, and needs --device cuda")
        if self.mps and self.device != "cuda":
            raise ValueError("--mps is for CUDA devices only")
        if self.mps and joined_world_size() is not None:
            raise ValueError(
                "--mps cannot be used under a launcher, which would have to start MPS itself:"
                " leave it out"
            )
        if count_devices(self.device) == 0:
            raise ValueError(f"this torch finds no {self.device} device here")
        if self.mps and find_control() is None:
            Mps()  # which says what is missing

    def _check_names(self) -> None:
        for name in set(self.backends) - {MPI}:
            if name not in dist.Backend.backend_list:
                raise ValueError(f"torch has no backend {name!r}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for ranks, sizes, peers, time and devices."""
    add = parser.add_argument
    names = as_option(words)
    add("--world-size", type=int, default=joined_world_size() or 2, help="number of ranks, 1 to 64")
    add("--peers", type=names, default="gloo", help="backends to compare with, or none")
    add("--json", type=Path, metavar="FILE", help="append one record per backend and size here")
    sizes = "bytes of the larger buffer of a rank, such as 4096,64k,4m"
    add("--sizes", type=as_option(byte_counts), default=DEFAULT_SIZES, help=sizes)
    add("--dtype", type=names, default="float32", help="names of torch's dtypes")
    add(
        "--seconds",
        type=float,
        default=1.0,
        help="per size and operation, for all backends",
    )
    add("--repeats", type=int, default=1, help="of a point disturbed by other programs, at most")
    add("--device", default="cpu", help="cpu, or cuda, to which the options below apply")
    layout = "all: rank i on GPU i mod their number; one: all ranks on the first"
    add("--layout", choices=LAYOUTS, default="all", help=layout)
    clock = "for eager calls: the device's events, or the host's clock around a synchronize"
    add("--clock", choices=CLOCKS, default="events", help=clock)
    graph = "also measure CUDA graphs of this many calls"
    add("--graph", type=int, default=0, metavar="CALLS", help=graph)
    mps = "run NVIDIA's Multi-Process Service during the measurement"
    add("--mps", action=argparse.BooleanOptionalAction, default=False, help=mps)
    add(
        "--nccl-library",
        type=Path,
        metavar="FILE",
        help="a libnccl.so.2 to use instead of torch's",
    )
    add("--plot", type=Path, metavar="FILE", help="draw bus bandwidth by size (PNG, SVG)")
    add("--html", type=Path, metavar="FILE", help="write a page of charts (HTML, one file)")


def sweep_of(options: argparse.Namespace) -> Sweep:
    """The sweep of a command line. Raises ValueError for invalid options.

    With another NCCL library the program restarts itself.
    """
    if options.nccl_library is not None:
        preload(options.nccl_library)
    started = joined_world_size()
    if started not in (None, options.world_size):
        raise ValueError(f"torchrun has started {started} ranks, not {options.world_size}")
    sweep = Sweep(
        ops=options.op.split(","),
        backends=[RINGCOMM, *([] if options.peers == ["none"] else options.peers)],
        world_size=options.world_size,
        sizes=options.sizes,
        dtypes=options.dtype,
        seconds=options.seconds,
        repeats=options.repeats,
        device=options.device,
        layout=options.layout,
        clock=options.clock,
        graph=options.graph,
        mps=options.mps,
        plot=options.plot,
        html=options.html,
    )
    sweep.check()
    check_writable(options.json, options.html, options.plot)
    return sweep


def run(options: argparse.Namespace) -> int:
    """Measures; returns status 3 if a result was wrong."""
    try:
        sweep = sweep_of(options)
    except ValueError as error:
        options.parser.error(str(error))
    return run_sweep(sweep, options.json)


def _run_rank(team: Team, sweep: Sweep) -> None:
    """One rank: every point in turn; rank 0 reports each point's records."""
    bench = make_bench(team, open_groups(team, labelled(sweep.backends)), torch.device("cpu"))
    versions = {"mpi": bench.groups[MPI].version} if MPI in bench.groups else {}
    for name, dtype, num_bytes in sweep.points():
        records = measure_point(bench, name, num_bytes, dtype, sweep.seconds, sweep.repeats)
        if records:
            named = {**versions, "dtype": str(dtype).removeprefix("torch.")}
            team.report([{**named, **record} for record in records])
    dist.destroy_process_group()


def _progress_line(records: list[dict[str, Any]]) -> str:
    """A progress line for a finished point."""
    first = records[0]
    times = ", ".join(f"{r['backend']} {microseconds(r['p50_us'])} µs" for r in records)
    ratios = " ".join(filter(None, map(comparison, records)))
    state = "" if first["quiet"] else f"; not quiet ({first['others_busy_percent']:.0f} % others)"
    mode = f" {first['mode']}" if "mode" in first else ""
    return f"{first['op']} {first['bytes']:,} bytes{mode}: {times}; {ratios}{state}"


def _results_table(records: list[dict[str, Any]]) -> Table:
    headers = ["op", "bytes", "backend", "p50 µs", "p99 µs", "algbw GB/s", "busbw GB/s", "wrong"]
    table = make_table(
        [*headers, "time over ringcomm's", "algorithm"],
        "The slowest rank of each call counts. Time over: median of neighbouring blocks' ratios,"
        f" 10–90 %; * {BUSY}.",
    )
    last = None
    for record in records:
        point = (record["op"], f"{record['bytes']:,}")
        if last not in (None, point):
            table.add_section()
        table.add_row(
            *(point if point != last else ("", "")),
            record["backend"],
            microseconds(record["p50_us"]),
            microseconds(record["p99_us"]),
            f"{record['algbw_gb_per_s']:.3f}",
            f"{record['busbw_gb_per_s']:.3f}",
            f"{record['wrong_elems']:,}",
            comparison(record),
            "+".join(record["algorithms"]),
        )
        last = point
    return table


def _machine_table(records: list[dict[str, Any]]) -> Table:
    table = make_table(
        ["op", "bytes", "floor µs", "flag µs", "others %", "attempts", "state"],
        "Before → after. Floor: in-place scale of each rank's buffer by all at once. Flag: one"
        " core sees what another wrote; about 0.1 where they share a cache, 0.5 where not.",
    )
    points = {(record["op"], record["bytes"]): record for record in records}
    for (op, num_bytes), record in points.items():
        table.add_row(
            op,
            f"{num_bytes:,}",
            before_after(record["floor_us"]),
            before_after(record["flag_us"]),
            f"{record['others_busy_percent']:.1f}",
            str(record["num_attempts"]),
            state_of(record),
        )
    return table


def run_sweep(sweep: Sweep, path: Path | None) -> int:
    """Measures and prints; appends the records to ``path`` if there is one.

    Under torchrun rank 0 prints and writes.

    Returns:
        The exit code: EXIT_WRONG_RESULTS when any result was wrong.

    Raises:
        RankError: a rank failed.
        OSError: the records cannot be written.
    """
    if sweep.device != "cpu":
        from device_sweep import run_device_sweep

        return run_device_sweep(sweep, path, _progress_line)
    facts = {"world_size": sweep.world_size, "device": sweep.device}
    report = Report("collective", path, sweep.html, **facts)

    def on_message(records: list[dict[str, Any]]) -> None:
        report.add(records)
        report.console.print(_progress_line(records))

    def show() -> list[Any]:
        title = f"{sweep.world_size} ranks, {', '.join(sweep.dtypes)}, {sweep.device}"
        return [title, _results_table(report.records), _machine_table(report.records)]

    with report.measuring(show):
        run_ranks(sweep.world_size, lambda team: _run_rank(team, sweep), on_message)
    return report.finish(*show())
