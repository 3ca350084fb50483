#!/usr/bin/env python3
"""Compares ways to average gradients over ranks and update parameters with them, in one run.

    python benchmarks/fused_update.py --world 2 --optimizer adamw --seconds 4

    fused       ringcomm's reduce_scatter_update_all_gather_
    zero1       reduce_scatter, torch.optim on this rank's shard, all_gather, over ringcomm
    ringcomm    all_reduce over ringcomm, torch.optim on everything (DDP)
    gloo        the same over Gloo

torch.optim is the fused=True form, one pass over memory. The ways take turns in short blocks on
parameters and gradients of their own; of each step the slowest rank counts. After three steps from
one start all must have the parameters of a single process. One JSON line per way and size is
appended to benchmarks/results.
"""

from __future__ import annotations

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
from torch import Tensor

from ringcomm import ops
from ringcomm.bench.interleave import Contender, labelled, measure, open_groups, records_of
from ringcomm.bench.ranks import Team, run_ranks
from ringcomm.bench.report import Report
from ringcomm.bench.screen import table_of
from ringcomm.bench.script import run_main
from ringcomm.bench.weather import WeatherWatch
from ringcomm.bench.wording import byte_count, comparison, microseconds, whole_numbers
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

DEFAULT_SIZES = "1048576,4194304,16777216,67108864"
OPTIMIZERS = ("sgd", "momentum", "adamw")
WAYS = ("fused", "zero1", "ringcomm", "gloo")  # the others are compared with the first
LR = 1e-3
# Of the verification; enough for every term of the update to have a part in it.
NUM_CHECKED_STEPS = 3
# Between ways that round differently, after those steps.
TOLERANCE = 1e-5


def torch_optimizer(kind: str, param: Tensor) -> torch.optim.Optimizer:
    """torch's own, in one pass over memory."""
    if kind == "adamw":
        return torch.optim.AdamW([param], lr=LR, fused=True)
    return torch.optim.SGD([param], lr=LR, momentum=0.9 if kind == "momentum" else 0.0, fused=True)


class Way:
    """Parameters, a gradient, and what makes a step of them."""

    def __init__(self, name: str, kind: str, num_elems: int, team: Team, groups: Any) -> None:
        self.param = torch.linspace(-1, 1, num_elems)
        self.grad = gradient_of(team.rank, num_elems)
        self.group = groups["gloo" if name == "gloo" else "ringcomm"]
        self._num_steps = 0
        self._world_size = team.world_size
        self._kind = kind
        make: Callable[[], Callable[[], None]] = {"fused": self._fused, "zero1": self._zero1}.get(
            name, self._whole
        )
        self.step = make()

    def _fused(self) -> Callable[[], None]:
        optimizer: ops.SGD | ops.AdamW = ops.AdamW(lr=LR)
        if self._kind != "adamw":
            optimizer = ops.SGD(lr=LR, momentum=0.9 if self._kind == "momentum" else 0.0)
        state = ops.new_shard_state(self.param, optimizer, self.group)

        def step() -> None:
            self._num_steps += 1
            ops.reduce_scatter_update_all_gather_(
                self.param,
                self.grad,
                state,
                optimizer=optimizer,
                step=self._num_steps,
                group=self.group,
            )

        return step

    def _zero1(self) -> Callable[[], None]:
        begin, end = ops.shard_range(
            self.param.numel(), self._world_size, dist.get_rank(self.group)
        )
        shard = self.param[begin:end]
        shard.grad = torch.empty_like(shard)
        optimizer = torch_optimizer(self._kind, shard)

        def step() -> None:
            assert shard.grad is not None
            reduce_scatter_single(shard.grad, self.grad, group=self.group)
            shard.grad.div_(self._world_size)
            optimizer.step()
            all_gather_single(self.param, shard, group=self.group)

        return step

    def _whole(self) -> Callable[[], None]:
        optimizer = torch_optimizer(self._kind, self.param)
        self.param.grad = torch.empty_like(self.grad)
        averaged = self.param.grad
        averaged.copy_(self.grad)

        def step() -> None:
            # In place: from the second step on each rank has the average, which stays what it is.
            dist.all_reduce(averaged, group=self.group)
            averaged.div_(self._world_size)
            optimizer.step()

        return step


