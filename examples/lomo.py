"""LOMO and AdaLomo: the backward pass updates the weights and keeps no gradients.

torchrun --nproc-per-node 2 examples/lomo.py
torchrun --nproc-per-node 2 examples/lomo.py --optimizer adalomo --shards
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from common import Job, make_parser, run
from model import PRESETS, Llama
from torch.distributed.fsdp import fully_shard

from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, lr=0.3)
    add = parser.add_argument
    add(
        "--optimizer",
        choices=("lomo", "adalomo"),
        default="lomo",
        help="take --lr 0.06 for the 2nd",
    )
    add("--shards", action="store_true", help="shard the weights, as ZeRO-3 does")
    add("--clip", type=float, help="maximum gradient norm, by a second backward pass")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = Llama(PRESETS["0.8M"], recompute=True).to(job.device)
    group = dist.group.WORLD
    if options.shards:
        for layer in [*model.layers, model]:
            fully_shard(layer)
        group = None  # the shards know it

    optimizer: InBackwardOptimizer
    if options.optimizer == "adalomo":
        optimizer = AdaLomo(model, options.lr, group=group)
    elif options.clip:
        optimizer = Lomo(
            model, options.lr, group=group, clip_grad_norm=options.clip, clip_mode="two_pass"
        )
    else:
        optimizer = Lomo(model, options.lr, group=group)

    for step in range(options.steps):
        loss = model(*job.batch(step))  # this rank's rows
        optimizer.backward(loss)  # updates; loss.backward() would, too, without --clip
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    return job.finish(model)


if __name__ == "__main__":
    run(main, parser())
