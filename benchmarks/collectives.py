"""Times a collective with several backends on the same buffers, in turn.

Results are verified with exact integers before and after. The time of a call is that of its slowest
rank. Several collectives, separated by commas, are measured in one run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import device_sweep
import placement
import torch.distributed as dist
from device_point import CLOCKS
from groups import MPI, labelled, open_groups, run_ranks
from operations import RINGCOMM
from point import measure_point
from race import Bench, make_bench
from report import BUSY, Record, Report, before_after, comparison, make_table, state_of
from sweep import DEFAULT_SIZES, DEVICE_KIND, check, points

from ringcomm.measure.ranks import Team, joined_world_size
from ringcomm.screen import (
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
    placement.add_sharing(parser)
    name, how = placement.NCCL_FLAG
    add(name, **how)
    clock = "for eager calls: the device's events, or the host's clock around a synchronize"
    add("--clock", choices=CLOCKS, default="events", help=clock)
    graph = "also measure CUDA graphs of this many calls"
    add("--graph", type=int, default=0, metavar="CALLS", help=graph)
    add("--plot", type=Path, metavar="FILE", help="draw bus bandwidth by size (PNG, SVG)")
    add("--html", type=Path, metavar="FILE", help="write a page of charts (HTML, one file)")


def prepare(options: argparse.Namespace) -> None:
    """Completes the options of a command line. Raises ValueError for invalid ones.

    With another NCCL library the program restarts itself.
    """
    if options.nccl_library is not None:
        placement.preload(options.nccl_library)
    started = joined_world_size()
    if started not in (None, options.world_size):
        raise ValueError(f"torchrun has started {started} ranks, not {options.world_size}")
    options.backends = [RINGCOMM, *([] if options.peers == ["none"] else options.peers)]
    check(options)
    options.placement = placement.placement_of(options)
    check_writable(options.json, options.html, options.plot)


def run_rank(bench: Bench, options: argparse.Namespace) -> None:
    """Every point in turn; rank 0 reports each one's records."""
    versions = {"mpi": bench.groups[MPI].version} if MPI in bench.groups else {}
    for name, dtype, num_bytes in points(options):
        records = measure_point(bench, name, num_bytes, dtype)
        named = {**versions, "dtype": str(dtype).removeprefix("torch.")}
        bench.report([{**named, **record} for record in records])


def _start_rank(team: Team, options: argparse.Namespace) -> None:
    bench = make_bench(team, options)
    groups = open_groups(team, labelled(options.backends))
    on_device = not options.placement.is_cpu
    (device_sweep.run_rank if on_device else run_rank)(replace(bench, groups=groups), options)
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


def _show_on_cpu(options: argparse.Namespace, records: list[Record]) -> list[Any]:
    title = f"{options.world_size} ranks, {', '.join(options.dtype)}, {options.device}"
    return [title, _results_table(records), _machine_table(records)]


def _exclude(options: argparse.Namespace, report: Report) -> None:
    """Says which backends the devices do not support, and leaves them out."""
    for name in list(options.backends):
        reason = device_sweep.why_not(name, options.placement, options.world_size)
        if reason is not None:
            report.console.print(f"not available: {name}: {reason}")
            options.backends.remove(name)


def run(options: argparse.Namespace) -> int:
    """Measures and prints; appends the records to --json. Under torchrun rank 0 does so.

    Returns:
        The exit code: EXIT_WRONG_RESULTS when any result was wrong.

    Raises:
        RankError: a rank failed.
        OSError: the records cannot be written.
    """
    try:
        prepare(options)
    except ValueError as error:
        options.parser.error(str(error))
    where, world_size = options.placement, options.world_size
    facts = {"device": "cpu"} if where.is_cpu else placement.facts(where)
    kind = "collective" if where.is_cpu else DEVICE_KIND
    report = Report(kind, options.json, options.html, world_size=world_size, **facts)
    used = f"{where.num_used(world_size)} {facts.get('gpu') or where.kind}"
    title = f"{world_size} ranks on {used}{', MPS' if where.mps else ''}"
    if not where.is_cpu:
        if not report.console.is_terminal:
            report.console.width = device_sweep.FILE_COLUMNS
        _exclude(options, report)

    def on_message(records: list[Record]) -> None:
        report.add(records)
        report.console.print(_progress_line(records))

    def show() -> list[Any]:
        if where.is_cpu:
            return _show_on_cpu(options, report.records)
        return [title, device_sweep.device_table(report.records)]

    with placement.shared(options.mps, where, world_size), report.measuring(show):
        run_ranks(world_size, partial(_start_rank, options=options), on_message)
    status = report.finish(*show())
    if options.plot is not None and report.records:
        from plot import draw_bandwidths

        try:
            draw_bandwidths(report.records, options.plot, title)
            report.console.print(f"plot: {options.plot}")
        except ModuleNotFoundError as error:
            report.console.print(f"no plot: {error.name} is not installed")
    return status
