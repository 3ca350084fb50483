"""A sweep on devices: the supported backends, all points, and the table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch.distributed as dist
from device_point import Method, Point, measure_device_point
from groups import MPI
from placement import Placement, nccl_version, why_nccl_cannot
from race import Bench
from report import BUSY, Columns, Record, table_of
from sweep import points

if TYPE_CHECKING:
    from rich.table import Table

FILE_COLUMNS = 190


def why_not(backend: str, placement: Placement, world_size: int) -> str | None:
    """The reason why a backend is excluded, or None."""
    if backend == MPI:
        return "its calls take arrays in the host's memory"
    if backend == "mpi" and not dist.is_mpi_available():
        return "this torch was built without it, and mpi4py takes arrays in the host's memory"
    if backend == "nccl":
        return why_nccl_cannot(placement, world_size)
    return None


def run_rank(bench: Bench, options: argparse.Namespace) -> None:
    """Every point in turn, by each method; rank 0 reports each point's records."""
    versions = {}
    if "nccl" in options.backends:
        versions["nccl"] = ".".join(map(str, nccl_version()))
    methods = [Method(options.clock)]
    methods += [Method(graph_calls=options.graph)] if options.graph else []
    for name, dtype, num_bytes in points(options):
        for method in methods:
            point = Point(name, num_bytes, dtype, method)
            records = measure_device_point(bench, options.placement, point)
            bench.report([{**versions, **record} for record in records])


def device_table(records: list[Record]) -> Table:
    """The table of a sweep on devices."""
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
    columns: Columns = [
        "op",
        ("bytes", lambda r: f"{r['bytes']:,}"),
        ("count", lambda r: f"{r['count']:,}"),
        "type",
        ("redop", lambda r: r["reduction"]),
        *("mode", "backend", "p50 µs", "p99 µs"),
        ("algbw GB/s", lambda r: f"{r['algbw_gb_per_s']:.2f}"),
        ("busbw GB/s", lambda r: f"{r['busbw_gb_per_s']:.2f}"),
        ("of floor", lambda r: f"{r['share_of_floor']:.0%}"),
        ("#wrong", lambda r: f"{r['wrong_elems']:,}"),
        "time / ringcomm's",
        ("algorithm", lambda r: "+".join(r["algorithms"])),
    ]
    return table_of(columns, caption, records, ("bytes", "mode"))
