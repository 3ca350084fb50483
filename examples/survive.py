"""Training that goes on when a rank dies: the others shrink the group and reach the same loss.

export WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
for r in 0 1 2 3; do RANK=$r python examples/survive.py --system zero-2 --die 0:40 & done; wait

torchrun ends the other ranks as soon as one has died, and starts all again. With --save they begin
at the last state in that folder:

torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/survive.py --die 0:40 --save runs
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Job, make_parser, run
from model import PRESETS, Llama

import ringcomm
from ringcomm.optim import Lomo
from ringcomm.parallel import get_state_dict, set_state_dict, zero

DDP = torch.nn.parallel.DistributedDataParallel


def parser() -> argparse.ArgumentParser:
    """The options; --rows must be a multiple of each number of ranks."""
    parser = make_parser(__doc__)
    parser.set_defaults(rows=12)
    add = parser.add_argument
    add("--system", choices=("ddp", "zero-1", "zero-2", "lomo"), default="ddp")
    add("--die", metavar="RANK:STEP", help="kill a rank in the middle of a step")
    add("--commit", type=int, default=10, help="steps between two states to return to")
    add("--save", type=Path, help="a folder for the last state, of which a restarted job goes on")
    return parser


class Trainer:
    """A model and its optimizer on the ranks of the default group."""

    def __init__(self, options: argparse.Namespace, job: Job) -> None:
        self.job, self.system = job, options.system
        self.model: Any = Llama(PRESETS["0.8M"]).to(job.device)
        self.optimizer: Any = None
        if self.system == "lomo":
            self.optimizer = Lomo(self.model, 0.3, group=dist.group.WORLD)
            return
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr)
        if self.system == "ddp":
            self.model = DDP(self.model)
        else:
            self.optimizer = zero.shard(self.model, self.optimizer, int(self.system[-1]))

    def step(self, step: int, dies: bool) -> float:
        """Makes one step; the ranks' mean loss."""
        loss = self.model(*self.job.batch(step))  # this rank's rows
        mean = self.job.mean(loss)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)  # the others are in the backward pass
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean


def recover_replicas(old: Trainer, new: Trainer, step: int) -> int:
    """DDP: all ranks get the state of one that has made the most steps, with all gradients."""
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([step]))
    newest = int(max(steps))
    source = [int(other) for other in steps].index(newest)
    box: list[Any] = [(old.model.module.state_dict(), old.optimizer.state_dict())]
    dist.broadcast_object_list(box, source)
    new.model.module.load_state_dict(box[0][0])
    new.optimizer.load_state_dict(box[0][1])
    return newest


def recover_commit(new: Trainer, commits: dict[int, Any]) -> int:
    """Shards are lost, and LOMO may have updated some weights: back to a state that all have."""
    common = torch.tensor([max(commits)])
    dist.all_reduce(common, dist.ReduceOp.MIN)
    set_state_dict(new.model, new.optimizer, *commits[int(common)])
    return int(common)


def save(folder: Path, step: int, state: Any, losses: dict[int, float]) -> None:
    """Replaces the saved state; a death meanwhile leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save((step, state, losses), folder / "new.pt")
    (folder / "new.pt").replace(folder / "state.pt")


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    dying_rank, _, dying_step = (options.die or "-1:-1").partition(":")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    dies_at = int(dying_step) if is_first and job.rank == int(dying_rank) else -1
    trainer, step = Trainer(options, job), 0
    commits: dict[int, Any] = {}
    losses: dict[int, float] = {}
    if options.save and (options.save / "state.pt").exists():
        step, state, losses = torch.load(options.save / "state.pt", weights_only=True)
        set_state_dict(trainer.model, trainer.optimizer, *state)
        job.say(f"go on at step {step} of {options.save}")
    while step < options.steps:
        try:
            if (trainer.system != "ddp" or options.save) and step % options.commit == 0:
                commits[step] = get_state_dict(trainer.model, trainer.optimizer, full=True)
                for old_step in sorted(commits)[:-2]:  # another rank may lack the newest
                    del commits[old_step]
                if options.save and job.rank == 0:
                    save(options.save, step, commits[step], losses)
            losses[step] = trainer.step(step, step == dies_at)
            step += 1
        except ringcomm.RingcommError as error:
            if dist.is_torchelastic_launched():
                raise  # torchrun is about to end this rank, and restarts the job
            job.say(f"step {step}: {error}")
            ringcomm.shrink()
            job, dies_at, old = Job(options), -1, trainer
            trainer = Trainer(options, job)
            if trainer.system == "ddp":
                step = recover_replicas(old, trainer, step)
            else:
                step = recover_commit(trainer, commits)
            job.say(f"{job.world_size} ranks go on at step {step}")
    job.losses = list(losses.values())
    return job.finish(trainer.model)


if __name__ == "__main__":
    run(main, parser())
