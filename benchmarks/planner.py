#!/usr/bin/env python3
"""Measures training steps on two ranks, compared with the planner's predictions.

    python benchmarks/planner.py

The planner is told what this machine is, by four measurements of the same run: forward and backward
of a rank's rows, AdamW's update of all weights, and memory that is new, each on both ranks at once,
and the cost model of `ringcomm tune`. Then every system trains the same model, in turn, and each
one's time is held against its prediction, which has seen none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from cells import Record
from harness import Bench, Options, Report, flag
from workload import SYSTEMS, Workload

from ringcomm import planner
from ringcomm.cost_model import Machine
from ringcomm.measure.algorithms import fit_costs, measure_algorithms, world_of
from ringcomm.measure.machine import identity, num_nodes
from ringcomm.measure.timing import open_default_group
from ringcomm.planner.costs import compute_flops
from ringcomm.planner.hardware import HARDWARE, Hardware

COMPUTE, UPDATE, NEW_MEMORY = "forward, backward", "update", "new memory"
# More than an allocator keeps.
NEW_BYTES = 64 << 20
WORLD_SIZE = 2
# Rows and tokens of a rank's batch.
BATCHES = ((1, 64), (4, 128))
TUNED_SIZES = [1 << shift for shift in range(10, 25, 2)]
TUNE_SECONDS = 0.4
CASES = ("ddp", "zero-1", "zero-2", "zero-3", "lomo", "lomo on shards")
CASES += ("tensor", "tensor, tokens shared", "pipeline")


def race(bench: Bench, systems: Workload) -> list[Record]:
    """All systems in turn, and the calibration; their records on rank 0. Collective."""
    group = dist.group.WORLD
    assert group is not None
    calls: dict[str, Callable[[], object]] = {}
    for name in systems.names:
        trainee = SYSTEMS[name].make(systems.model(), group)
        calls[name] = partial(trainee.step, systems.ids_for(SYSTEMS[name], 0, bench.team.rank))
    updated = systems.model()
    adamw = torch.optim.AdamW(updated.parameters(), fused=True)
    for param in updated.parameters():
        param.grad = torch.ones_like(param)
    calls |= {COMPUTE: systems.backward_alone(), UPDATE: adamw.step}
    calls[NEW_MEMORY] = lambda: torch.empty(NEW_BYTES, dtype=torch.uint8).zero_()
    return bench.race(calls, COMPUTE, name="system")


def measured(systems: Workload, times: dict[str, float], machine: Machine) -> Hardware:
    """This machine as the planner sees it, from the seconds of the calibration's calls."""
    shape = systems.shape()
    plain = dataclasses.replace(
        HARDWARE["cpu-core"],
        name="measured",
        machine=machine,
        utilisation=1.0,
        memory_rate=24 * shape.num_params / times[UPDATE],
        new_memory_rate=NEW_BYTES / times[NEW_MEMORY],
    )
    of_rank = planner.Job(systems.rows * systems.tokens, systems.tokens, "fp32")
    rate = compute_flops(shape, of_rank, "none") / times[COMPUTE]
    return dataclasses.replace(plain, peak_flops={"bf16": rate, "fp32": rate})


def predicted(systems: Workload, records: list[Record], machine: Machine) -> list[Record]:
    """The records of systems, with the planner's predictions. Raises ValueError without a plan."""
    by_name = {record["system"]: record for record in records}
    times = {name: record["p50_us"] * 1e-6 for name, record in by_name.items()}
    hardware = measured(systems, times, machine)
    found = []
    for name in CASES:
        plan, record = systems.plan(name, hardware), by_name[name]
        if plan is None:
            raise ValueError(f"the planner has no plan of {name} for this model")
        expected = plan.time.step * 1e6
        over = {"predicted_us": expected, "measured_over_predicted": record["p50_us"] / expected}
        batch = {"rows": systems.rows, "tokens": systems.tokens, "ratio": None}
        found.append({**record, **batch, **over})
    return found


def run_rank(bench: Bench, options: Options) -> None:
    """Every batch in turn; rank 0 reports."""
    open_default_group(bench.team, "ringcomm")
    for rows, tokens in BATCHES:
        systems = Workload(
            world_size=WORLD_SIZE,
            names=[*CASES],
            width=options.width,
            num_layers=options.layers,
            rows=rows,
            tokens=tokens,
        )
        systems.check()
        if records := race(bench, systems):
            bench.report(predicted(systems, records, options.machine))


def measure(options: Options, report: Report) -> None:
    """First the machine's collectives."""
    tuned = measure_algorithms(WORLD_SIZE, TUNED_SIZES, TUNE_SECONDS, 2)
    cores, nodes = identity()["cores"], num_nodes()
    world = world_of(WORLD_SIZE, tuned)
    costs, _ = fit_costs([world], cores, nodes)
    options.machine = Machine(cores, nodes, costs, {WORLD_SIZE: world.one_shot_max_bytes})
    PROGRAM.run_worlds(options, report)


PROGRAM = harness.Program(
    doc=__doc__,
    kind="planner",
    rank=run_rank,
    measure=measure,
    world=WORLD_SIZE,
    seconds=50.0,
    per="batch",
    flags=[
        flag("--width", int, 256, "of the model"),
        flag("--layers", int, 6, "an even number of them"),
    ],
    named=("width", "layers"),
)

if __name__ == "__main__":
    PROGRAM.run_script()
