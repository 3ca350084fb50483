"""Times a collective with several backends on the same buffers, in turn.

Results are verified with exact integers before and after. The time of a call is that of its slowest
rank. Several collectives, separated by commas, are measured in one run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import front_door
import harness
import placement
import torch
import torch.distributed as dist
from cells import BUSY, Columns, Record, before_after, comparison, microseconds
from groups import MPI, labelled, open_groups, run_ranks
from harness import Bench, Options
from operations import DEVICE_KIND, OPERATIONS, RINGCOMM
from point import ADD, Method, Point, measure_device_point, measure_point
from report import Report, table_of

from ringcomm.measure.ranks import joined_world_size, mpi_world_size

AVAILABLE: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": dist.is_nccl_available,
    "ucc": dist.is_ucc_available,
}


def check(options: Options) -> None:
    """Raises ValueError for options that cannot be measured here; completes the others."""
    started = joined_world_size()
    if options.world_size is None:
        options.world_size = started or 2
    if started not in (None, options.world_size):
        raise ValueError(f"torchrun has started {started} ranks, not {options.world_size}")
    options.backends = [RINGCOMM, *([] if options.peers == ["none"] else options.peers)]
    if "sendrecv" in options.op.split(",") and options.world_size == 1:
        raise ValueError("sendrecv needs at least two ranks")
    if options.device == "cpu":
        _check_on_cpu(options)
    for name in set(options.backends) - {MPI}:
        if name not in dist.Backend.backend_list:
            raise ValueError(f"torch has no backend {name!r}")
    if options.device != "cpu":
        _check_on_devices(options)
        return
    for name in options.backends:
        if not AVAILABLE.get(name, lambda: True)():
            raise ValueError(f"this torch was built without {name}")


def _check_on_cpu(options: Options) -> None:
    if "nccl" in options.backends:
        raise ValueError("nccl does not support CPU tensors: add --device cuda")
    if MPI in options.backends and mpi_world_size() is None:
        raise ValueError(f"{MPI} needs ranks that mpiexec has started: mpiexec -n 2 python ...")


def _check_on_devices(options: Options) -> None:
    if options.graph and not hasattr(torch.get_device_module(options.device), "CUDAGraph"):
        raise ValueError(f"--graph: {options.device} has no graphs")
    if options.mps and joined_world_size() is not None:
        raise ValueError(
            "--mps cannot be used under a launcher, which would have to start MPS itself:"
            " leave it out"
        )


def run_rank(bench: Bench, options: Options) -> None:
    """Every point in turn; on devices by each method. Rank 0 reports each point's records."""
    bench = replace(bench, groups=open_groups(bench.team, labelled(options.backends)))
    versions = {"mpi": bench.groups[MPI].version} if MPI in bench.groups else {}
    if "nccl" in options.backends:
        versions["nccl"] = ".".join(map(str, placement.nccl_version()))
    methods = [Method(options.clock)]
    methods += [Method(graph_calls=options.graph)] if options.graph else []
    for name, dtype in product(options.op.split(","), options.dtype):
        for num_bytes in options.sizes if OPERATIONS[name].has_data else [0]:
            point = name, num_bytes, getattr(torch, dtype)
            if options.placement.is_cpu:
                found = measure_point(bench, *point)
                bench.report([{**versions, "dtype": dtype, **record} for record in found])
                continue
            for method in methods:
                found = measure_device_point(bench, options.placement, Point(*point, method))
                bench.report([{**versions, **record} for record in found])


# ---- what is printed

BYTES = ("bytes", lambda record: f"{record['bytes']:,}")


def _progress_line(records: list[Record]) -> str:
    """A progress line for a finished point."""
    first = records[0]
    times = ", ".join(f"{r['backend']} {microseconds(r['p50_us'])} µs" for r in records)
    ratios = " ".join(filter(None, map(comparison, records)))
    state = "" if first["quiet"] else f"; not quiet ({first['others_busy_percent']:.0f} % others)"
    mode = f" {first['mode']}" if "mode" in first else ""
    return f"{first['op']} {first['bytes']:,} bytes{mode}: {times}; {ratios}{state}"


