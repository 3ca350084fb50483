#!/usr/bin/env python3
"""Measures training steps with LOMO and AdaLomo, and with torch's SGD and AdamW.

    python benchmarks/lomo.py --world 2

The examples' model, forward, backward and update, each optimizer in turn. With one rank: what the
update in the backward pass costs, and exact clipping by gradients held or a second backward. With
more, over ringcomm: gradients reduced inside the backward pass, compared with
DistributedDataParallel. Losses must be those of SGD, clipped or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist
from gradient_watch import GradientWatch
from harness import Bench, Options, flag, names
from model import PRESETS, Llama
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _ringcomm.values import whole
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import open_default_group
from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo

LEARNING_RATE = 0.01
CLIP_NORM = 0.5
# Steps whose losses are compared.
CHECKED_STEPS = 3
SUBJECT = "Lomo"
Make = Callable[[nn.Module, dist.ProcessGroup | None], torch.optim.Optimizer]


@dataclass(frozen=True)
class Way:
    """An optimizer, its clipping, and the way whose losses it must match ("" for none)."""

    make: Make
    same_as: str = ""
    clips: bool = False


def _sgd(model: nn.Module, _: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE)


def _adamw(model: nn.Module, _: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def _ours(kind: type[Lomo | AdaLomo], **options: Any) -> Make:
    return lambda model, group: kind(model, LEARNING_RATE, group=group, **options)


WAYS: dict[str, Way] = {
    SUBJECT: Way(_ours(Lomo), "SGD"),
    "Lomo, overlapped": Way(_ours(Lomo, overlap=True), "SGD"),
    "Lomo, clip deferred": Way(_ours(Lomo, clip_grad_norm=CLIP_NORM), "SGD, clip"),
    "Lomo, clip two_pass": Way(
        _ours(Lomo, clip_grad_norm=CLIP_NORM, clip_mode="two_pass"), "SGD, clip"
    ),
    "AdaLomo": Way(_ours(AdaLomo)),
    "SGD": Way(_sgd, "SGD"),
    "SGD, clip": Way(_sgd, "SGD, clip", clips=True),
    "AdamW": Way(_adamw),
}


def trainer(name: str, team: Team, options: Options) -> tuple[Callable[[], float], GradientWatch]:
    """A step of this rank's model on the same rows; it returns the loss before it."""
    way = WAYS[name]
    model = Llama(PRESETS[options.size])
    watch = GradientWatch(model)
    group = dist.group.WORLD if team.world_size > 1 else None
    optimizer = watch.optimizer = way.make(model, group)
    own = optimizer if isinstance(optimizer, InBackwardOptimizer) else None
    call: nn.Module = model
    if group is not None and own is None:
        call = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    generator = torch.Generator().manual_seed(1 + team.rank)
    rows = torch.randint(256, (options.rows, options.context + 1), generator=generator)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> float:
        loss = call(inputs, targets)
        if own is not None:
            own.backward(loss)
            watch.look()
        else:
            loss.backward()
        if way.clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, watch


def differing(team: Team, losses: dict[str, list[float]]) -> dict[str, int]:
    """By way, the number of ranks with wrong losses. Collective."""
    wrong = {}
    for name, found in losses.items():
        expected = losses.get(WAYS[name].same_as, found)
        is_same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4)
        wrong[name] = sum(team.share(not is_same))
    return wrong


def run_rank(bench: Bench, options: Options) -> None:
    """All ways in turn; rank 0 reports each one's record."""
    team = bench.team
    torch.set_num_threads(1)
    if team.world_size > 1:
        open_default_group(team, "ringcomm")
    steps, losses, grad_bytes = {}, {}, {}
    for name in options.ways:
        steps[name], watch = trainer(name, team, options)
        losses[name] = [steps[name]() for _ in range(CHECKED_STEPS)]
        grad_bytes[name] = max(team.share(watch.stop()))
    records = bench.race(steps, SUBJECT, differing(team, losses))
    bench.report([record | {"grad_bytes": grad_bytes[record["way"]]} for record in records])


def check(options: Options) -> None:
    """Raises ValueError without what others are compared with; one rank has no overlap."""
    if SUBJECT not in options.ways:
        raise ValueError(f"--ways must include {SUBJECT}: the others are compared with it")
    if options.world == 1:
        options.ways = [name for name in options.ways if "overlapped" not in name]


def facts_of(options: Options) -> dict[str, Any]:
    """The fields of all records."""
    weights = list(Llama(PRESETS[options.size]).parameters())
    return {
        "num_params": sum(p.numel() for p in weights),
        "largest_weight_bytes": max(p.nbytes for p in weights),
        "rows_per_rank": options.rows,
        "tokens_per_row": options.context,
    }


PROGRAM = harness.Program(
    doc=__doc__,
    kind="lomo",
    rank=run_rank,
    seconds=60.0,
    per="run, for all ways",
    flags=[
        flag("--ways", names, ";".join(WAYS), "separated by ;", known=WAYS),
        flag("--world", whole(1), 2, "ranks, all on this machine"),
        flag("--size", str, "4.6M", "parameters of the model", choices=list(PRESETS)),
        flag("--rows", whole(1), 4, "rows of a rank's batch"),
        flag("--context", whole(1), 128, "tokens of a row"),
    ],
    check=check,
    file=lambda options: f"lomo-w{options.world}",
    named=("size",),
    facts=facts_of,
)

if __name__ == "__main__":
    PROGRAM.run_script()
