"""A sweep on devices: who can take part there, and every point in turn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ringcomm.bench.device_point import Method, Point, measure_device_point
from ringcomm.bench.interleave import labelled, open_groups
from ringcomm.bench.mpi import MPI
from ringcomm.bench.mps import Mps
from ringcomm.bench.nccl import nccl_variables, nccl_version, why_nccl_cannot
from ringcomm.bench.placement import Placement, count_devices, facts
from ringcomm.bench.point import make_bench
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.report import Report

if TYPE_CHECKING:
    from ringcomm.bench.sweep import Sweep

KIND = "collective_on_device"
FILE_COLUMNS = 190


def placement_of(sweep: Sweep) -> Placement:
    """Where a sweep's ranks are, with the devices that are there."""
    # A daemon that was there before this has its folder in the environment as well.
    has_mps = sweep.mps or "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    return Placement(sweep.device, count_devices(sweep.device), sweep.layout, has_mps)


def why_not(backend: str, placement: Placement, world_size: int) -> str | None:
    """The reason why a backend has no part in it, or None."""
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


def run_device_sweep(
    sweep: Sweep, path: Path | None, progress_line: Callable[[list[dict[str, Any]]], str]
) -> int:
    """As ``run_sweep``, on devices."""
    from ringcomm.bench.device_screen import device_table, draw

    placement = placement_of(sweep)
    reasons = {name: why_not(name, placement, sweep.world_size) for name in sweep.backends}
    backends = [name for name in sweep.backends if reasons[name] is None]
    report = Report(KIND, path, world_size=sweep.world_size, **facts(placement))
    if not report.console.is_terminal:
        report.console.width = FILE_COLUMNS
    for name, reason in reasons.items():
        if reason is not None:
            report.console.print(f"not available: {name}: {reason}")
    if not backends:
        raise ValueError("no backend is left to measure")

    def on_message(records: list[dict[str, Any]]) -> None:
        report.add(records)
        report.console.print(progress_line(records))

    if placement.kind == "cuda":
        for name, value in nccl_variables(placement.max_ranks(sweep.world_size)).items():
            os.environ.setdefault(name, value)
    with Mps() if sweep.mps else contextlib.nullcontext():
        run_ranks(
            sweep.world_size, lambda team: _run_rank(team, sweep, placement, backends), on_message
        )
    where = f"{placement.num_used(sweep.world_size)} {report.facts.get('gpu') or placement.kind}"
    title = f"{sweep.world_size} ranks on {where}{', MPS' if placement.mps else ''}"
    subject = sweep.subject if sweep.subject in backends else backends[0]
    status = report.finish(title, device_table(report.records, subject))
    if sweep.plot is not None and report.records:
        try:
            draw(report.records, sweep.plot, title)
            report.console.print(f"plot: {sweep.plot}")
        except ModuleNotFoundError as error:
            report.console.print(f"no plot: {error.name} is not installed")
    return status
