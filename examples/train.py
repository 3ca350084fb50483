"""Trains a small Llama with DistributedDataParallel over ringcomm, and checks it against Gloo.

    torchrun --nproc-per-node 2 examples/train.py --out runs
    torchrun --nproc-per-node 4 examples/train.py --out runs --resume  # on any number of ranks

Ctrl-C saves a checkpoint and ends. At the end the first steps are repeated over Gloo and in one
process. On two ranks the losses with both backends must be bitwise equal, or the run fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import load, save
from common import Job, make_parser, run
from model import PRESETS, Llama
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

CHECKED_STEPS = 20
TOLERANCE = 1e-5  # one process sums the rows in another order; so do backends on 3 or more ranks
WARM_UP = 20
EXIT_CHECK_FAILED = 3


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, steps=400)
    add = parser.add_argument
    add("--size", choices=PRESETS, default="0.8M", help="parameters of the model")
    add("--out", type=Path, default=Path("runs"), help="folder of the checkpoint")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser


class Trainer:
    """A replica of the model over the ranks of a group; without one, the model of one process."""

    def __init__(self, job: Job, group: dist.ProcessGroup | None) -> None:
        self.job, self.place = job, () if group else (0, 1)
        self.model = Llama(PRESETS[job.options.size]).to(job.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), fused=True)
        self.call: Any = (
            DistributedDataParallel(self.model, process_group=group) if group else self.model
        )

    def step(self, step: int) -> Tensor:
        """Trains on the rows of a step; this rank's loss before it."""
        options = self.job.options
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * min((step + 1) / WARM_UP, 1.05 - step / options.steps)
        loss: Tensor = self.call(*self.job.batch(step, *self.place))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def check(job: Job, losses: list[Tensor]) -> bool:
    """Repeats the first steps over Gloo and in one process; returns whether all losses agree."""
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    again, alone = Trainer(job, gloo), Trainer(job, None)
    allowed = 0.0 if job.world_size <= 2 else TOLERANCE
    wrong = torch.zeros(2, dtype=torch.float64)  # losses that differ; a NaN does, too
    for step, loss in enumerate(losses):
        wrong[0] += not abs(float(again.step(step) - loss)) <= allowed
        wrong[1] += not abs(float(alone.step(step)) - job.mean(loss)) <= TOLERANCE
    dist.all_reduce(wrong, group=gloo)
    within = f"equal within {TOLERANCE:.0e}"
    for num, text, equal in zip(
        wrong.int().tolist(),
        ("over ringcomm and over Gloo", f"on {job.world_size} ranks and in one process"),
        (within if allowed else "bitwise equal", within),
        strict=True,
    ):
        found = f"{num} differ" if num else equal
        job.say(f"losses of the first {len(losses)} steps {text}: {found}")
    return not wrong.any()


def main(options: argparse.Namespace) -> list[float]:
    """Trains, saves, checks; the losses."""
    job = Job(options)
    trainer = Trainer(job, dist.group.WORLD)
    state = trainer.model, trainer.optimizer
    first_step = load(options.out, *state) if options.resume else 0
    stop = torch.zeros(1, device=job.device)  # 1 on a rank that was asked to end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.fill_(1))
    own: list[Tensor] = []
    for step in range(first_step, options.steps):
        own.append(trainer.step(step))
        job.log(step, own[-1])
        asked = stop.clone()
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # all ranks end after the same step
        if asked or (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(options.out, step + 1, *state)
        if asked:
            job.say(f"interrupted after step {step}; --resume goes on from {options.out}")
            return job.losses
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    job.finish(trainer.model)
    if first_step == 0 and not check(job, own[:CHECKED_STEPS]):
        sys.exit(EXIT_CHECK_FAILED)
    return job.losses


if __name__ == "__main__":
    run(main, parser())
