"""Whole training steps by every system: loss, time, memory and bytes in one table.

All systems train the same model from the same weights on the same rows. Their losses must be those
of one process; bytes are counted by the backend and compared with the formula; memory is what
their tensors keep alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import stats
from ringcomm.bench.decoder import HEAD_WIDTH, VOCAB_SIZE, Decoder
from ringcomm.bench.gradient_watch import GradientWatch
from ringcomm.bench.interleave import (
    Contender,
    Timings,
    measure,
    open_default_group,
    records_of,
)
from ringcomm.bench.quantiles import median
from ringcomm.bench.ranks import Team
from ringcomm.bench.records import percentiles
from ringcomm.bench.trainees import SYSTEMS, System, Trainee
from ringcomm.bench.weather import WeatherWatch

BACKWARD = "backward alone"
# Steps whose losses are compared with one process's, which sees all rows.
CHECKED_STEPS = 4
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Systems:
    """What is measured.

    Attributes:
        names: of SYSTEMS, in the table's order; others are compared with the first.
        rows, tokens: of each rank's batch.
    """

    world_size: int
    names: list[str]
    width: int
    num_layers: int
    rows: int
    tokens: int
    seconds: float
    repeats: int

    def check(self) -> None:
        """Raises ValueError where it makes no sense, naming the option."""
        unknown = [name for name in self.names if name not in SYSTEMS]
        if unknown or not self.names:
            raise ValueError(f"--systems are some of {', '.join(SYSTEMS)}, got {unknown or None}")
        if min(self.world_size, self.num_layers, self.rows, self.tokens) < 1:
            raise ValueError("wants a rank, a layer, a row and a token at least")
        if self.width < 32 or self.width % 32:
            raise ValueError(f"--width is a multiple of 32, got {self.width}")
        num, in_parts = self.world_size, [n for n in self.names if n.startswith("tensor")]
        if in_parts and (self.width // HEAD_WIDTH < num or self.tokens % num):
            raise ValueError(
                f"{' and '.join(in_parts)} want a head of {HEAD_WIDTH} of the width for each of"
                f" {num} ranks, and a number of tokens that they divide: give other --width,"
                " --tokens or --systems"
            )
        if "pipeline" in self.names and self.num_layers + 3 < num:
            raise ValueError(f"{self.num_layers} layers are too few stages for {num} ranks")

    def model(self) -> Decoder:
        """The same on every rank."""
        return Decoder(self.width, self.num_layers)

    def ids(self, step: int) -> Tensor:
        """All ranks' rows of a step."""
        generator = torch.Generator().manual_seed(step)
        shape = [self.world_size * self.rows, self.tokens + 1]
        return torch.randint(VOCAB_SIZE, shape, generator=generator)

    @property
    def num_tokens(self) -> int:
        """Of all ranks, in a step."""
        return self.world_size * self.rows * self.tokens

    def ids_for(self, system: System, step: int, rank: int) -> Tensor:
        """What a rank is given."""
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
    system = SYSTEMS[name]
    model = systems.model()
    num_params = sum(param.numel() for param in model.parameters())
    watch = GradientWatch(model)
    trainee = system.make(model, groups[system.backend])
    losses, held = [], 0
    for step in range(CHECKED_STEPS):
        before = _sent_bytes()
        mine = trainee.backward(systems.ids_for(system, step, team.rank))
        held = max(held, trainee.grad_bytes())
        trainee.update()
        sent = _sent_bytes() - before
        losses.append(sum(team.share(mine)) / team.world_size)
    expected = systems.expected_losses(system)
    wrong = sum(abs(a - b) > TOLERANCE * b for a, b in zip(losses, expected, strict=True))
    held = max(held, watch.stop())
    is_counted = system.backend == "ringcomm" and system.is_counted
    by_rank = team.share((trainee.param_bytes(), held, trainee.state_bytes(), sent))
    params, grads, states, _ = (max(values) for values in zip(*by_rank, strict=True))
    return trainee, {
        "loss": losses[-1],
        "one_process_loss": expected[-1],
        "param_bytes": params,
        "grad_bytes": grads,
        "state_bytes": states,
        # The ranks' mean: shards differ by an element.
        "sent_bytes": sum(rank[3] for rank in by_rank) / team.world_size if is_counted else None,
        "formula_bytes": system.formula_bytes(systems, num_params),
        "wrong_elems": wrong,
    }


def run_rank(systems: Systems, team: Team) -> None:
    """One rank: all systems, first checked, then in turn against the clock. Collective."""
    open_default_group(team, "ringcomm")
    others = {SYSTEMS[name].backend for name in systems.names} - {"ringcomm"}
    groups = {"ringcomm": dist.group.WORLD}
    groups |= {backend: dist.new_group(backend=backend) for backend in sorted(others)}
    watch = WeatherWatch(team)
    found, contenders = {}, {}
    for name in systems.names:
        trainee, found[name] = _train_checked(systems, team, groups, name)
        ids = systems.ids_for(SYSTEMS[name], 0, team.rank)
        contenders[name] = Contender(partial(trainee.step, ids), dist.barrier)
    alone = partial(backward_alone, systems.model(), systems.ids(0)[: systems.rows])
    contenders[BACKWARD] = Contender(alone, dist.barrier)
    wrong = {name: facts["wrong_elems"] for name, facts in found.items()}
    timings, weather = watch.calmest(
        partial(measure, team, contenders, systems.seconds), systems.repeats
    )
    if timings is not None:
        bare = timings.pop(BACKWARD)
        records = records_of(timings, systems.names[0], wrong, name="system")
        for record in records:
            name = record["system"]
            record.update(found[name] | _time_beyond(timings[name], bare) | weather.record())
        team.report(records)
    dist.destroy_process_group()


def _time_beyond(timing: Timings, bare: Timings) -> dict[str, float]:
    """What a step takes beyond forward and backward alone, in neighbouring blocks."""
    pairs = zip(timing.blocks, bare.blocks, strict=True)
    beyond_us = [1e6 * (median(mine) - median(theirs)) for mine, theirs in pairs]
    return {f"update_{name}": value for name, value in percentiles(beyond_us, "us").items()}


def backward_alone(model: Decoder, ids: Tensor) -> None:
    """Forward and backward, and nothing behind them."""
    model(ids).backward()
    model.zero_grad()
