"""Full fine-tuning: a Llama of transformers with AdamW, LOMO and AdaLomo, on the same text.

torchrun --nproc-per-node 1 examples/finetune.py --plot finetune.png
torchrun --nproc-per-node 2 examples/finetune.py --optimizers lomo
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Job, make_parser, run
from tensor_parallel import make_model, recompute_layers
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.parallel import DistributedDataParallel

from ringcomm.integrations.transformers import patch_loss
from ringcomm.optim import AdaLomo, Lomo

# With learning rates that are the best within a factor of about 3, on the default model and text.
OPTIMIZERS: dict[str, Callable[[nn.Module, Any], torch.optim.Optimizer]] = {
    "adamw": lambda model, _: torch.optim.AdamW(model.parameters(), 3e-3, fused=True),
    "lomo": lambda model, group: Lomo(model, 0.3, group=group, clip_grad_norm=1.0),
    "adalomo": lambda model, group: AdaLomo(model, 0.06, group=group),
}
# Parts of MemTracker's, as the pages of `ringcomm show` draw them.
PARTS = {
    "Parameter": ("weights", "#0072b2"),
    "Optstate": ("optimizer states", "#009e73"),
    "Gradient": ("gradients", "#d55e00"),
    "Activation": ("activations", "#e69f00"),
    "Temp": ("temporary", "#cc79a7"),
    "Buffer": ("buffers", "#56b4e9"),
    "Other": ("other", "#7f7f7f"),
}
LINES = {
    "adamw": ("AdamW", "#332288"),
    "lomo": ("LOMO", "#44aa99"),
    "adalomo": ("AdaLomo", "#882255"),
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__, steps=300)
    add = parser.add_argument
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--hidden", type=int, default=128, help="width of the model, a multiple of 8")
    add("--layers", type=int, default=3)
    add("--plot", type=Path, metavar="FILE", help="draw losses and memory (PNG, SVG)")
    return parser


def make(options: argparse.Namespace) -> Any:
    """The same model in every call."""
    model = make_model(options.hidden, options.layers).to(options.device)
    return patch_loss(recompute_layers(model))


def train(name: str, job: Job, options: argparse.Namespace) -> list[float]:
    """Held-out losses, one for each tenth of the steps."""
    model = make(options)
    optimizer = OPTIMIZERS[name](model, dist.group.WORLD)
    replica = DistributedDataParallel(model) if name == "adamw" else model
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, 20 * (t + 1) / options.steps, 1.05 - t / options.steps)
    )
    rows, losses = job.batch(0, text="held out")[0], []
    for step in range(options.steps + 1):
        if step % max(1, options.steps // 10) == 0:
            with torch.no_grad():
                losses.append(job.mean(model(input_ids=rows, labels=rows).loss))
            job.say(f"{name:8} step {step:5}  held out {losses[-1]:.3f} nats per byte")
        ids, _ = job.batch(step)
        replica(input_ids=ids, labels=ids).loss.backward()  # LOMO and AdaLomo update here
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def measure(name: str, job: Job, options: argparse.Namespace) -> dict[str, float]:
    """MiB by part at the peak of a step of one rank."""
    model = make(options)
    optimizer = OPTIMIZERS[name](model, "none")
    ids, _ = job.batch(0)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):  # the first one makes the optimizer's state
            tracker.reset_mod_stats()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[job.device]
    return {str(getattr(part, "value", part)): num / 2**20 for part, num in peak.items()}


def draw(losses: dict[str, list[float]], memory: dict[str, dict[str, float]], path: Path) -> None:
    """Losses on the left, memory on the right."""
    from matplotlib.figure import Figure

    left, right = (figure := Figure(figsize=(11, 4), layout="tight")).subplots(1, 2)
    for name, points in losses.items():
        percent = range(0, 10 * len(points), 10)
        title, color = LINES[name]
        left.plot(percent, points, label=title, color=color)
    left.set(xlabel="% of the steps", ylabel="held-out loss, nats per byte")
    bottom, titles = torch.zeros(len(memory)), [LINES[name][0] for name in memory]
    for part, (label, color) in PARTS.items():
        heights = torch.tensor([parts[part] for parts in memory.values()])
        if heights.max() > 0.01:
            right.bar(titles, heights, 0.6, bottom, label=label, color=color)
        bottom += heights
    right.set(ylabel="MiB at the peak of a step", ylim=(0, 1.05 * bottom.max()))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(), right.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    figure.savefig(path, dpi=120)


def main(options: argparse.Namespace) -> dict[str, list[float]]:
    """Trains with each optimizer, and measures it; the losses."""
    job = Job(options)
    losses = {name: train(name, job, options) for name in options.optimizers}
    memory = {name: measure(name, job, options) for name in options.optimizers}
    for name, parts in memory.items():
        job.say(f"{name:8} MiB: " + ", ".join(f"{part} {mib:.2f}" for part, mib in parts.items()))
    if options.plot and job.rank == 0:
        draw(losses, memory, options.plot)
    return losses


if __name__ == "__main__":
    run(main, parser())