def gradient_of(rank: int, num_elems: int) -> Tensor:
    """Multiples of 1/64 that differ from rank to rank: sums over ranks are exact."""
    return ((torch.arange(num_elems) * (rank + 3)) % 97 - 48).float() / 64


def count_wrong(ways: dict[str, Way], kind: str, team: Team) -> dict[str, int]:
    """Elements of all ranks that differ from a single process's, after some steps. Collective."""
    num_elems = next(iter(ways.values())).param.numel()
    expected = torch.linspace(-1, 1, num_elems)
    grads = [gradient_of(rank, num_elems) for rank in range(team.world_size)]
    expected.grad = torch.stack(grads).sum(0) / team.world_size
    del grads
    optimizer = torch_optimizer(kind, expected)
    for _ in range(NUM_CHECKED_STEPS):
        optimizer.step()
    wrong = {}
    for name, way in ways.items():
        for _ in range(NUM_CHECKED_STEPS):
            way.step()
        is_close = torch.isclose(way.param, expected, rtol=TOLERANCE, atol=TOLERANCE)
        wrong[name] = sum(team.share(int((~is_close).sum())))
    return wrong


def run_rank(team: Team, options: argparse.Namespace) -> None:
    """One rank: every size in turn; rank 0 reports each size's records to the parent."""
    groups = open_groups(team, labelled(["ringcomm", "gloo"]))
    watch = WeatherWatch(team)
    for num_bytes in options.sizes:
        num_elems = num_bytes // 4 // team.world_size * team.world_size
        ways = {name: Way(name, options.optimizer, num_elems, team, groups) for name in WAYS}
        wrong = count_wrong(ways, options.optimizer, team)
        contenders = {
            name: Contender(way.step, partial(dist.barrier, group=way.group))
            for name, way in ways.items()
        }
        time_all = partial(measure, team, contenders, options.seconds)
        timings, weather = watch.calmest(time_all, options.repeats)
        if timings is not None:
            point = {"bytes": num_elems * 4, **weather.record()}
            team.report([r | point for r in records_of(timings, WAYS[0], wrong, name="way")])
        del ways, contenders, time_all
    dist.destroy_process_group()


def row_of(record: dict[str, Any]) -> list[str]:
    """A record for people."""
    return [
        *(byte_count(record["bytes"]), record["way"]),
        *(microseconds(record[f"{p}_us"]) for p in ("p50", "p90", "p99")),
        comparison(record),
        f"{record['others_busy_percent']:.1f}",
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = harness.make_parser(__doc__, seconds=4.0, per="size, for all ways")
    add = parser.add_argument
    add("--world", type=int, default=2, help="ranks, all on this machine")
    add("--sizes", type=whole_numbers, default=DEFAULT_SIZES, help="bytes of the parameters")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    options = parser.parse_args(argv)
    if options.world < 2 or min(options.sizes) < 4 * options.world:
        parser.error("--world is at least 2, and each size gives every rank a parameter")
    name = f"fused_update-{options.optimizer}-w{options.world}"
    options.json = options.json or harness.default_path(name)
    return options


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit code, 3 when any result was wrong."""
    options = parse(argv)
    dimensions = {"world_size": options.world, "optimizer": options.optimizer, "dtype": "float32"}
    report = Report("fused_update", options.json, **dimensions)
    torch_optimizer(options.optimizer, torch.zeros(1))  # imports seconds' worth before the fork
    run_ranks(options.world, lambda team: run_rank(team, options), report.add)
    headers = ["parameters", "way", "p50 µs", "p90 µs", "p99 µs", "time over fused", "others %"]
    caption = "* other programs used the machine."
    table = table_of(headers, caption, report.records, row_of, ("bytes",))
    return report.finish(f"{options.world} ranks, {options.optimizer}", table)


if __name__ == "__main__":
    sys.exit(run_main("fused_update.py", main))
