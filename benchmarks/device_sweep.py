"""A sweep on devices: the supported backends, all points, and the table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from device_point import Method, Point, measure_device_point
from groups import MPI, labelled, open_groups, run_ranks
from mps import Mps
from placement import (
    Placement,
    count_devices,
    facts,
    nccl_variables,
    nccl_version,
    why_nccl_cannot,
)
from point import make_bench
from report import BUSY, Record, Report, comparison, table_of
from sweep import DEVICE_KIND, Sweep

from ringcomm.measure.ranks import Team
from ringcomm.measure.screen import microseconds

if TYPE_CHECKING:
    from rich.table import Table

FILE_COLUMNS = 190


def placement_of(sweep: Sweep) -> Placement:
    """Where a sweep's ranks are, with the devices that are there."""
    # A daemon that was running before has its folder in the environment too.
    has_mps = sweep.mps or "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    return Placement(sweep.device, count_devices(sweep.device), sweep.layout, has_mps)


def why_not(backend: str, placement: Placement, world_size: int) -> str | None:
    """The reason why a backend is excluded, or None."""
    if backend == MPI:
        return "its calls take arrays in the host's memory"
    if backend == "mpi" and not dist.is_mpi_available():
        return "this torch was built without it, and mpi4py takes arrays in the host's memory"
    if backend == "nccl":
        return why_nccl_cannot(placement, world_size)
    return None


def _run_rank(team: Team, sweep: Sweep, placement: Placement, backends: list[str]) -> None:
    device = placement.take(team.rank)
    bench = make_bench(team, open_groups(team, labelled(backends)), device)
    versions: dict[str, Any] = {}
    if "nccl" in backends:
        versions["nccl"] = ".".join(map(str, nccl_version()))
    methods = [Method(sweep.clock), *([Method(graph_calls=sweep.graph)] if sweep.graph else [])]
    for name, dtype, num_bytes in sweep.points():
        for method in methods:
            point = Point(name, num_bytes, dtype, method)
            records = measure_device_point(bench, placement, point, sweep.seconds, sweep.repeats)
            if records:
                team.report([{**versions, **record} for record in records])
    dist.destroy_process_group()


def _row(record: Record) -> list[str]:
    return [
        *(record["op"], f"{record['bytes']:,}", f"{record['count']:,}"),
        *(record["dtype"], record["reduction"], record["mode"], record["backend"]),
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p99")),
        *(f"{record[f'{kind}_gb_per_s']:.2f}" for kind in ("algbw", "busbw")),
        f"{record['share_of_floor']:.0%}",
        f"{record['wrong_elems']:,}",
        comparison(record),
        "+".join(record["algorithms"]),
    ]


def device_table(records: list[Record]) -> Table:
    """The table of a sweep on devices."""
    headers = ["op", "bytes", "count", "type", "redop", "mode", "backend", "p50 µs", "p99 µs"]
    headers += ["algbw GB/s", "busbw GB/s", "of floor", "#wrong", "time / ringcomm's"]
    clocks = {
        "events": "events between every few calls",
        "host": "the host's clock around a synchronize",
    }
    said = ", ".join(clocks[name] for name in sorted({record["clock"] for record in records}))
    caption = (
        f"Clock: {said}. Floor: time of a copy of the bytes in this run. Buffers rotate, so that no"
        " call finds its data in the L2 cache."
        f" * {BUSY}."
    )
    return table_of([*headers, "algorithm"], caption, records, _row, ("bytes", "mode"))


def run_device_sweep(
    sweep: Sweep, path: Path | None, progress_line: Callable[[list[dict[str, Any]]], str]
) -> int:
    """As ``run_sweep``, on devices."""
    placement = placement_of(sweep)
    reasons = {name: why_not(name, placement, sweep.world_size) for name in sweep.backends}
    backends = [name for name in sweep.backends if reasons[name] is None]
    report = Report(DEVICE_KIND, path, sweep.html, world_size=sweep.world_size, **facts(placement))
    if not report.console.is_terminal:
        report.console.width = FILE_COLUMNS
    for name, reason in reasons.items():
        if reason is not None:
            report.console.print(f"not available: {name}: {reason}")

    def on_message(records: list[dict[str, Any]]) -> None:
        report.add(records)
        report.console.print(progress_line(records))

    where = f"{placement.num_used(sweep.world_size)} {report.facts.get('gpu') or placement.kind}"
    title = f"{sweep.world_size} ranks on {where}{', MPS' if placement.mps else ''}"

    def show() -> list[Any]:
        return [title, device_table(report.records)]

    if placement.kind == "cuda":
        for name, value in nccl_variables(placement.max_ranks(sweep.world_size)).items():
            os.environ.setdefault(name, value)
    with Mps() if sweep.mps else contextlib.nullcontext(), report.measuring(show):
        run_ranks(
            sweep.world_size, lambda team: _run_rank(team, sweep, placement, backends), on_message
        )
    status = report.finish(*show())
    if sweep.plot is not None and report.records:
        from plot import draw_bandwidths

        try:
            draw_bandwidths(report.records, sweep.plot, title)
            report.console.print(f"plot: {sweep.plot}")
        except ModuleNotFoundError as error:
            report.console.print(f"no plot: {error.name} is not installed")
    return status
