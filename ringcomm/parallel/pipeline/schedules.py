"""Schedules: in which order each rank computes what, by torch's implementations of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from ringcomm.parallel.pipeline.blocks import stages_of_rank

__all__ = ["SCHEDULES", "Plan", "Work", "make_plan"]

Kind = Literal["F", "B", "I", "W"]


class Work(NamedTuple):
    """What a rank computes without a break: one micro-batch in one stage.

    Attributes:
        kind: F is the forward; B the backward; I and W its two halves where a schedule has them
            apart, the gradients of the inputs, which the stage before waits for, and of weights.
    """

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class _Schedule:
    torch_name: str
    default_stages: int  # per rank
    has_several: bool  # stages per rank, and torch's runtime for them
    is_v: bool = False


SCHEDULES = {
    "gpipe": _Schedule("ScheduleGPipe", 1, False),
    "1f1b": _Schedule("Schedule1F1B", 1, False),
    "interleaved": _Schedule("ScheduleInterleaved1F1B", 2, True),
    "zero-bubble": _Schedule("ScheduleInterleavedZeroBubble", 1, True),
    "zbv": _Schedule("ScheduleZBVZeroBubble", 2, True, is_v=True),
}


@dataclass(frozen=True)
class Plan:
    """A schedule for a number of ranks and micro-batches.

    Attributes:
        schedule: its name.
        orders: by rank, what it computes, in order.
    """

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    orders: tuple[tuple[Work, ...], ...]

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> list[int]:
        """In the order of the model."""
        is_v = SCHEDULES[self.schedule].is_v
        return stages_of_rank(rank, self.num_ranks, self.num_stages, is_v)

    def rank_of(self, stage: int) -> int:
        """Which rank has a stage."""
        return next(r for r in range(self.num_ranks) if stage in self.stages_of(r))

    def start(self, stages: Sequence[Any], loss_fn: Callable[[Any, Tensor], Tensor]) -> Any:
        """torch's schedule over this rank's stages. It scales no gradients."""
        own = SCHEDULES[self.schedule]
        make = getattr(torch_schedules, own.torch_name)
        first = list(stages) if own.has_several else stages[0]
        return make(first, self.num_microbatches, loss_fn=loss_fn, scale_grads=False)


def make_plan(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Plan:
    """Plans a step.

    Raises:
        ValueError: there is no such schedule, or it does not come with these numbers.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}; got {schedule!r}")
    own = SCHEDULES[schedule]
    per_rank = own.default_stages if stages_per_rank is None else stages_per_rank
    _check_numbers(schedule, num_ranks, num_microbatches, per_rank)
    if own.has_several:
        orders = _orders_of_torch(own, num_ranks, num_microbatches, per_rank)
    else:
        num_first = [
            num_microbatches if schedule == "gpipe" else num_ranks - rank
            for rank in range(num_ranks)
        ]
        orders = [_one_stage(rank, num_microbatches, num) for rank, num in enumerate(num_first)]
    return Plan(schedule, num_ranks, per_rank, num_microbatches, tuple(map(tuple, orders)))


def _check_numbers(schedule: str, num_ranks: int, num_microbatches: int, per_rank: int) -> None:
    for name, value in (
        ("num_ranks", num_ranks),
        ("num_microbatches", num_microbatches),
        ("num_stages_per_rank", per_rank),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is a whole number, 1 or more; got {value!r}")
    if schedule in ("gpipe", "1f1b") and per_rank != 1:
        raise ValueError(
            f"{schedule} has one stage per rank, got num_stages_per_rank={per_rank}: leave it out,"
            ' or take schedule="interleaved"'
        )
    if schedule == "zbv" and per_rank != 2:
        raise ValueError(f"zbv has two stages per rank, got num_stages_per_rank={per_rank}")
    if schedule == "1f1b" and num_microbatches < num_ranks:
        raise ValueError(
            f"1f1b wants as many micro-batches as ranks at least, {num_ranks}; got"
            f" num_microbatches={num_microbatches}: take more, or"
            ' schedule="gpipe", which is no slower then'
        )
    num_rounds = max(1, num_microbatches // num_ranks)
    if schedule in ("interleaved", "zero-bubble") and num_microbatches % num_rounds:
        fit = [m for m in range(1, 2 * num_microbatches) if m % max(1, m // num_ranks) == 0]
        below = max(m for m in fit if m < num_microbatches)
        above = min(m for m in fit if m > num_microbatches)
        raise ValueError(
            f"{schedule} over {num_ranks} ranks goes in rounds of equal size, and"
            f" num_microbatches={num_microbatches} does not divide: take {below} or {above}"
        )


def _one_stage(rank: int, num_microbatches: int, num_first: int) -> list[Work]:
    """Some forwards first; then, as long as there are any, a forward behind each backward."""
    num_first = min(num_first, num_microbatches)
    order = [Work("F", rank, i) for i in range(num_first)]
    for i in range(num_microbatches):
        order.append(Work("B", rank, i))
        if num_first + i < num_microbatches:
            order.append(Work("F", rank, num_first + i))
    return order


def _orders_of_torch(
    own: _Schedule, num_ranks: int, num_microbatches: int, per_rank: int
) -> list[list[Work]]:
    """What torch's schedule has planned for all ranks, made for stages that compute nothing."""
    num_stages = num_ranks * per_rank
    stages = [
        SimpleNamespace(
            stage_index=idx,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            is_first=idx == 0,
            is_last=idx == num_stages - 1,
            submod=nn.Identity(),
        )
        for idx in stages_of_rank(0, num_ranks, num_stages, own.is_v)
    ]
    plan = getattr(torch_schedules, own.torch_name)(stages, num_microbatches)
    return [
        [
            Work(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in plan.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(num_ranks)
    ]
