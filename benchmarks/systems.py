"""Times training steps of all training systems on one model, in turn.

All train the same model from the same weights on the same rows. Losses are checked against one
process. The backend counts the bytes that are sent. Memory is that of the tensors that a rank keeps
alive. "SYSTEM on gloo" is the system over Gloo. "SYSTEM on fake" sends nothing, which gives the
share of communication in the system's step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decoder import HEAD_WIDTH, VOCAB_SIZE, Decoder
from gradient_watch import GradientWatch
from groups import run_ranks
from placement import Placement
from race import make_bench
from report import Report, inverse, records_of, table_of
from system_columns import legend_lines, shown_columns
from torch import Tensor
from trainees import DEFAULT, FAKE, RINGCOMM, SYSTEMS, System, Trainee, Workload, parse_name

from ringcomm.backend import stats
from ringcomm.measure.ranks import Team
from ringcomm.measure.screen import as_option, check_writable, words
from ringcomm.measure.timing import (
    Contender,
    Timings,
    measure,
    median,
    open_default_group,
    percentiles,
)

BACKWARD = "backward alone"
# Characters of the table with --all, if it is not written to a terminal.
ALL_COLUMNS = 200
# Steps whose losses are compared with one process's, which sees all rows.
CHECKED_STEPS = 4
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Systems(Workload):
    """What is measured.

    Attributes:
        names: systems, over ringcomm or "SYSTEM on BACKEND"; others are compared with the first.
    """

    names: list[str]

    def check(self) -> None:
        """Raises ValueError naming an invalid option."""
        if not self.names:
            raise ValueError(f"--systems must be some of {'; '.join(SYSTEMS)}, got none")
        systems = [parse_name(name)[0] for name in self.names]
        if min(self.world_size, self.num_layers, self.rows, self.tokens) < 1:
            raise ValueError("needs at least one rank, one layer, one row and one token")
        if self.width < 32 or self.width % 32:
            raise ValueError(f"--width must be a multiple of 32, got {self.width}")
        num, in_parts = self.world_size, [n for n in systems if n.startswith("tensor")]
        if in_parts and (self.width // HEAD_WIDTH < num or self.tokens % num):
            raise ValueError(
                f"{' and '.join(in_parts)} need a head of {HEAD_WIDTH} features for each of {num}"
                f" ranks, and a number of tokens that is a multiple of {num}: change --width,"
                " --tokens or --systems"
            )
        if "pipeline" in systems and self.num_layers + 3 < num:
            raise ValueError(
                f"{self.num_layers} layers are too few for {num} pipeline stages, one for each rank"
            )

    def model(self) -> Decoder:
        """The same on every rank."""
        return Decoder(self.width, self.num_layers)

    def ids(self, step: int) -> Tensor:
        """All ranks' rows of a step."""
        generator = torch.Generator().manual_seed(step)
        shape = [self.world_size * self.rows, self.tokens + 1]
        return torch.randint(VOCAB_SIZE, shape, generator=generator)

    def ids_for(self, system: System, step: int, rank: int) -> Tensor:
        """The ids of a rank."""
        ids = self.ids(step)
        return ids if system.sees_all else ids[rank * self.rows : (rank + 1) * self.rows]

    def expected_losses(self, system: System) -> list[float]:
        """Those of one process on all rows."""
        model = self.model()
        alone = Trainee(model, model, system.like(model))
        return [alone.step(self.ids(step)) for step in range(CHECKED_STEPS)]


def _sent_bytes() -> int:
    return sum(entry["sent_bytes"] for entry in stats().values())


def _train_checked(
    systems: Systems, team: Team, groups: dict[str, Any], name: str
) -> tuple[Trainee, dict[str, Any]]:
    """A system after its first steps, and what they were. Collective."""
    kind, backend = parse_name(name)
    system = SYSTEMS[kind]
    model = systems.model()
    num_params = sum(param.numel() for param in model.parameters())
    watch = GradientWatch(model)
    trainee = system.make(model, groups[backend])
    watch.optimizer = getattr(trainee, "optimizer", None)
    losses, held = [], 0
    for step in range(CHECKED_STEPS):
        before = _sent_bytes()
        mine = trainee.backward(systems.ids_for(system, step, team.rank))
        held = max(held, trainee.grad_bytes())
        trainee.update()
        sent = _sent_bytes() - before
        losses.append(sum(team.share(mine)) / team.world_size)
    held = max(held, watch.stop())
    expected = losses if backend == FAKE else systems.expected_losses(system)
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
        "formula_bytes": system.formula_bytes(systems, num_params),
        "wrong_elems": 0 if backend == FAKE else wrong,
    }


