"""A picture of what plans take of time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringcomm.planner.plans import Plans

__all__ = ["draw"]

# Okabe and Ito's, which most people can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
# Text stays text, and nothing depends on the time or on chance.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ringcomm", "font.size": 9}
_TIMES = ("compute", "tensor", "expert", "pipeline", "data", "offload", "update", "bubble")
_PARTS = ("parameters", "gradients", "states", "activations", "buffers")


def draw(plans: Plans, path: Path, top: int = 12) -> None:
    """Bars of a step's parts on the left, of a rank's memory on the right, beside what there is.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
        OSError: the file cannot be written.
        ValueError: no plan fits, or its name ends in nothing that matplotlib writes.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = plans.ranked[: top or None]
    if not shown:
        raise ValueError("there is nothing to draw: no plan fits")
    names = [f"{plan.candidate.name} {plan.candidate.schedule}".strip() for plan in shown]
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with mpl.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 1.6 + 0.3 * len(names)), sharey=True, layout="constrained"
        )
        times = [[getattr(plan.time, part) for plan in shown] for part in _TIMES]
        _bars(left, names, _TIMES, times)
        left.set(xlabel="seconds of a step")
        sizes = [[getattr(plan.memory, part) / 1e9 for plan in shown] for part in _PARTS]
        _bars(right, names, _PARTS, sizes)
        right.axvline(plans.cluster.usable_bytes / 1e9, color="grey", linestyle=":")
        right.set(xlabel="GB of the fullest rank; dotted: what a device has")
        left.invert_yaxis()
        figure.suptitle(
            f"{plans.shape.name}, {plans.cluster.num_gpus} × {plans.cluster.hardware.name}"
        )
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


def _bars(axes: Any, names: list[str], parts: tuple[str, ...], values: list[list[float]]) -> None:
    """Stacked, of the parts that are there."""
    begin = [0.0] * len(names)
    for part, color, of_plans in zip(parts, _COLORS, values, strict=False):
        if any(of_plans):
            axes.barh(names, of_plans, left=begin, label=part, color=color)
        begin = [a + b for a, b in zip(begin, of_plans, strict=True)]
    axes.legend(fontsize=7, frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
