"""Vocabulary-parallel cross-entropy over 65,536 classes; the logits are never materialized.

    torchrun --nproc-per-node 2 examples/loss.py

The model predicts the next two bytes at a time. Each rank has some of the classes.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from common import Job, make_parser, run
from model import PRESETS, Llama
from torch import Tensor, nn

from ringcomm import ops

NUM_CLASSES = 256 * 256


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, steps=50)
    parser.add_argument("--z-loss", type=float, default=0.0, help="factor of log(sum(exp))**2")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    config = PRESETS["tiny"]
    body = nn.Sequential(*list(Llama(config).blocks().values())[:-1]).to(job.device)
    whole = torch.randn(NUM_CLASSES, config.dim, generator=torch.Generator().manual_seed(1)) * 0.02
    begin, end = ops.shard_range(NUM_CLASSES, job.world_size, job.rank)
    weight = nn.Parameter(whole[begin:end].to(job.device))  # this rank's classes
    optimizer = torch.optim.AdamW([*body.parameters(), weight], options.lr)

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = ops.linear_cross_entropy(
            body(ids[:, :-1]),  # the same on all ranks
            weight,
            256 * targets[:, :-1] + targets[:, 1:],
            group=dist.group.WORLD,
            vocab_start=begin,
            vocab_size=NUM_CLASSES,
            z_loss=options.z_loss,
        )
        return loss

    for step in range(options.steps):
        loss = loss_of(*job.batch(step, 0, 1))  # the same rows on all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    return job.finish(loss_of, 0, 1)


if __name__ == "__main__":
    run(main, parser())
