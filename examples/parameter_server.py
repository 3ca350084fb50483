"""A parameter server: workers pull weights and push gradients, synchronously or not.

torchrun --nproc-per-node 2 examples/parameter_server.py                # synchronous, as DDP
torchrun --nproc-per-node 3 examples/parameter_server.py --dedicated --staleness 2
torchrun --nproc-per-node 3 examples/parameter_server.py --dedicated --staleness -1
"""

from __future__ import annotations

import argparse

import torch
from common import Job, make_parser, run
from model import PRESETS, Llama

from ringcomm.parallel import ParameterServer


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, lr=1e-3)
    add = parser.add_argument
    add("--staleness", type=int, default=0, help="steps that a worker may be ahead; -1: any number")
    add("--dedicated", action="store_true", help="rank 0 serves and does not train")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = Llama(PRESETS["0.8M"]).to(job.device)
    server = ParameterServer(
        model,
        lambda params: torch.optim.AdamW(params, options.lr),
        servers=[0] if options.dedicated else "all",
        dedicated=options.dedicated,
        staleness=None if options.staleness < 0 else options.staleness,
    )
    num_workers = job.world_size - options.dedicated
    worker = job.rank - options.dedicated
    own: list[float] = []
    with server:
        if worker < 0:
            server.serve()  # until all workers have closed
        for step in range(options.steps if worker >= 0 else 0):
            server.pull()
            loss = model(*job.batch(step, worker, num_workers))
            loss.backward()
            server.push()
            own.append(float(loss.detach()))
            if step % max(1, options.steps // 10) == 0:
                print(f"worker {worker}  step {step:5}  loss {own[-1]:.4f}", flush=True)
        if worker >= 0:
            server.pull()
    if worker < 0:
        job.say(f"versions between a gradient and its weights: {server.staleness_histogram}")
    return own


if __name__ == "__main__":
    run(main, parser())
