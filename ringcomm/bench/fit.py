"""From measured times of all_reduce to a cost model and to where one algorithm overtakes another.

    time = overhead + alpha * hand-overs + beta * bytes sent

with hand-overs and bytes of docs/design/collectives.md. Errors count relative to the time, since
times span five orders of magnitude; no coefficient is negative.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIB = 1 << 20
# A piece of one_shot and two_shot, see docs/design/collectives.md.
PIECE_BYTES = MIB
# Of a cross-over between two measured sizes: more digits would be noise.
CROSS_OVER_UNIT_BYTES = 256
NEVER_BYTES = 1


@dataclass(frozen=True)
class Median:
    """The median time of an algorithm's calls at one size."""

    algorithm: str
    num_bytes: int
    us: float


@dataclass(frozen=True)
class Cost:
    """A fitted model.

    Attributes:
        alpha_us: per hand-over.
        beta_us_per_mib: per MiB sent.
        overhead_us: per call.
        worst_fit: the largest factor between a measured time and the model's, at least 1.
    """

    alpha_us: float
    beta_us_per_mib: float
    overhead_us: float
    worst_fit: float


def terms(algorithm: str, num_bytes: int, world_size: int) -> tuple[float, float]:
    """Hand-overs, and MiB that one rank sends. Raises ValueError for an unknown algorithm."""
    num_pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    others = world_size - 1
    if algorithm == "one_shot":
        return num_pieces, others * num_bytes / MIB
    if algorithm == "two_shot":
        return 2 * num_pieces, 2 * others / world_size * num_bytes / MIB
    raise ValueError(f"no model of {algorithm!r}: there are one_shot and two_shot")


def fit_cost(medians: Sequence[Median], world_size: int) -> Cost:
    """The model with the least sum of squared relative errors.

    Of the models that leave out some coefficients, that with the least error among those without a
    negative one: with three coefficients that is the non-negative least-squares solution.

    Raises:
        ValueError: there are fewer than three measurements.
    """
    if len(medians) < 3:
        raise ValueError(f"three measurements at least make a model, got {len(medians)}")
    rows = [(*terms(m.algorithm, m.num_bytes, world_size), 1.0) for m in medians]
    times = torch.tensor([m.us for m in medians], dtype=torch.float64)
    relative = torch.tensor(rows, dtype=torch.float64) / times.unsqueeze(1)
    ones = torch.ones_like(times)
    best = torch.zeros(3, dtype=torch.float64)
    least = float(len(medians))  # the error of the model that is zero everywhere
    for count in (1, 2, 3):
        for kept in itertools.combinations(range(3), count):
            found = torch.linalg.lstsq(relative[:, kept], ones.unsqueeze(1), driver="gelsd")
            solution = torch.zeros_like(best)
            solution[list(kept)] = found.solution.squeeze(1)
            error = float((relative @ solution - ones).square().sum())
            if error < least and bool((solution >= 0).all()):
                best, least = solution, error
    factors = relative @ best
    worst = float(torch.maximum(factors, 1 / factors.clamp_min(1e-9)).max())
    alpha, beta, overhead = best.tolist()
    return Cost(alpha, beta, overhead, worst)


def cross_over_bytes(ratios: dict[int, float]) -> int:
    """The largest size for which one_shot should be chosen.

    Where noise makes the ratio cross 1 several times, that split of the sizes counts with which the
    chosen times are least in all, as factors; between its two sizes the ratio is interpolated over
    the sizes' logarithms.

    Args:
        ratios: the time of two_shot over that of one_shot, by bytes; at least one.

    Returns:
        ``NEVER_BYTES`` where two_shot wins from the smallest size on; the largest size where
        one_shot wins everywhere, since nobody knows about more.
    """
    sizes = sorted(ratios)
    gains = [math.log(ratios[size]) for size in sizes]  # of one_shot
    totals = list(itertools.accumulate(gains, initial=0.0))
    num_won = max(range(len(totals)), key=lambda count: totals[count])
    if num_won == 0:
        return NEVER_BYTES
    if num_won == len(sizes):
        return sizes[-1]
    # The split is at its best there: the last of those won gains, the first of the others loses.
    gain, loss = gains[num_won - 1], -gains[num_won]
    share = gain / (gain + loss) if gain + loss > 0 else 0.0
    low, high = sizes[num_won - 1], sizes[num_won]
    between = low * (high / low) ** share
    return max(low, int(between) // CROSS_OVER_UNIT_BYTES * CROSS_OVER_UNIT_BYTES)
