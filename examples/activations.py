"""ZeRO-R: activation checkpoints, sharded over tensor-parallel ranks or in host memory.

torchrun --nproc-per-node 2 examples/activations.py --keep shards
torchrun --nproc-per-node 2 examples/activations.py --keep auto --limit-mib 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import Job, make_parser, run
from tensor_parallel import make_model, recompute_layers
from torch import Tensor

from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.parallel import activations

CHOICES = ("whole", "shards", "host", "auto")


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--keep", choices=CHOICES, default="shards", help="where checkpoints are")
    add("--limit-mib", type=float, default=1.0, help="of auto: memory for checkpoints")
    return parser


def keep_less(model: Any, options: argparse.Namespace) -> list[Any]:
    """Checkpoints the layers of a model of transformers; `options` selects how inputs are kept.

    The context is only around the layers: it raises for tensors that are not equal on all ranks,
    such as the logits of a vocabulary-parallel head.

    Returns:
        The counters of each forward pass.
    """
    recompute_layers(model)
    counters: list[Any] = []
    if options.keep == "whole":
        return counters
    auto = None
    if options.keep == "auto":  # unsharded, sharded, or in host memory, depending on free memory
        limit = round(options.limit_mib * 2**20)
        auto = activations.auto(limit_bytes=limit, arena=activations.arena(1 << 20))
    offload: Any = "cpu" if options.keep == "host" else None
    forward = model.model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with auto or activations.partition(offload=offload, min_elems=0) as saved:
            counters.append(saved)
            return forward(*args, **kwargs)

    model.model.forward = run
    return counters


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = make_model().to(job.device)
    tensor_parallelize(model)
    counters = keep_less(model, options)
    activations.gradient_arena(model.parameters())  # one block of memory for all gradients
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)

    def loss_of(ids: Tensor, _: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    for step in range(options.steps):
        loss = loss_of(*job.batch(step, 0, 1))  # the same rows on all ranks
        if counters and step < 2:  # auto has measured the first step
            here, host = counters[-1].saved_bytes / 2**20, counters[-1].host_bytes / 2**20
            job.say(f"kept for the backward pass: {here:.2f} MiB, and {host:.2f} in the host")
        counters.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    return job.finish(loss_of, 0, 1)


if __name__ == "__main__":
    run(main, parser())
