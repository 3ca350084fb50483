"""Expert parallelism: each rank has some of the experts, and tokens are sent to them and back.

torchrun --nproc-per-node 2 examples/experts.py --experts 8 --top-k 2
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from common import Job, make_parser, run
from model import PRESETS, Llama, SwiGLU

from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import clip_grad_norm_, expert

BALANCE = 0.01  # the factor of the loss that makes the router use all experts


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--experts", type=int, default=4, help="of each layer, on all ranks together")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--capacity", type=float, help="capacity factor; tokens beyond it are dropped")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    config = PRESETS["0.8M"]
    model = Llama(config)
    torch.manual_seed(0)  # the same router on all ranks, and the experts of a single process
    layers = [
        MixtureOfExperts(
            config.dim,
            partial(SwiGLU, config.dim, config.ffn_dim // options.top_k),
            options.experts,
            options.top_k,
            capacity_factor=options.capacity,
            normalize_weights=True,
        )
        for _ in model.layers
    ]
    for layer, mixture in zip(model.layers, layers, strict=True):
        layer.ffn = mixture
    model.to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)

    for step in range(options.steps):
        loss = model(*job.batch(step))  # this rank's rows
        routings = [layer.routing for layer in layers]
        balance = sum(routing.load_balancing_loss for routing in routings if routing)
        (loss + BALANCE * balance).backward()
        expert.average_gradients(model)  # not of experts, whose gradients include all ranks' tokens
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    if routing := layers[0].routing:
        job.say(f"tokens of the first layer's experts: {routing.tokens_per_expert.tolist()}")
    return job.finish(model)


if __name__ == "__main__":
    run(main, parser())
