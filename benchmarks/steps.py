#!/usr/bin/env python3
"""Measures how much of a DDP or FSDP2 step is communication, over ringcomm and over Gloo.

    python benchmarks/steps.py --world 2 --size 0.8M

Whole training steps (forward, backward, SGD) of the main job's model, in turn: over each backend,
and over torch's "fake" one, which moves nothing and so shows what a step costs without
communication. The share of communication is what a step takes beyond that. Losses over the
backends must agree. One JSON line per system and backend is appended to benchmarks/results.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# isort: off
import harness  # before torch: it sets the number of threads
import torch
import torch.distributed as dist

# isort: on
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 - registers "fake"
from training.model import PRESETS, Llama, initial_weights

from ringcomm.bench import machine
from ringcomm.bench.exit_codes import EXIT_OK, EXIT_WRONG_RESULTS
from ringcomm.bench.interleave import Contender, Timings, labelled, measure, open_groups
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.records import Recorder, percentiles
from ringcomm.bench.screen import make_console, make_table
from ringcomm.bench.script import run_main
from ringcomm.bench.wording import as_option, facts_line, words

FAKE = "fake"  # moves nothing
LEARNING_RATE = 0.01
# Steps whose losses are compared between the backends.
CHECKED_STEPS = 3


# DDP looks at the annotations of hooks: no annotations from the future in this file.
def keep_gradients(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP for the backend that moves nothing, whose futures have no result."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def wrap_ddp(model: Llama, group: dist.ProcessGroup) -> torch.nn.Module:
    """Replicas, gradients averaged in buckets while backward runs."""
    replica = DistributedDataParallel(model, process_group=group)
    if dist.get_backend(group) == FAKE:
        replica.register_comm_hook(None, keep_gradients)
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
        model.load_state_dict(initial_weights(PRESETS[options.size], seed=0))
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
    ratios = bare.ratio_over(timing)  # without over with, pair by pair
    return {"p50": 1 - ratios["p50"], "p10": 1 - ratios["p90"], "p90": 1 - ratios["p10"]}


def records_of(
    system: str, timings: dict[str, Timings], wrong: dict[str, bool], weather: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record per backend; times in ms."""
    subject = next(iter(timings))
    records = []
    for label, timing in timings.items():
        steps_ms = [s * 1e3 for block in timing.blocks for s in block]
        share = None if label == FAKE else communication_share(timing, timings[FAKE])
        ratio = None
        if label not in (subject, FAKE) and not (wrong[label] or wrong[subject]):
            ratio = {"over": subject, **timing.ratio_over(timings[subject])}
        records.append(
            {
                "system": system,
                "backend": label,
                **percentiles(steps_ms, "ms"),
                "num_steps": timing.num_calls(),
                "communication_share": share,
                "ratio": ratio,
                "verified": not wrong[label],
                **weather,
            }
        )
    return records


def differing(team: Team, trainers: dict[str, Trainer]) -> dict[str, bool]:
    """Which backends' losses differ from the last one's, on any rank. Collective."""
    losses = {
        label: torch.tensor([trainer.step() for _ in range(CHECKED_STEPS)])
        for label, trainer in trainers.items()
    }
    expected = [found for label, found in losses.items() if label != FAKE][-1]
    return {
        label: any(team.share(label != FAKE and not torch.allclose(found, expected, rtol=1e-4)))
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
    own_pids = [os.getppid(), *team.share(os.getpid())]
    for system in options.systems:
        trainers = {
            label: Trainer(system, group, team.rank, options) for label, group in groups.items()
        }
        wrong = differing(team, trainers)
        watch = machine.OthersWatch(own_pids) if team.rank == 0 else None
        steps = {label: make_step(trainer) for label, trainer in trainers.items()}
        timings = measure(team, steps, options.seconds)
        if timings is not None and watch is not None:
            others = watch.percent()
            quiet = others <= machine.MAX_OTHERS_PERCENT
            weather = {"others_busy_percent": others, "quiet": quiet}
            team.report(records_of(system, timings, wrong, weather))
    dist.destroy_process_group()


def percents(share: dict[str, float]) -> str:
    """``25% (20%–31%)``."""
    return f"{share['p50']:.0%} ({share['p10']:.0%}–{share['p90']:.0%})"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--systems", type=as_option(words), default=",".join(SYSTEMS))
    add("--backends", type=as_option(words), default="ringcomm,gloo")
    add("--world", type=int, default=2, help="ranks, all on this machine")
    add("--size", choices=list(PRESETS), default="0.8M", help="parameters of the model")
    add("--rows", type=int, default=2, help="rows of a rank's batch")
    add("--context", type=int, default=64, help="tokens of a row")
    add("--seconds", type=float, default=20.0, help="per system")
    add("--json", type=Path, help="append records here (default: benchmarks/results/DATE-...)")
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
    console = make_console()
    facts = machine.facts()
    dimensions = {
        "world_size": options.world,
        "size": options.size,
        "num_params": PRESETS[options.size].num_params,
        "rows_per_rank": options.rows,
        "tokens_per_row": options.context,
    }
    recorder = Recorder(options.json, {"kind": "steps", **facts, **dimensions})
    found: list[dict[str, Any]] = []
    columns = ["system", "backend", "p50 ms", "p99 ms", "communication", "time over", "others %"]
    table = make_table(columns, "Communication: share of a step beyond one that moves nothing.")

    def on_message(records: list[dict[str, Any]]) -> None:
        for record in records:
            recorder.write(record)
            share, ratio = record["communication_share"], record["ratio"]
            table.add_row(
                *(record["system"], record["backend"]),
                *(f"{record[name]:.2f}" for name in ("p50_ms", "p99_ms")),
                "" if share is None else percents(share),
                "" if ratio is None else f"{ratio['p50']:.2f}×",
                f"{record['others_busy_percent']:.1f}",
            )
        table.add_section()
        found.extend(records)

    run_ranks(options.world, lambda team: run_rank(team, options), on_message)
    console.print(facts_line(facts))
    console.print(table)
    console.print(f"records: {options.json}")
    return EXIT_OK if all(record["verified"] for record in found) else EXIT_WRONG_RESULTS


if __name__ == "__main__":
    sys.exit(run_main("steps.py", main))
