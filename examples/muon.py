"""Muon for matrices and AdamW for the rest, sharded by ZeRO, beside AdamW alone.

torchrun --nproc-per-node 2 examples/muon.py --stage 2

Both train the same model on the same rows, one after the other.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import Job, make_parser, run
from model import PRESETS, Llama
from torch import nn

from ringcomm.parallel import zero


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, steps=200)
    add = parser.add_argument
    add("--stage", type=int, choices=(1, 2, 3), default=2)
    add("--size", choices=PRESETS, default="0.8M", help="parameters of the model")
    add("--clip", type=float, default=1.0, help="maximum gradient norm")
    return parser


def muon_and_adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers; AdamW for the embedding, the head and the norms."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("layers.") and p.dim() == 2]
    others = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    # Updates as large as AdamW's: one learning rate and one weight decay serve both.
    muon = torch.optim.Muon(matrices, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr, betas=(0.9, 0.99))]


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses with Muon, then those with AdamW."""
    job, ends = Job(options), []
    for name in ("Muon", "AdamW"):
        model = Llama(PRESETS[options.size]).to(job.device)
        given: Any = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.99))
        if name == "Muon":
            given = muon_and_adamw(model, options.lr)
        memory = zero.predict_memory(model, given, options.stage, world_size=job.world_size)
        job.say(f"{name}: {memory.states / 2**20:.1f} MiB of states on rank 0")
        optimizer = zero.shard(model, given, options.stage, clip_grad_norm=options.clip)
        for step in range(options.steps):
            loss = model(*job.batch(step))  # this rank's rows
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(step, loss)
        ends.append(job.finish(model)[-1])
    job.say(f"held out: Muon and AdamW {ends[0]:.4f}, AdamW alone {ends[1]:.4f}")
    return job.losses


if __name__ == "__main__":
    run(main, parser())
