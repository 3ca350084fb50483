"""Times training steps of all training systems on one model, in turn.

All train the same model from the same weights on the same rows. Losses are checked against one
process. The backend counts the bytes that are sent. Memory is that of the tensors that a rank keeps
alive. "SYSTEM on gloo" is the system over Gloo. "SYSTEM on fake" sends nothing, which gives the
share of communication in the system's step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import front_door
import torch.distributed as dist
from cells import BUSY, Record, inverse
from cores import machine_of
from gradient_watch import GradientWatch
from harness import Bench, Options, Program
from layouts import system_columns
from operations import RINGCOMM
from predictions import BACKWARD, NEW_MEMORY, UPDATE, calibration, measured
from report import Report, records_of, table_of
from trainees import FAKE, Trainee
from workload import DEFAULT, SYSTEMS, System, Workload, parse_name

from ringcomm.backend import stats
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import (
    Contender,
    Timings,
    measure,
    median,
    open_default_group,
    percentiles,
)

# Steps whose losses are compared with one process's, which sees all rows.
CHECKED_STEPS = 4
TOLERANCE = 1e-4
LEAST_PLANNED = 2  # ranks


def expected_losses(systems: Workload, system: System) -> list[float]:
    """Those of one process on all rows."""
    model = systems.model()
    alone = Trainee(model, model, system.like(model))
    return [alone.step(systems.ids(step)) for step in range(CHECKED_STEPS)]


def _sent_bytes() -> int:
    return sum(entry["sent_bytes"] for entry in stats().values())


def _train_checked(
    systems: Workload, team: Team, groups: dict[str, Any], name: str
) -> tuple[Trainee, dict[str, Any]]:
    """A system after its first steps, and what they were. Collective."""
    kind, backend = parse_name(name)
    system = SYSTEMS[kind]
    model = systems.model()
    plan = systems.plan(kind)
    watch = GradientWatch(model)
    trainee = system.make(model, groups[backend])
    watch.optimizer = getattr(trainee, "optimizer", None)
    losses, held = [], 0
    for step in range(CHECKED_STEPS):
        before = _sent_bytes()
        mine = trainee.backward(systems.ids_for(system, step, team.rank))
        watch.look()
        held = max(held, trainee.grad_bytes())
        trainee.update()
        sent = _sent_bytes() - before
        losses.append(sum(team.share(mine)) / team.world_size)
    held = max(held, watch.stop())
    expected = losses if backend == FAKE else expected_losses(systems, system)
    wrong = sum(not abs(a - b) <= TOLERANCE * b for a, b in zip(losses, expected, strict=True))
    is_counted = backend == RINGCOMM and system.is_counted
    by_rank = team.share((trainee.param_bytes(), held, trainee.state_bytes(), sent))
    params, grads, states, _ = (max(values) for values in zip(*by_rank, strict=True))
    return trainee, {
        "backend": backend,
        "loss": losses[-1],
        "one_process_loss": expected[-1],
        "param_bytes": params,
        "grad_bytes": grads,
        "state_bytes": states,
        # The ranks' mean: shards differ by an element.
        "sent_bytes": sum(rank[3] for rank in by_rank) / team.world_size if is_counted else None,
        "formula_bytes": plan and plan.traffic.sent,
        "wrong_elems": 0 if backend == FAKE else wrong,
    }


def run_rank(bench: Bench, options: Options) -> None:
    """All systems, first checked, then in turn against the clock. Collective."""
    systems, team = options.workload, bench.team
    open_default_group(team, RINGCOMM)
    backends = sorted({parse_name(name)[1] for name in systems.names} - {RINGCOMM})
    groups: dict[str, Any] = {RINGCOMM: dist.group.WORLD}
    groups |= {backend: dist.new_group(backend=backend) for backend in backends}
    found, contenders = {}, {}
    for name in systems.names:
        trainee, found[name] = _train_checked(systems, team, groups, name)
        ids = systems.ids_for(SYSTEMS[parse_name(name)[0]], 0, team.rank)
        contenders[name] = Contender(partial(trainee.step, ids), dist.barrier)
    calls = {BACKWARD: systems.backward_alone(), **(calibration(systems) if options.tuning else {})}
    contenders |= {name: Contender(call, dist.barrier) for name, call in calls.items()}
    timings, conditions = bench.watch.calmest(
        partial(measure, team, contenders, options.seconds), options.repeats
    )
    if timings is not None:
        predicted = _predicted(options, timings) if options.tuning else {}
        records = _records(systems.names[0], timings, found)
        team.report([r | predicted.get(r["system"], {}) | conditions for r in records])


def _predicted(options: Options, timings: dict[str, Timings]) -> dict[str, dict[str, float]]:
    """The planner's times by system, of those that it can plan, and how the others compare."""
    systems: Workload = options.workload
    hardware = measured(systems, timings, options.machine)
    for name in (UPDATE, NEW_MEMORY):
        del timings[name]
    predicted = {}
    for name in SYSTEMS.keys() & timings.keys():
        if plan := systems.plan(name, hardware):
            step_us = plan.time.step * 1e6
            over = timings[name].summary_us()["p50_us"] / step_us
            predicted[name] = {"predicted_us": step_us, "measured_over_predicted": over}
    return predicted


