"""Schedules: the stages of each rank, and the times of a step."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from ringcomm.parallel.flat_collectives import all_gathered
from ringcomm.planner.job import schedule_problem

Kind = Literal["F", "B", "I", "W"]
Time = float | Fraction
# (kind, stage, micro-batch, begin, end), times in microseconds of the host's monotonic clock.
Log = list[tuple[Kind, int, int, float, float]]


@dataclass(frozen=True)
class _Schedule:
    torch_name: str
    default_stages: int  # per rank
    has_several: bool  # stages per rank, and torch's runtime for them
    has_halves: bool = False  # of backward passes, for inputs and for weights
    is_v: bool = False


SCHEDULES = {
    "gpipe": _Schedule("ScheduleGPipe", 1, False),
    "1f1b": _Schedule("Schedule1F1B", 1, False),
    "interleaved": _Schedule("ScheduleInterleaved1F1B", 2, True),
    "zero-bubble": _Schedule("ScheduleInterleavedZeroBubble", 1, True, has_halves=True),
    "zbv": _Schedule("ScheduleZBVZeroBubble", 2, True, has_halves=True, is_v=True),
}


@dataclass(frozen=True)
class Plan:
    """A schedule for a number of ranks and micro-batches."""

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int

    @property
    def has_halves(self) -> bool:
        """Whether backward passes are split."""
        return SCHEDULES[self.schedule].has_halves

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank: round-robin (0, p, 2p, ... on rank 0), or in V form."""
        p, is_v = self.num_ranks, SCHEDULES[self.schedule].is_v
        rows = range(self.stages_per_rank)
        return [row * p + (p - 1 - rank if is_v and row % 2 else rank) for row in rows]

    def rank_of(self, stage: int) -> int:
        """The rank of a stage; -1 is the last."""
        stage %= self.num_stages
        return next(r for r in range(self.num_ranks) if stage in self.stages_of(r))

    def start(self, stages: Sequence[Any], loss_fn: Any = None) -> Any:
        """torch's schedule over a rank's stages. It does not scale gradients."""
        own = SCHEDULES[self.schedule]
        make = getattr(torch_schedules, own.torch_name)
        first = list(stages) if own.has_several else stages[0]
        return make(first, self.num_microbatches, loss_fn=loss_fn, scale_grads=False)


def make_plan(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Plan:
    """Makes a plan; raises ValueError for an unknown schedule or unsupported numbers."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    default = SCHEDULES[schedule].default_stages
    per_rank = default if stages_per_rank is None else stages_per_rank
    num = num_microbatches
    for name, value in (
        ("num_ranks", num_ranks),
        ("num_microbatches", num),
        ("num_stages_per_rank", per_rank),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}")
    wanted = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule, per_rank)
    if per_rank != wanted:
        raise ValueError(
            f"{schedule} needs num_stages_per_rank={wanted}, got {per_rank}: leave it"
            ' out, or use schedule="interleaved"'
        )
    if (problem := schedule_problem(schedule, num_ranks, num)) is not None:
        raise ValueError(problem)
    return Plan(schedule, num_ranks, per_rank, num)


class Action(NamedTuple):
    """Work on a rank, in microseconds; in a simulation exact and in the given unit."""

    rank: int
    kind: Kind
    stage: int
    micro_batch: int
    begin_us: Time
    end_us: Time


@dataclass(frozen=True)
class Timeline:
    """The computations of a step on all ranks, with their times.

    Attributes:
        num_ranks: of the pipeline.
        actions: of all ranks, sorted by begin: rank, kind ("F" forward, "B" backward, "I" and "W"
            its halves, for inputs and for weights), stage, micro_batch, begin_us, end_us.
    """

    num_ranks: int
    actions: tuple[Action, ...]

    @classmethod
    def gathered(cls, log: Log, group: dist.ProcessGroup) -> "Timeline":
        """Of all ranks' logs; RuntimeError if one is empty. Collective."""
        everyone = all_gathered(log, group)
        if not all(everyone):
            raise RuntimeError("the last step was not recorded: call step(..., record=True)")
        actions = [Action(rank, *entry) for rank, log in enumerate(everyone) for entry in log]
        return cls(group.size(), tuple(sorted(actions, key=lambda a: a.begin_us)))

    @property
    def span_us(self) -> Time:
        """From the first begin to the last end."""
        return max(a.end_us for a in self.actions) - min(a.begin_us for a in self.actions)

    def of_rank(self, rank: int) -> list[Action]:
        """A rank's actions, in order."""
        return [a for a in self.actions if a.rank == rank]

    def busy_us(self, rank: int) -> Time:
        """The computing time of a rank."""
        return sum((a.end_us - a.begin_us for a in self.of_rank(rank)), Fraction(0))

    def bubble(self) -> Time:
        """The fraction of all ranks' time in which they were idle.

        (p-1) / (m+p-1) for GPipe and 1F1B over p ranks with m micro-batches whose stages are alike,
        and (p-1) / (v m+p-1) for interleaved 1F1B with v stages per rank (Narayanan et al. 2021).
        """
        busy = sum((self.busy_us(rank) for rank in range(self.num_ranks)), Fraction(0))
        return 1 - busy / (self.num_ranks * self.span_us)

    def max_live(self) -> dict[int, int]:
        """The maximum number of micro-batches between forward and backward, by stage.

        min(m, p-i) in stage i of 1F1B, m in GPipe: memory holds the activations of these.
        """
        live: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for action in self.actions:
            live[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], live[action.stage])
        return dict(sorted(most.items()))

    def export_chrome_trace(self, path: str | Path) -> None:
        """Writes Chrome's trace format, for Perfetto and chrome://tracing; one row per rank."""
        begin = min(action.begin_us for action in self.actions)
        events = [
            {
                "name": f"{action.kind}{action.micro_batch}",
                "ph": "X",
                "pid": 0,
                "tid": action.rank,
                "ts": float(action.begin_us - begin),
                "dur": float(action.end_us - action.begin_us),
                "args": {"stage": action.stage},
            }
            for action in self.actions
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
