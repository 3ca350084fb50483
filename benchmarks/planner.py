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
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from groups import run_ranks
from harness import Options, Report, flag
from race import make_bench
from trainees import SYSTEMS, Workload

from ringcomm import planner
from ringcomm.cost_model import Machine
from ringcomm.measure.algorithms import fit_costs, measure_algorithms, world_of
from ringcomm.measure.machine import identity, num_nodes
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import open_default_group
from ringcomm.planner.costs import compute_flops
from ringcomm.planner.hardware import HARDWARE
from ringcomm.planner.models import ModelShape

COMPUTE, UPDATE, NEW_MEMORY = "forward, backward", "update", "new memory"
# More than an allocator keeps.
NEW_BYTES = 64 << 20
WORLD_SIZE = 2
# Rows and tokens of a rank's batch.
BATCHES = ((1, 64), (4, 128))
TUNED_SIZES = [1 << shift for shift in range(10, 25, 2)]
TUNE_SECONDS = 0.4


@dataclass(frozen=True)
class Case:
    """A system of `ringcomm bench systems`, and its name in the planner."""

    name: str
    system: str = "ddp"
    axes: dict[str, Any] = dataclasses.field(default_factory=lambda: {"dp": WORLD_SIZE})
    is_sequence_split: bool = False


CASES = (
    Case("ddp"),
    *(Case(f"zero-{stage}", f"zero{stage}") for stage in (1, 2, 3)),
    Case("lomo", "lomo"),
    Case("lomo on shards", "lomo-shards"),
    Case("tensor", axes={"tp": WORLD_SIZE}),
    Case("tensor, tokens shared", axes={"tp": WORLD_SIZE}, is_sequence_split=True),
    Case("pipeline", axes={"pp": WORLD_SIZE}),
)


def run_rank(team: Team, systems: Workload, options: Options) -> None:
    """One rank: all systems in turn, and the calibration; rank 0 reports. Collective."""
    open_default_group(team, "ringcomm")
    group = dist.group.WORLD
    assert group is not None
    bench = make_bench(team, options)
    calls: dict[str, Callable[[], object]] = {}
    for name in systems.names:
        trainee = SYSTEMS[name].make(systems.model(), group)
        calls[name] = partial(trainee.step, systems.ids_for(SYSTEMS[name], 0, team.rank))
    updated = systems.model()
    adamw = torch.optim.AdamW(updated.parameters(), fused=True)
    for param in updated.parameters():
        param.grad = torch.ones_like(param)
    calls |= {COMPUTE: systems.backward_alone(), UPDATE: adamw.step}
    calls[NEW_MEMORY] = lambda: torch.empty(NEW_BYTES, dtype=torch.uint8).zero_()
    bench.report(bench.race(calls, COMPUTE, name="system"))
    dist.destroy_process_group()


class Oracle:
    """The planner, calibrated for this machine."""

    def __init__(self, systems: Workload, records: list[dict[str, Any]], machine: Machine) -> None:
        times = {record["system"]: record["p50_us"] * 1e-6 for record in records}
        self.systems = systems
        config = systems.model().config
        self.shape = ModelShape(
            "llama",
            layers=config.num_layers,
            hidden=config.dim,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            ffn=config.ffn_dim,
            vocab=config.vocab_size,
            context=systems.tokens,
        )
        plain = dataclasses.replace(
            HARDWARE["cpu-core"],
            name="measured",
            machine=machine,
            peak_flops={"bf16": 1.0, "fp32": 1.0},
            utilisation=1.0,
            memory_rate=24 * self.shape.num_params / times[UPDATE],
            new_memory_rate=NEW_BYTES / times[NEW_MEMORY],
        )
        of_rank = planner.Job(systems.rows * systems.tokens, systems.tokens, "fp32")
        rate = compute_flops(self.shape, of_rank, "none") / times[COMPUTE]
        self.hardware = dataclasses.replace(plain, peak_flops={"bf16": rate, "fp32": rate})

    def step_us(self, case: Case) -> float:
        """The predicted time of a system's step."""
        job = planner.Job(
            self.systems.num_tokens,
            self.systems.tokens,
            "fp32",
            systems=(case.system,),
            schedules=("1f1b",),
            checkpointings=("none",),
            is_sequence_split=case.is_sequence_split,
        )
        job = dataclasses.replace(job, **{"dp": 1, "pp": 1, "tp": 1, **case.axes})
        plans = planner.plan(self.shape, planner.Cluster(WORLD_SIZE, self.hardware), job)
        if plans.best is None:
            raise ValueError(f"{case.name}: {plans.refused[0].reason}")
        return plans.best.time.step * 1e6


def predicted(records: list[dict[str, Any]], oracle: Oracle) -> list[dict[str, Any]]:
    """The records of systems, with the planner's predictions."""
    by_name = {record["system"]: record for record in records}
    batch = {"rows": oracle.systems.rows, "tokens": oracle.systems.tokens, "ratio": None}
    found = []
    for case in CASES:
        record, expected = by_name[case.name], oracle.step_us(case)
        over = {"predicted_us": expected, "measured_over_predicted": record["p50_us"] / expected}
        found.append({**record, **batch, **over})
    return found


def measure(options: Options, report: Report) -> None:
    """Every batch, in ranks of its own."""
    tuned = measure_algorithms(WORLD_SIZE, TUNED_SIZES, TUNE_SECONDS, 2)
    cores, nodes = identity()["cores"], num_nodes()
    world = world_of(WORLD_SIZE, tuned)
    costs, _ = fit_costs([world], cores, nodes)
    machine = Machine(cores, nodes, costs, {WORLD_SIZE: world.one_shot_max_bytes})
    for rows, tokens in BATCHES:
        systems = Workload(
            world_size=WORLD_SIZE,
            names=[case.name for case in CASES],
            width=options.width,
            num_layers=options.layers,
            rows=rows,
            tokens=tokens,
        )
        systems.check()

        def tell(records: list[dict[str, Any]], systems: Workload = systems) -> None:
            report.add(predicted(records, Oracle(systems, records, machine)))

        run_ranks(WORLD_SIZE, partial(run_rank, systems=systems, options=options), tell)


PROGRAM = harness.Program(
    doc=__doc__,
    kind="planner",
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