def _records(
    subject: str, timings: dict[str, Timings], found: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A record per system, without those that move nothing, and how it compares."""
    wrong = {name: facts["wrong_elems"] for name, facts in found.items()}
    bare = timings.pop(BACKWARD)
    records = records_of(timings, subject, wrong, name="system")
    for position, plain in enumerate(records):
        name = plain["system"]
        kind, backend = parse_name(name)
        still = timings.get(f"{kind} on {FAKE}")
        ours = timings.get(kind)
        record = plain | found[name] | _time_beyond(timings[name], bare)
        if still is not None:
            record["communication_share"] = _communication_share(timings[name], still)
        if backend != RINGCOMM and ours is not None and not (wrong[kind] or wrong[name]):
            record["over_ringcomm"] = timings[name].ratio_over(ours)
        records[position] = record
    return [record for record in records if record["backend"] != FAKE]


def _communication_share(timing: Timings, still: Timings) -> dict[str, float]:
    """What part of a step is beyond one that moves nothing: p50, p10, p90 over the pairs."""
    part = inverse(timing.ratio_over(still))
    return {"p50": 1 - part["p50"], "p10": 1 - part["p90"], "p90": 1 - part["p10"]}


def _time_beyond(timing: Timings, bare: Timings) -> dict[str, float]:
    """What a step takes beyond forward and backward alone, in neighbouring blocks."""
    pairs = zip(timing.blocks, bare.blocks, strict=True)
    beyond_us = [1e6 * (median(mine) - median(theirs)) for mine, theirs in pairs]
    return {f"update_{name}": value for name, value in percentiles(beyond_us, "us").items()}


# ---- the command line


def _over(names: list[str], backends: list[str]) -> list[str]:
    """The names, and each system over those backends that can carry it."""
    found = []
    for name in names:
        others = SYSTEMS[name].others if name in SYSTEMS else ()
        found += [name, *(f"{name} on {backend}" for backend in backends if backend in others)]
    return list(dict.fromkeys(found))


def check(options: Options) -> None:
    """Raises ValueError naming an invalid option; completes what is measured."""
    if options.tuning and options.world_size < LEAST_PLANNED:
        raise ValueError(f"--tuning: the planner has plans for {LEAST_PLANNED} ranks and more")
    given = {name: getattr(options, name) for name in ("world_size", "width", "rows", "tokens")}
    chosen = _over(options.systems or DEFAULT, options.over)
    options.workload = Workload(**given, names=chosen, num_layers=options.layers)
    options.workload.check()
    options.machine = machine_of(options)
    options.num_params = sum(param.numel() for param in options.workload.model().parameters())
    if options.plot:
        from plot import check_picture

        check_picture(options.plot)


def measure_all(options: Options, report: Report) -> None:
    """All systems in one set of ranks; draws them."""
    PROGRAM.run_worlds(options, report)
    if options.plot and report.records:
        from plot import draw_systems

        draw_systems(report.records, options.plot)


def show(options: Options, records: list[Record]) -> list[Any]:
    """A title, the table, and what its columns are."""
    columns = [one for one in system_columns(records) if options.all or one.where == "always"]
    table = table_of([(one.header, one.cell) for one in columns], "", records)
    title = (
        f"training steps of {options.world_size} ranks; a decoder of {options.num_params:,}"
        f" parameters, {options.rows} × {options.tokens} tokens per rank"
    )
    width = max(len(one.header) for one in columns)
    legend = [(one.header, one.legend) for one in columns if one.legend] + [("*", BUSY)]
    lines = [f"{header.ljust(width)}  {text}" for header, text in legend]
    more = [] if options.all else ["--all shows losses, percentiles and memory by part"]
    return [title, table, *lines, *more]


PROGRAM = Program(
    **vars(front_door.SYSTEMS),
    kind="systems",
    rank=run_rank,
    measure=measure_all,
    check=check,
    facts=lambda options: {
        "num_params": options.num_params,
        "rows_per_rank": options.rows,
        "tokens_per_row": options.tokens,
    },
    show=show,
)
run = PROGRAM.run
