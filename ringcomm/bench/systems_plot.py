"""A picture of what each system takes of time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Bars of a step's time on the left, of the parts of memory on the right.

    Raises:
        OSError: the file cannot be written.
        ValueError: its name ends in nothing that matplotlib writes.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [record["system"] for record in records]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 1.2 + 0.35 * len(names)), sharey=True, layout="constrained"
    )
    times = [record["p50_us"] / 1e3 for record in records]
    late = [(record["p99_us"] - record["p50_us"]) / 1e3 for record in records]
    left.barh(names, times, xerr=[[0.0] * len(late), late], color="tab:blue", capsize=2)
    left.set(xlabel="step, ms: p50, and up to p99")
    left.invert_yaxis()
    begin = [0.0] * len(names)
    for part in ("param", "grad", "state"):
        sizes = [record[f"{part}_bytes"] / 2**20 for record in records]
        right.barh(names, sizes, left=begin, label=f"{part}s")
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
    right.set(xlabel="MiB of a rank")
    right.legend()
    figure.savefig(path)
    plt.close(figure)
