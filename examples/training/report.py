"""What remains of a run: the table, the picture, the last words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from training.job import Job
from training.learn import Learned
from training.race import RaceResult
from training.replay import Replays
from training.wire import comparison_sign

COLORS = ("#0b6e99", "#d1742f")  # first backend, second backend


def megabytes(num_bytes: float | None) -> str:
    """In units of 10^6 bytes, or a dash."""
    return "–" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"


def _ratio_cell(result: RaceResult) -> str:
    """The ratio with its band; a dash where none is claimed."""
    if result.no_claim is not None:
        return "–"
    middle, low, high = result.ratio
    return f"[bold green]{middle:.2f}× ({low:.2f}–{high:.2f})[/bold green]"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for index, title in enumerate(columns):
        table.add_column(title, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def race_table(job: Job, results: list[RaceResult]) -> Table:
    """Two rows per system, one per backend; a ratio that is not claimed is a dash."""
    names = [wire.backend for wire in job.wires[:2]]
    table = _table(
        "system", "over", "step ms", "comm ms", "MB sent", f"{names[1]}/{names[0]}", "others"
    )
    for r in results:
        others = "?" if r.others_share is None else f"{r.others_share:.0%}"
        star = "*" if r.blocking_step_s else ""
        for side, name in enumerate(names):
            sent, first = r.sent_bytes[side], side == 0
            sign = "" if sent is None else comparison_sign(sent, r.formula_bytes)
            counted = "" if sent is None else f"{megabytes(sent)} {sign} "
            table.add_row(
                r.name if first else "",
                name,
                f"{1e3 * r.step_s[side]:.1f}",
                f"{1e3 * r.comm_s[side]:.1f}{star}",
                f"{counted}{megabytes(r.formula_bytes)}",
                _ratio_cell(r) if first else "",
                others if first else "",
            )
    return table


def memory_table(results: list[RaceResult]) -> Table:
    """What each system keeps alive per rank, measured from its tensors."""
    table = _table("MB alive per rank", "params", "gradients", "states", "together")
    for r in results:
        parts = (r.params_bytes, r.grads_bytes, r.states_bytes)
        table.add_row(r.name, *(megabytes(part) for part in (*parts, sum(parts))))
    return table


def say_results(job: Job, results: list[RaceResult]) -> None:
    """Prints the table with its remarks, and checks the bytes against the formula."""
    for table in (race_table(job, results), memory_table(results)):
        job.screen.console.print(table, soft_wrap=False)
    pairs = ", ".join(f"{r.num_pairs} ({r.name})" for r in results)
    job.screen.say(
        f"A ratio is the median over pairs of neighbouring steps, with its 10–90 % band; {pairs}. "
        "MB sent per rank and step: counted by the backend where it can, by the formula."
    )
    if any(r.blocking_step_s for r in results):
        job.screen.say(
            "* in steps of their own: DDP hides its communication behind the backward pass, and "
            "these block; layers in parts are slower while they are timed."
        )
    refused = dict.fromkeys(r.no_claim for r in results if r.no_claim is not None)
    if refused:
        job.screen.say(
            f"[yellow]No ratio is claimed[/yellow] where {'; where '.join(refused)}; what was "
            "measured stands in train.jsonl. Run again on a quiet machine."
        )
    counted = [r for r in results if r.sent_bytes[0] is not None]
    if not counted:
        job.screen.say(
            f"{job.wires[0].backend} does not count what it sends; the formula stands alone."
        )
    for r in counted:
        # For 2 ranks every algorithm sends the same; with more, small messages may cost more.
        if job.world_size == 2 and r.sent_bytes[0] != r.formula_bytes:
            job.fail(f"{r.name}: {r.sent_bytes[0]} bytes sent, formula {r.formula_bytes}")


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


def _plot_races(job: Job, axes: Any, results: list[RaceResult]) -> None:
    backends = [wire.backend for wire in job.wires[:2]]
    for index, result in enumerate(results):
        for place, side in enumerate((1, 0)):  # the second backend (Gloo) on the left
            x = index + 0.4 * place - 0.2
            whole = (result.blocking_step_s or result.step_s)[side] * 1e3
            comm = result.comm_s[side] * 1e3
            color = COLORS[side]
            axes.bar(x, whole - comm, 0.36, color=color, alpha=0.35)
            axes.bar(x, comm, 0.36, bottom=whole - comm, color=color)
            axes.text(x, whole - comm / 2, f"{comm:.0f}", ha="center", va="center", fontsize=7)
        middle = result.ratio[0]
        text = f"{middle:.2f}×" if result.no_claim is None else "no claim"
        grey = "black" if result.no_claim is None else "grey"
        top = max(result.blocking_step_s or result.step_s) * 1e3
        place_text = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        axes.annotate(text, (index, top), fontsize=9, color=grey, **place_text)
    names = [r.name + ("\n(timed)" if r.blocking_step_s else "") for r in results]
    axes.set_xticks(range(len(results)), [n.replace(", ", ",\n") for n in names], fontsize=8)
    axes.set(ylabel="ms per step", title=f"{backends[1]} (left) beside {backends[0]} (right)")
    axes.margins(y=0.15)
    for side in (1, 0):
        axes.bar(0, 0, color=COLORS[side], label=f"{backends[side]}: communication")
        axes.bar(0, 0, color=COLORS[side], alpha=0.35, label=f"{backends[side]}: compute")
    axes.legend(fontsize=7, frameon=False)


def draw(
    job: Job, learned: Learned, replays: Replays | None, results: list[RaceResult]
) -> Path | None:
    """Writes ``train.png``; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2 if results else 1
    figure, axes = pyplot.subplots(1, columns, figsize=(6.5 * columns, 4.5), squeeze=False)
    _plot_losses(job, axes[0][0], learned, replays)
    if results:
        _plot_races(job, axes[0][1], results)
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path = job.run_dir / "train.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
