#!/usr/bin/env python3
"""Compares ways to average gradients over ranks and update parameters with them, in one run.

    python benchmarks/fused_update.py --world 2 --optimizer adamw --seconds 4
    python benchmarks/fused_update.py --device cuda --layout one --mps --dtype bfloat16 --world 4

    fused       ringcomm's reduce_scatter_update_all_gather_
    zero1       reduce_scatter, torch.optim on this rank's shard, all_gather, over ringcomm
    ringcomm    all_reduce over ringcomm, torch.optim on everything (DDP), on CPUs
    gloo        the same over Gloo, on CPUs
    nccl        what zero1 does, over NCCL, on GPUs

torch.optim is the fused=True form, one pass over memory; 16-bit parameters have fp32 master
weights, except with LOMO. The ways take turns in short blocks on separate parameters and gradients;
the time of a step is that of the slowest rank. After three steps from one start all must have the
parameters of a single process. On devices the floor is what the ranks together must read and write
(2 N S bytes, and the optimizer's states twice) at the speed of a copy in the same run. One JSON
line per way and size is appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from device_point import EventContender, align
from groups import labelled, open_groups, run_ranks
from mps import Mps, find_control
from placement import (
    LAYOUTS,
    Placement,
    count_devices,
    facts,
    measure_speeds,
    nccl_variables,
    nccl_version,
    preload,
    why_nccl_cannot,
)
from report import Report, comparison, records_of, table_of
from update_ways import OPTIMIZERS, Way, count_wrong, floor_bytes, keeps_master, torch_optimizer
from weather import WeatherWatch

from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.screen import byte_count, microseconds, whole_numbers
from ringcomm.measure.timing import Contender, measure

DEFAULT_SIZES = "1048576,4194304,16777216,67108864"
DTYPES = ("float32", "bfloat16")
WAYS = ("fused", "zero1", "ringcomm", "gloo")  # the others are compared with the first
DEVICE_WAYS = ("fused", "zero1", "nccl")


def _contender(team: Team, way: Way, placement: Placement, device: torch.device) -> Contender:
    if placement.is_cpu:
        return Contender(way.step, partial(dist.barrier, group=way.group))
    return EventContender(way.step, align(team, device), device=device)


def run_rank(
    team: Team, options: argparse.Namespace, placement: Placement, names: tuple[str, ...]
) -> None:
    """One rank: every size in turn; rank 0 reports each size's records to the parent."""
    device = placement.take(team.rank)
    backends = ["ringcomm", *(name for name in ("gloo", "nccl") if name in names)]
    groups = open_groups(team, labelled(backends))
    watch = WeatherWatch(team)
    dtype = getattr(torch, options.dtype)
    versions = {"nccl": ".".join(map(str, nccl_version()))} if "nccl" in names else {}
    for num_bytes in options.sizes:
        num_elems = num_bytes // dtype.itemsize // team.world_size * team.world_size
        ways = {
            name: Way(name, options.optimizer, num_elems, team, groups, dtype, device)
            for name in names
        }
        wrong = count_wrong(ways, options.optimizer, team)
        contenders = {n: _contender(team, way, placement, device) for n, way in ways.items()}
        floor = _floor(team, ways["fused"], placement, options.optimizer)
        time_all = partial(measure, team, contenders, options.seconds)
        timings, weather = watch.calmest(time_all, options.repeats)
        if timings is not None:
            point = {"bytes": num_elems * dtype.itemsize, **versions, **floor, **weather.record()}
            records = records_of(timings, names[0], wrong, name="way")
            if floor:
                records = [
                    {**r, "share_of_floor": floor["floor_us"] / r["p50_us"]} for r in records
                ]
            team.report([record | point for record in records])
        del ways, contenders, time_all
    dist.destroy_process_group()


