#!/usr/bin/env python3
"""Measures training steps with LOMO and AdaLomo, and with torch's SGD and AdamW.

    python benchmarks/lomo.py --world 2

The examples' model, forward, backward and update, each optimizer in turn. With one rank: what the
update in the backward pass costs, and exact clipping by gradients held or a second backward. With
more, over ringcomm: gradients reduced inside the backward pass, compared with
DistributedDataParallel. Losses must be those of SGD, clipped or not. One JSON line per way is
appended to benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from gradient_watch import GradientWatch
from groups import run_ranks
from model import PRESETS, Llama
from report import Report, comparison, records_of, table_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weather import WeatherWatch

from ringcomm.measure.ranks import Team, run_main
from ringcomm.measure.screen import as_option
from ringcomm.measure.timing import Contender, measure, open_default_group
from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo

LEARNING_RATE = 0.01
CLIP_NORM = 0.5
# Steps whose losses are compared.
CHECKED_STEPS = 3
SUBJECT = "Lomo"


@dataclass(frozen=True)
class Way:
    """An optimizer, its clipping, and the way whose losses it must match ("" for none)."""

    make: Callable[[nn.Module, dist.ProcessGroup | None], torch.optim.Optimizer]
    same_as: str = ""
    clips: bool = False


def _torch(kind: str) -> Callable[[nn.Module, dist.ProcessGroup | None], torch.optim.Optimizer]:
    def make(model: nn.Module, _: dist.ProcessGroup | None) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), LEARNING_RATE)
        return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    return make


def _ours(
    kind: type[Lomo | AdaLomo], **options: Any
) -> Callable[[nn.Module, dist.ProcessGroup | None], torch.optim.Optimizer]:
    def make(model: nn.Module, group: dist.ProcessGroup | None) -> torch.optim.Optimizer:
        return kind(model, LEARNING_RATE, group=group, **options)

    return make


def _without_agreement(model: nn.Module, group: dist.ProcessGroup | None) -> torch.optim.Optimizer:
    """Lomo whose ranks assume, after two steps, that the weights with gradients do not change."""
    made = Lomo(model, LEARNING_RATE, group=group)
    for replicas in made._path.replicas:
        _keep_order(replicas)
    return made


def _keep_order(replicas: Any) -> None:
    """Makes replicas repeat the order of their second step without an agreement."""
    agree = replicas.agree
    orders: list[Any] = []

    def again(arrived: Any) -> None:
        if len(orders) < 2:
            agree(arrived)
            orders.append(list(replicas._to_reduce))
            return
        replicas._to_reduce.extend(orders[-1])
        replicas._awaited = {*replicas.slots} - {arrived}
        replicas.has_agreed = True

    replicas.agree = again


NO_AGREEMENT = "Lomo, no agreement"
WAYS: dict[str, Way] = {
    SUBJECT: Way(_ours(Lomo), "SGD"),
    "Lomo, overlapped": Way(_ours(Lomo, overlap=True), "SGD"),
    "Lomo, clip deferred": Way(_ours(Lomo, clip_grad_norm=CLIP_NORM), "SGD, clip"),
    "Lomo, clip two_pass": Way(
        _ours(Lomo, clip_grad_norm=CLIP_NORM, clip_mode="two_pass"), "SGD, clip"
    ),
    "AdaLomo": Way(_ours(AdaLomo)),
    "SGD": Way(_torch("sgd"), "SGD"),
    "SGD, clip": Way(_torch("sgd"), "SGD, clip", clips=True),
    "AdamW": Way(_torch("adamw")),
    NO_AGREEMENT: Way(_without_agreement, "SGD"),
}


class Trainer:
    """One rank's model and optimizer, trained repeatedly on the same rows."""

    def __init__(self, name: str, team: Team, options: argparse.Namespace) -> None:
        way = WAYS[name]
        model = Llama(PRESETS[options.size])
        self._params = list(model.parameters())
        self.watch = GradientWatch(model)
        self._clips = way.clips
        group = dist.group.WORLD if team.world_size > 1 else None
        self._optimizer = way.make(model, group)
        self.watch.optimizer = self._optimizer
        self._model: nn.Module = model
        self._own = self._optimizer if isinstance(self._optimizer, InBackwardOptimizer) else None
        if group is not None and self._own is None:
            self._model = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )
        generator = torch.Generator().manual_seed(1 + team.rank)
        rows = torch.randint(256, (options.rows, options.context + 1), generator=generator)
        self._inputs, self._targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(self) -> float:
        """Trains one step; returns the loss before it."""
        loss = self._model(self._inputs, self._targets)
        if self._own is not None:
            self._own.backward(loss)
            self.watch.look()
        else:
            loss.backward()
        if self._clips:
            nn.utils.clip_grad_norm_(self._params, CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def differing(team: Team, losses: dict[str, list[float]]) -> dict[str, int]:
    """By way, the number of ranks with wrong losses. Collective."""
    wrong = {}
    for name, found in losses.items():
        expected = losses.get(WAYS[name].same_as, found)
        is_same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4)
        wrong[name] = sum(team.share(not is_same))
    return wrong


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank: all ways in turn; rank 0 reports each one's records."""
    if team.world_size > 1:
        open_default_group(team, "ringcomm")
    torch.set_num_threads(1)
    watch = WeatherWatch(team)
    trainers, losses, grad_bytes = {}, {}, {}
    for name in options.ways:
        trainer = Trainer(name, team, options)
        losses[name] = [trainer.step() for _ in range(CHECKED_STEPS)]
        grad_bytes[name] = max(team.share(trainer.watch.stop()))
        trainers[name] = trainer
    wrong = differing(team, losses)
    align = dist.barrier if team.world_size > 1 else lambda: None
    steps = {name: Contender(trainer.step, align) for name, trainer in trainers.items()}
    timings, weather = watch.calmest(
        partial(measure, team, steps, options.seconds), options.repeats
    )
    if timings is not None:
        records = records_of(timings, SUBJECT, wrong, name="way")
        for record in records:
            record["grad_bytes"] = grad_bytes[record["way"]]
        team.report([record | weather.record() for record in records])
    if team.world_size > 1:
        dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """Formats a record as a table row."""
    return [
        record["way"],
        *(f"{record[name] / 1e3:.1f}" for name in ("p50_us", "p99_us")),
        f"{record['grad_bytes'] >> 10:,} KiB",
        comparison(record),
        f"{record['others_busy_percent']:.1f}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; exits with a message for invalid options."""
    parser = harness.make_parser(__doc__, seconds=60.0, per="run, for all ways")
    add = parser.add_argument
    add(
        "--ways",
        type=as_option(words_of_ways),
        default=";".join(w for w in WAYS if w != NO_AGREEMENT),
        help="separated by ;",
    )
    add("--world", type=int, default=2, help="ranks, all on this machine")
    add("--size", choices=list(PRESETS), default="4.6M", help="parameters of the model")
    add("--rows", type=int, default=4, help="rows of a rank's batch")
    add("--context", type=int, default=128, help="tokens of a row")
    options = parser.parse_args(argv)
    for name in set(options.ways) - set(WAYS):
        parser.error(f"--ways: {name!r} is not one of {'; '.join(WAYS)}")
    if SUBJECT not in options.ways:
        parser.error(f"--ways must include {SUBJECT}, because the others are compared with it")
    if min(options.world, options.rows, options.context) < 1:
        parser.error("needs at least 1 rank, 1 row and 1 token")
    options.json = options.json or harness.default_path(f"lomo-w{options.world}")
    return options


def words_of_ways(text: str) -> list[str]:
    """Names between semicolons."""
    return [name.strip() for name in text.split(";") if name.strip()]


def main(argv: list[str]) -> int:
    """Measures; returns the exit code, 3 if losses differ from those of SGD."""
    options = parse(argv)
    if options.world == 1:
        options.ways = [name for name in options.ways if "overlapped" not in name]
    weights = list(Llama(PRESETS[options.size]).parameters())
    num_params, largest = sum(p.numel() for p in weights), max(p.nbytes for p in weights)
    dimensions = {
        "world_size": options.world,
        "size": options.size,
        "num_params": num_params,
        "largest_weight_bytes": largest,
        "rows_per_rank": options.rows,
        "tokens_per_row": options.context,
    }
    report = Report("lomo", options.json, **dimensions)
    run_ranks(options.world, lambda team: run_rank(team, options), report.add)
    headers = ["optimizer", "p50 ms", "p99 ms", "gradients", "time / Lomo's"]
    caption = "Gradients: the most memory of a rank for gradients during a step."
    table = table_of([*headers, "others %"], caption, report.records, row_of)
    return report.finish(table)


if __name__ == "__main__":
    sys.exit(run_main("lomo.py", main))
