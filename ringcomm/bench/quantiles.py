"""Quantiles in plain Python: torch's own need tensors, and what forks ranks computes none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of the ascending ``ordered`` lies, interpolated."""
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Iterable[float]) -> float:
    """The median of at least one value, in any order."""
    return quantile(sorted(values), 0.5)
