"""What a pipeline's schedule leaves idle, and how many micro-batches it keeps alive.

GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved (Narayanan et al. 2021, arXiv
2104.04473), and the zero-bubble schedule in V form, ZB-V (Qi et al. 2023, arXiv 2401.10241).
The names are those of ringcomm.parallel.pipeline.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

__all__ = ["SCHEDULES", "bubble", "live_micro_batches", "schedule_fault"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zbv")


def bubble(schedule: str, num_stages: int, num_micro_batches: int, virtual: int = 2) -> Fraction:
    """The share of a step in which a rank waits.

    (p - 1) / (m + p - 1), of an interleaved one (p - 1) / (v m + p - 1); of ZB-V, where weights'
    gradients take what was idle, (p - 1) / (6 m + p - 1) from m = 2p on.
    """
    idle, busy = num_stages - 1, num_micro_batches
    busy *= {"interleaved": virtual, "zbv": 6}.get(schedule, 1)
    return Fraction(idle, busy + idle)


def live_micro_batches(
    schedule: str, num_stages: int, num_micro_batches: int, stage: int, virtual: int = 2
) -> Fraction:
    """How many micro-batches' activations a rank has at most, of all its layers.

    GPipe m; 1F1B min(m, p - i) on rank i; interleaved up to (p - 1) / v more than that on rank 0;
    ZB-V min(m, p) on every rank.
    """
    p, m = num_stages, Fraction(num_micro_batches)
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, Fraction(p - stage))
    if schedule == "interleaved":
        warm_up = (virtual - 1) * p + 2 * (p - 1 - stage) + 1
        return min(m, Fraction(warm_up, virtual))
    return min(m, Fraction(p))


def schedule_fault(
    schedule: str, num_layers: int, num_stages: int, num_micro_batches: int, virtual: int = 2
) -> str | None:
    """Why a schedule cannot run so; None if it can."""
    parts = {"interleaved": virtual, "zbv": 2}.get(schedule, 1)
    if num_layers < num_stages * parts:
        return f"{schedule}: {num_layers} layers make no {num_stages * parts} stages"
    if schedule == "interleaved" and num_micro_batches % num_stages:
        return f"interleaved: {num_micro_batches} micro-batches are no multiple of pp {num_stages}"
    if schedule == "zbv" and num_micro_batches < 2 * num_stages:
        return f"zbv: {num_micro_batches} micro-batches are less than 2 × pp {num_stages}"
    return None
