"""ZeRO-Infinity: weights, gradients and optimizer state in files; one unit at a time in memory.

torchrun --nproc-per-node 2 examples/infinity.py --folder runs/infinity
torchrun --nproc-per-node 2 examples/infinity.py --folder runs/infinity --resume  # once killed
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import Job, make_parser, run
from model import PRESETS, Llama

from ringcomm.parallel import get_state_dict, offload, zero


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, steps=50)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/infinity"), help="folder of the files")
    add("--resume", action="store_true", help="go on after the last complete step")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    model = Llama(PRESETS["0.8M"], recompute=True)
    adamw = offload.AdamW(model.parameters(), options.lr, to="nvme", path=options.folder)
    optimizer = zero.shard(model, adamw, stage=3, offload_weights=True, resume=options.resume)
    assert isinstance(optimizer, zero.ZeroInfinity)
    job.say(f"begins after {optimizer.num_steps} steps")

    for step in range(optimizer.num_steps, options.steps):
        loss = model(*job.batch(step))  # this rank's rows
        loss.backward()
        optimizer.step()  # ends in a commit: a killed run goes on from here
        optimizer.zero_grad()
        job.log(step, loss)
    losses = job.finish(model)
    whole, _ = get_state_dict(model, full=True)
    job.say(f"the whole model: {sum(value.numel() for value in whole.values()):,} parameters")
    optimizer.close()
    return losses


if __name__ == "__main__":
    run(main, parser())
