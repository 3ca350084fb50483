"""ZeRO stages 1 to 3: sharded optimizer state, gradients and weights, with offload of the state.

torchrun --nproc-per-node 2 examples/zero.py --stage 2
torchrun --nproc-per-node 2 examples/zero.py --stage 1 --offload nvme --folder /mnt/nvme
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import Job, make_parser, run
from model import PRESETS, Llama

from ringcomm.parallel import offload, zero


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--stage", type=int, choices=(1, 2, 3), default=2)
    add("--offload", choices=("cpu", "nvme"), help="keep optimizer state in host memory or files")
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder of the offload files",
    )
    add("--bf16", action="store_true", help="16-bit weights and sharded float32 masters")
    add("--clip", type=float, default=1.0, help="maximum gradient norm")
    return parser


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = Llama(PRESETS["0.8M"]).to(job.device)
    memory = zero.predict_memory(
        model, torch.optim.AdamW(model.parameters()), options.stage, world_size=job.world_size
    )
    job.say(f"stage {options.stage}, float32, each rank keeps {memory}")

    given: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    folder = None
    if options.offload is not None:
        if options.offload == "nvme":
            folder = tempfile.TemporaryDirectory(dir=options.folder)
        path = folder.name if folder else None
        given = offload.Offloaded(given, to=options.offload, path=path)
    optimizer = zero.shard(
        model,
        given,
        options.stage,
        param_dtype=torch.bfloat16 if options.bf16 else None,
        clip_grad_norm=options.clip,
    )

    for step in range(options.steps):
        ids, targets = job.batch(step)  # this rank's rows
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    losses = job.finish(model)
    if folder:
        folder.cleanup()
    return losses


if __name__ == "__main__":
    run(main, parser())
