"""Pipeline parallelism: each rank has some of the layers, and micro-batches go through all ranks.

torchrun --nproc-per-node 2 examples/pipeline.py --schedule zero-bubble
"""

from __future__ import annotations

import argparse

import torch
from common import Job, make_parser, run
from model import PRESETS, Llama

import ringcomm.ops
from ringcomm.parallel import clip_grad_norm_, pipeline


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--schedule", choices=list(pipeline.SCHEDULES), default="1f1b")
    add("--micro-batches", type=int, default=4)
    add("--recompute", action="store_true", help="activation checkpointing of each layer")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = Llama(PRESETS["0.8M"]).to(job.device)  # may also begin on the meta device
    pipe = pipeline.Pipeline(
        model.blocks(),
        ringcomm.ops.cross_entropy,  # (rows, time, classes) and (rows, time)
        options.schedule,
        options.micro_batches,
        recompute=options.recompute,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), options.lr)
    for stage, names in enumerate(pipe.stages):
        job.say(f"stage {stage}: {', '.join(names)}")

    for step in range(options.steps):
        is_last = step + 1 == options.steps
        loss = pipe.step(*job.batch(step, 0, 1), record=is_last)  # the same rows on all ranks
        clip_grad_norm_(pipe, 1.0)  # by the norm of all stages
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    job.say(f"bubble of the last step: {pipe.timeline().bubble():.0%} of the ranks' time")
    return job.finish(pipe.evaluate, 0, 1)


if __name__ == "__main__":
    run(main, parser())