def _results_table(records: list[Record], on_devices: bool) -> Any:
    """A row per backend and point; on devices also what a call was like, and the floor."""
    clocks = {
        "events": "events between every few calls",
        "host": "the host's clock around a synchronize",
    }
    caption = (
        "The time of a call is that of its slowest rank. Time / ringcomm's: median, in parentheses"
        f" the 10th to 90th percentile; * {BUSY}."
    )
    call: Columns = []
    floor: Columns = []
    if on_devices:
        said = ", ".join(clocks[name] for name in sorted({record["clock"] for record in records}))
        caption += (
            f" Clock: {said}. Floor: time of a copy of the bytes in this run. Buffers rotate, so"
            " that no call finds its data in the L2 cache."
        )
        count, redop = lambda r: f"{r['count']:,}", lambda r: r["reduction"]
        call = [("count", count), "type", ("redop", redop), "mode"]
        floor = [("of floor", lambda r: f"{r['share_of_floor']:.0%}")]
    columns: Columns = [
        *("op", BYTES, *call, "backend", "p50 µs", "p99 µs"),
        ("algbw GB/s", lambda r: f"{r['algbw_gb_per_s']:.3f}"),
        ("busbw GB/s", lambda r: f"{r['busbw_gb_per_s']:.3f}"),
        *floor,
        ("wrong", lambda r: f"{r['wrong_elems']:,}"),
        "time / ringcomm's",
        ("algorithm", lambda r: "+".join(r["algorithms"])),
    ]
    return table_of(columns, caption, records, ("bytes", "mode") if on_devices else ("op", "bytes"))


def _machine_table(records: list[Record]) -> Any:
    caption = "Floor: all ranks scale their buffers in place, before → after the calls."
    columns: Columns = [
        "op",
        BYTES,
        ("floor µs", lambda r: before_after(r["floor_us"])),
        "others %",
        ("attempts", lambda r: str(r["num_attempts"])),
        "state",
    ]
    points = {(record["op"], record["bytes"]): record for record in records}
    return table_of(columns, caption, [*points.values()])


def show(options: Options, records: list[Record]) -> list[Any]:
    """The tables; on devices one, of which a terminal may be too narrow."""
    if not options.placement.is_cpu:
        return [options.title, _results_table(records, on_devices=True)]
    title = f"{options.world_size} ranks, {', '.join(options.dtype)}, {options.device}"
    return [title, _results_table(records, on_devices=False), _machine_table(records)]


# ---- the command line


def _why_not(backend: str, options: Options) -> str | None:
    """The reason why devices do not support a backend, or None."""
    if backend == MPI:
        return "its calls take arrays in the host's memory"
    if backend == "mpi" and not dist.is_mpi_available():
        return "this torch was built without it, and mpi4py takes arrays in the host's memory"
    if backend == "nccl":
        return placement.why_nccl_cannot(options.placement, options.world_size)
    return None


def _prepare_devices(options: Options, report: Report) -> None:
    """Makes a title, and says which backends the devices do not support."""
    where, world_size = options.placement, options.world_size
    used = f"{where.num_used(world_size)} {report.facts.get('gpu') or where.kind}"
    options.title = f"{world_size} ranks on {used}{', MPS' if where.mps else ''}"
    for name in list(options.backends):
        if reason := _why_not(name, options):
            report.console.print(f"not available: {name}: {reason}")
            options.backends.remove(name)


def measure(options: Options, report: Report) -> None:
    """All points in one set of ranks, with a line for each; draws them."""
    if not options.placement.is_cpu:
        _prepare_devices(options, report)

    def on_message(records: list[Record]) -> None:
        report.add(records)
        report.console.print(_progress_line(records))

    run_ranks(options.world_size, partial(PROGRAM.run_rank, options=options), on_message)
    if options.plot is not None and report.records:
        from plot import draw_bandwidths

        try:
            drawn = [record for record in report.records if record["backend"] != ADD]
            draw_bandwidths(drawn, options.plot, options.title)
            report.console.print(f"plot: {options.plot}")
        except ModuleNotFoundError as error:
            report.console.print(f"no plot: {error.name} is not installed")


PROGRAM = harness.Program(
    **vars(front_door.COLLECTIVES),
    kind="collective",
    rank=run_rank,
    measure=measure,
    check=check,
    facts=lambda o: {} if o.placement.is_cpu else {"kind": DEVICE_KIND},
    show=show,
)
run = PROGRAM.run
