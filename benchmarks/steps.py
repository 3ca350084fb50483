#!/usr/bin/env python3
"""Measures how much of a DDP or FSDP2 step is communication, over ringcomm and over Gloo.

    python benchmarks/steps.py --world 2 --size 0.8M

Whole training steps (forward, backward, SGD) of the examples' model, in turn: over each backend,
and over torch's "fake" one, which moves nothing and so shows what a step costs without
communication. The share of communication is what a step takes beyond that. DDP-blocking waits for
each bucket, so that what it takes beyond DDP is what DDP hides behind the backward pass. Losses
over the backends must agree. One JSON line per system and backend is appended to
benchmarks/results.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from model import PRESETS, Llama
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 - registers "fake"

from ringcomm.bench.interleave import (
    Contender,
    Timings,
    labelled,
    measure,
    open_groups,
    records_of,
)
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.report import Report
from ringcomm.bench.screen import table_of
from ringcomm.bench.script import run_main
from ringcomm.bench.weather import WeatherWatch
from ringcomm.bench.wording import as_option, comparison, inverse, share_range, words

FAKE = "fake"  # moves nothing
LEARNING_RATE = 0.01
# Steps whose losses are compared between the backends.
CHECKED_STEPS = 3


# DDP looks at the annotations of hooks: no annotations from the future in this file.
def keep_gradients(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that moves nothing; the fake backend's own futures have no result."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def average_now(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that returns when the bucket's mean is there."""
    dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group)
    return keep_gradients(None, bucket)


def wrap_ddp(model: Llama, group: dist.ProcessGroup) -> torch.nn.Module:
    """Replicas, gradients averaged in buckets while backward runs."""
    replica = DistributedDataParallel(model, process_group=group)
    if dist.get_backend(group) == FAKE:
        replica.register_comm_hook(None, keep_gradients)
    return replica


def wrap_blocking_ddp(model: Llama, group: dist.ProcessGroup) -> torch.nn.Module:
    """Replicas, gradients averaged in buckets while backward waits."""
    replica = DistributedDataParallel(model, process_group=group)
    is_fake = dist.get_backend(group) == FAKE
    replica.register_comm_hook(group, keep_gradients if is_fake else average_now)
    return replica


def wrap_fsdp2(model: Llama, group: dist.ProcessGroup) -> torch.nn.Module:
    """Weights sharded layer by layer, gathered for forward and backward."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


SYSTEMS: dict[str, Callable[[Llama, dist.ProcessGroup], torch.nn.Module]] = {
    "DDP": wrap_ddp,
    "DDP-blocking": wrap_blocking_ddp,
    "FSDP2": wrap_fsdp2,
}


class Trainer:
    """One rank's end of a model that is trained over one group, on the same rows again and again.

    The rows differ between ranks; [rows, context] int64.
    """

    def __init__(
        self, system: str, group: dist.ProcessGroup, rank: int, options: argparse.Namespace
    ) -> None:
        model = Llama(PRESETS[options.size])
        self._model = SYSTEMS[system](model, group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(1 + rank)
        rows = torch.randint(256, (options.rows, options.context + 1), generator=generator)
        self._inputs, self._targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(self) -> float:
        """Trains one step; the loss before it."""
        loss = self._model(self._inputs, self._targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def communication_share(timing: Timings, bare: Timings) -> dict[str, float]:
    """What part of a step is beyond a step without communication: p50, p10, p90 over the pairs."""
    part = inverse(timing.ratio_over(bare))
    return {"p50": 1 - part["p50"], "p10": 1 - part["p90"], "p90": 1 - part["p10"]}


def differing(team: Team, trainers: dict[str, Trainer]) -> dict[str, int]:
    """By backend on how many ranks its losses differ from the last one's. Collective."""
    losses = {
        label: torch.tensor([trainer.step() for _ in range(CHECKED_STEPS)])
        for label, trainer in trainers.items()
    }
    expected = [found for label, found in losses.items() if label != FAKE][-1]
    return {
        label: sum(team.share(label != FAKE and not torch.allclose(found, expected, rtol=1e-4)))
        for label, found in losses.items()
    }


def make_step(trainer: Trainer) -> Contender:
    """A trainer's step, ready to be timed."""

    def step() -> None:
        trainer.step()

    return Contender(step, dist.barrier)


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank: all systems in turn; rank 0 reports each one's records."""
    groups = open_groups(team, labelled([*options.backends, FAKE]))
    watch = WeatherWatch(team)
    for system in options.systems:
        trainers = {
            label: Trainer(system, group, team.rank, options) for label, group in groups.items()
        }
        wrong = differing(team, trainers)
        steps = {label: make_step(trainer) for label, trainer in trainers.items()}
        time_all = partial(measure, team, steps, options.seconds)
        timings, weather = watch.calmest(time_all, options.repeats)
        if timings is None:
            continue
        records = records_of(timings, options.backends[0], wrong)
        for record in records:
            label = record["backend"]
            share = None if label == FAKE else communication_share(timings[label], timings[FAKE])
            record.update(system=system, communication_share=share, **weather.record())
        team.report(records)
    dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """A record for people."""
    share = record["communication_share"]
    return [
        *(record["system"], record["backend"]),
        *(f"{record[name] / 1e3:.2f}" for name in ("p50_us", "p99_us")),
        "" if share is None else share_range(share),
        "" if share is None else comparison(record),
        f"{record['others_busy_percent']:.1f}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = harness.make_parser(__doc__, seconds=20.0, per="system")
    add = parser.add_argument
    add("--systems", type=as_option(words), default=",".join(SYSTEMS))
    add("--backends", type=as_option(words), default="ringcomm,gloo")
    add("--world", type=int, default=2, help="ranks, all on this machine")
    add("--size", choices=list(PRESETS), default="0.8M", help="parameters of the model")
    add("--rows", type=int, default=2, help="rows of a rank's batch")
    add("--context", type=int, default=64, help="tokens of a row")
    options = parser.parse_args(argv)
    for name in set(options.systems) - set(SYSTEMS):
        parser.error(f"--systems: {name!r} is not one of {', '.join(SYSTEMS)}")
    if FAKE in options.backends or options.world < 2 or min(options.rows, options.context) < 1:
        parser.error("wants 2 ranks, 1 row and 1 token at least, and backends that move data")
    options.json = options.json or harness.default_path(f"steps-w{options.world}")
    return options


def main(argv: list[str]) -> int:
    """Measures; returns the exit code, 3 when losses differ between the backends."""
    options = parse(argv)
    num_params = sum(param.numel() for param in Llama(PRESETS[options.size]).parameters())
    dimensions = {
        "world_size": options.world,
        "size": options.size,
        "num_params": num_params,
        "rows_per_rank": options.rows,
        "tokens_per_row": options.context,
    }
    report = Report("steps", options.json, **dimensions)
    run_ranks(options.world, lambda team: run_rank(team, options), report.add)
    headers = ["system", "backend", "p50 ms", "p99 ms", "communication", "time over", "others %"]
    caption = "Communication: share of a step beyond one that moves nothing."
    return report.finish(table_of(headers, caption, report.records, row_of, ("system",)))


if __name__ == "__main__":
    sys.exit(run_main("steps.py", main))