def _floor(team: Team, way: Way, placement: Placement, kind: str) -> dict[str, Any]:
    """The least µs of a step on devices, and what it follows from; nothing on CPUs. Collective."""
    if placement.is_cpu:
        return {}
    speeds = measure_speeds(team, placement)
    state_bytes = sum(team.share(way.state_bytes))
    has_master = keeps_master(kind, way.param.dtype)
    moved = floor_bytes(way.param, state_bytes, team.world_size, has_master)
    on_a_device = moved * placement.max_ranks(team.world_size) / team.world_size
    over_a_link = 2 * (team.world_size - 1) / team.world_size * way.param.nbytes
    return {
        "floor_us": speeds.floor_us(on_a_device, over_a_link),
        "state_bytes": state_bytes,
        **speeds.record(),
    }


def row_of(record: dict[str, Any]) -> list[str]:
    """Formats a record as a table row."""
    return [
        *(byte_count(record["bytes"]), record["way"]),
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p90", "p99")),
        f"{record['share_of_floor']:.0%}" if "share_of_floor" in record else "",
        comparison(record),
        f"{record['others_busy_percent']:.1f}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = harness.make_parser(__doc__, seconds=4.0, per="size, for all ways")
    add = parser.add_argument
    add("--world", type=int, default=2, help="ranks, all on this machine")
    add("--sizes", type=whole_numbers, default=DEFAULT_SIZES, help="bytes of the parameters")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients")
    add("--device", default="cpu", help="cuda for GPUs, which the options below are of")
    layout = "all: rank i on GPU i mod their number; one: all ranks on the first"
    add("--layout", choices=LAYOUTS, default="all", help=layout)
    add("--mps", action=argparse.BooleanOptionalAction, default=False, help="run MPS meanwhile")
    add(
        "--nccl-library", type=Path, metavar="FILE", help="a libnccl.so.2 to use instead of torch's"
    )
    options = parser.parse_args(argv)
    if options.world < 2 or min(options.sizes) < 4 * options.world:
        parser.error("--world must be 2 or more, and each size at least one parameter per rank")
    if options.mps and options.device == "cpu":
        parser.error("--mps is for GPUs only: add --device cuda")
    if options.mps and find_control() is None:
        parser.error("--mps: nvidia-cuda-mps-control is not installed")
    if count_devices(options.device) == 0:
        parser.error(f"this torch finds no {options.device} device here")
    where = "" if options.device == "cpu" else f"-{options.device}-{options.layout}"
    name = f"fused_update-{options.optimizer}-w{options.world}{where}"
    options.json = options.json or harness.default_path(name)
    return options


def ways_on(placement: Placement, world_size: int) -> tuple[str, ...]:
    """The ways that are supported there; prints why NCCL is not."""
    if placement.is_cpu:
        return WAYS
    reason = why_nccl_cannot(placement, world_size)
    if reason is not None:
        print(f"not available: nccl: {reason}")
    return tuple(name for name in DEVICE_WAYS if name != "nccl" or reason is None)


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    if options.nccl_library is not None:
        preload(options.nccl_library)
    has_mps = options.mps or "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    num_devices = count_devices(options.device)
    placement = Placement(options.device, num_devices, options.layout, has_mps)
    dimensions = {"world_size": options.world, "optimizer": options.optimizer}
    dimensions["dtype"] = options.dtype
    kind = "fused_update"
    if not placement.is_cpu:
        kind, dimensions = "fused_update_on_device", {**dimensions, **facts(placement)}
        for name, value in nccl_variables(placement.max_ranks(options.world)).items():
            os.environ.setdefault(name, value)
    report = Report(kind, options.json, **dimensions)
    names = ways_on(placement, options.world)
    torch_optimizer(options.optimizer, torch.zeros(1))  # imports seconds' worth before the fork
    with Mps() if options.mps else contextlib.nullcontext():
        run_ranks(options.world, lambda team: run_rank(team, options, placement, names), report.add)
    headers = ["parameters", "way", "p50 µs", "p90 µs", "p99 µs", "of floor", "time / fused"]
    caption = "* other programs used the machine."
    table = table_of([*headers, "others %"], caption, report.records, row_of, ("bytes",))
    title = f"{options.world} ranks, {options.optimizer}, {options.dtype}, {options.device}"
    return report.finish(title, table)


if __name__ == "__main__":
    sys.exit(run_main("fused_update.py", main))