def run_rank(systems: Systems, options: argparse.Namespace, team: Team) -> None:
    """One rank: all systems, first checked, then in turn against the clock. Collective."""
    open_default_group(team, RINGCOMM)
    backends = sorted({parse_name(name)[1] for name in systems.names} - {RINGCOMM})
    groups: dict[str, Any] = {RINGCOMM: dist.group.WORLD}
    groups |= {backend: dist.new_group(backend=backend) for backend in backends}
    bench = make_bench(team, options)
    found, contenders = {}, {}
    for name in systems.names:
        trainee, found[name] = _train_checked(systems, team, groups, name)
        ids = systems.ids_for(SYSTEMS[parse_name(name)[0]], 0, team.rank)
        contenders[name] = Contender(partial(trainee.step, ids), dist.barrier)
    alone = partial(backward_alone, systems.model(), systems.ids(0)[: systems.rows])
    contenders[BACKWARD] = Contender(alone, dist.barrier)
    timings, weather = bench.watch.calmest(
        partial(measure, team, contenders, options.seconds), options.repeats
    )
    if timings is not None:
        records = _records(systems.names[0], timings, found)
        team.report([record | weather.record() for record in records])
    dist.destroy_process_group()


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


def backward_alone(model: Decoder, ids: Tensor) -> None:
    """Forward and backward only."""
    model(ids).backward()
    model.zero_grad()


# ---- the command line


def _names(text: str) -> list[str]:
    """One name of a system has a comma: a semicolon separates where there is one."""
    return [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]


def _over(names: list[str], backends: list[str]) -> list[str]:
    """The names, and each system over those backends that can carry it."""
    found = []
    for name in names:
        others = SYSTEMS[name].others if name in SYSTEMS else ()
        found += [name, *(f"{name} on {backend}" for backend in backends if backend in others)]
    return list(dict.fromkeys(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for ranks, systems, model and time."""
    add = parser.add_argument
    add("--world-size", type=int, default=2, help="number of ranks, all on this machine")
    add(
        "--systems",
        type=as_option(_names),
        help="separated by commas or semicolons (default: all)",
    )
    over = "also measure the systems over these backends: gloo, fake"
    add("--over", type=as_option(words), default=[], help=over)
    add("--width", type=int, default=128, help="width of the model, a multiple of 32")
    add("--layers", type=int, default=4, help="layers of the model")
    add("--rows", type=int, default=1, help="sequences per rank in a step")
    add("--tokens", type=int, default=64, help="tokens per sequence")
    add("--seconds", type=float, default=20.0, help="seconds of measurement for all systems")
    add(
        "--repeats",
        type=int,
        default=2,
        help="when other programs disturb the machine, at most",
    )
    add("--all", action="store_true", help="show losses, percentiles and memory by part too")
    add("--json", type=Path, metavar="FILE", help="append one record per system here")
    add("--plot", type=Path, metavar="FILE", help="draw time and memory (SVG, PNG, PDF)")
    add("--html", type=Path, metavar="FILE", help="write a page of charts (HTML, one file)")


def run(options: argparse.Namespace) -> int:
    """Measures; returns status 3 if losses differ from those of one process."""
    systems = Systems(
        world_size=options.world_size,
        names=_over(options.systems or DEFAULT, options.over),
        width=options.width,
        num_layers=options.layers,
        rows=options.rows,
        tokens=options.tokens,
    )
    options.placement = Placement()
    try:
        systems.check()
        check_writable(options.json, options.html, options.plot)
        if options.plot:
            from plot import check_picture

            check_picture(options.plot)
    except ValueError as error:
        options.parser.error(str(error))
    num_params = sum(param.numel() for param in systems.model().parameters())
    report = Report(
        "systems",
        options.json,
        options.html,
        world_size=systems.world_size,
        num_params=num_params,
        rows_per_rank=systems.rows,
        tokens_per_row=systems.tokens,
    )

    def show() -> list[Any]:
        columns = shown_columns(report.records, options.all)
        cells = [(column.header, column.text) for column in columns]
        table = table_of(cells, "", report.records)
        title = (
            f"training steps of {systems.world_size} ranks; a decoder of {num_params:,} parameters,"
            f" {systems.rows} × {systems.tokens} tokens per rank"
        )
        more = [] if options.all else ["--all shows losses, percentiles and memory by part"]
        return [title, table, *legend_lines(columns), *more]

    if options.all and not report.console.is_terminal:
        report.console.width = ALL_COLUMNS
    with report.measuring(show):
        run_ranks(systems.world_size, partial(run_rank, systems, options), report.add)
    if options.plot and report.records:
        from plot import draw_systems

        draw_systems(report.records, options.plot)
    return report.finish(*show())
