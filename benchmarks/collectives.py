"""Times a collective with several backends on the same buffers, in turn.

Results are verified with exact integers before and after. The time of a call is that of its slowest
rank. Several collectives, separated by commas, are measured in one run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from device_point import CLOCKS
from groups import MPI, labelled, open_groups, run_ranks
from operations import RINGCOMM
from placement import LAYOUTS, preload
from point import make_bench, measure_point
from report import BUSY, Report, before_after, comparison, make_table, state_of
from sweep import DEFAULT_SIZES, Sweep

from ringcomm.measure.ranks import Team, joined_world_size
from ringcomm.measure.screen import (
    as_option,
    byte_counts,
    check_writable,
    microseconds,
    words,
)

if TYPE_CHECKING:
    from rich.table import Table


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
        [*headers, "time / ringcomm's", "algorithm"],
        "The time of a call is that of its slowest rank. Time / ringcomm's: median, in parentheses"
        f" the 10th to 90th percentile; * {BUSY}.",
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
        "Measured before → after the calls. Floor: all ranks scale their buffers in place. Flag:"
        " time until one core sees a write of another, about 0.1 µs within a cache and 0.5 µs"
        " between caches.",
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
