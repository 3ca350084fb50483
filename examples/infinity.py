"""ZeRO-Infinity: weights, gradients and optimizer state in files; one unit at a time in memory.

torchrun --nproc-per-node 2 examples/infinity.py --folder runs/infinity
torchrun --nproc-per-node 2 examples/infinity.py --folder runs/infinity --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from checkpoint import load, save
from common import Job, make_parser, run
from model import PRESETS, Llama

from ringcomm.parallel import get_state_dict, offload, zero


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, steps=50)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/infinity"), help="of checkpoints and files")
    add("--save-every", type=int, default=25, metavar="STEPS", help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = Llama(PRESETS["0.8M"], recompute=True)
    adamw = torch.optim.AdamW(model.parameters(), options.lr)
    offloaded = offload.Offloaded(adamw, to="nvme", path=options.folder)
    optimizer = zero.shard(model, offloaded, stage=3, offload_weights=True)
    assert isinstance(optimizer, zero.ZeroInfinity)
    first_step = load(options.folder, model, optimizer) if options.resume else 0
    job.say(f"begins after {first_step} steps")

    for step in range(first_step, options.steps):
        loss = model(*job.batch(step))  # this rank's rows
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
        if (step + 1) % options.save_every == 0:
            save(options.folder, step + 1, model, optimizer)
    losses = job.finish(model)
    whole, _ = get_state_dict(model, full=True)
    job.say(f"the whole model: {sum(value.numel() for value in whole.values()):,} parameters")
    optimizer.close()
    return losses


if __name__ == "__main__":
    run(main, parser())
