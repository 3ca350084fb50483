"""The picture of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from training.job import Job
from training.learn import Learned
from training.replay import Replays

COLORS = ("#0b6e99", "#d1742f")  # first backend, second backend


def megabytes(num_bytes: float | None) -> str:
    """In units of 10^6 bytes, or a dash."""
    return "–" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"


def _plot_losses(job: Job, axes: Any, learned: Learned, replays: Replays | None) -> None:
    bits = [loss / math.log(2) for loss in learned.losses]
    steps = range(learned.first_step + 1, learned.first_step + 1 + len(bits))
    name = job.wires[0].backend if job.wires else "one process"
    axes.plot(steps, bits, color=COLORS[0], linewidth=1.2, label=f"{name}, rank 0")
    axes.set(xlabel="step", ylabel="bits per byte", title="learning")
    axes.legend(loc="lower left", frameon=False)
    if replays is None or not replays.other:
        return
    from matplotlib.ticker import MaxNLocator

    inset = axes.inset_axes((0.48, 0.45, 0.5, 0.5))
    count = len(replays.other)
    for losses, color, width, style, backend in (
        (replays.trained, COLORS[0], 5.0, "-", job.wires[0].backend),
        (replays.other, COLORS[1], 1.5, "--", job.wires[1].backend),
    ):
        inset.plot(
            range(learned.first_step + 1, learned.first_step + 1 + count),
            [loss / math.log(2) for loss in losses],
            color=color,
            linewidth=width,
            linestyle=style,
            label=backend,
        )
    gap = max(abs(a - b) for a, b in zip(replays.trained, replays.other, strict=True))
    inset.set_title(
        f"first {count} steps, |difference| ≤ {gap:.0e}"
        if gap
        else f"first {count} steps, difference 0",
        fontsize=8,
    )
    inset.tick_params(labelsize=7)
    inset.xaxis.set_major_locator(MaxNLocator(integer=True))
    inset.legend(fontsize=7, frameon=False)


def draw(job: Job, learned: Learned, replays: Replays | None) -> Path | None:
    """Writes ``train.png``; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4.5))
    _plot_losses(job, axes, learned, replays)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path = job.run_dir / "train.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
