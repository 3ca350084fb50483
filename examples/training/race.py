"""Phase 2: the same systems over two backends, step by step in turn, in one set of processes."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from typing import Any

from ringcomm.bench.others import OtherPrograms, why_no_claim
from ringcomm.bench.quantiles import median, quantile
from training.job import Job
from training.launch import Interrupted, stop_requested
from training.learn import ASKED_TO_STOP, ENOUGH, GO_ON, system_bytes
from training.model import PRESETS
from training.options import PEAK_LR, RACE_TOKENS
from training.screen import LiveLine
from training.system import System, TrainState
from training.systems import build_system, why_impossible

# First touches of memory, and DDP's second step, which lays its buckets out anew.
WARMUP_PAIRS = 2
MIN_PAIRS = 3
# With fewer a median and its band mean nothing.
MIN_CLAIMED_PAIRS = 5
# Steps in which all-reduces block or are timed, only to see how long they take.
BLOCKING_PAIRS = 5
# Learning rate of the races, as a share of the one that learns.
LR_SHARE = 0.1
# With more than 2 ranks backends may add in different orders; see replay.
MANY_RANKS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class RaceSpec:
    """A system that is raced."""

    name: str
    parallel: str
    optimizer: str


RACES = (
    RaceSpec("LOMO", "ddp", "lomo"),
    RaceSpec("tensor", "tp", "adamw"),
    RaceSpec("ZeRO-1", "zero1", "adamw"),
    RaceSpec("DDP", "ddp", "adamw"),
)


@dataclass
class RaceResult:
    """What one race gave; lists of two are (first backend, second backend), times in seconds."""

    name: str
    num_pairs: int
    ratio: tuple[float, float, float]
    """Second's step time over first's, of each pair: median, 10 %, 90 %."""
    step_s: list[float]
    comm_s: list[float]
    blocking_step_s: list[float] | None
    """Set where ``comm_s`` was measured in other steps, of this length."""
    sent_bytes: list[float | None]
    """Per step and rank, by the backend's own count; None where it has none."""
    formula_bytes: float
    params_bytes: int
    grads_bytes: int
    states_bytes: int
    others_share: float | None
    no_claim: str | None
    """Why the ratio is not claimed; None if it is."""


@dataclass
class _Turn:
    """One step over one backend, on this rank."""

    loss: float
    step_s: float
    comm_s: float
    sent_bytes: float | None
    formula_bytes: float


def _take_turn(job: Job, system: System, step: int, rows: int, context: int, lr: float) -> _Turn:
    wire = system.wire
    assert wire is not None
    inputs, targets = job.batches(context).rows(step, rows)
    job.wires[0].barrier()
    wire.reset()
    before = wire.sent()
    began = time.perf_counter()
    loss = system.step(inputs, targets, lr)
    step_s = time.perf_counter() - began
    now = wire.sent()
    sent = system_bytes(now.since(before)) if now and before else None
    return _Turn(loss, step_s, wire.seconds, sent, wire.formula_bytes)


def _alternate(
    job: Job, spec: RaceSpec, systems: list[System], seconds: float, most: int, line: LiveLine
) -> list[list[_Turn]]:
    """Pairs of turns, whoever begins changing from pair to pair, until the time is over.

    Raises:
        Interrupted: on all ranks alike, once rank 0 was asked to stop.
    """
    rows_per_rank, context = RACE_TOKENS[job.options.tokens]
    rows = rows_per_rank * (job.world_size if systems[0].splits_rows else 1)
    lr = PEAK_LR[spec.optimizer] * LR_SHARE
    began = time.perf_counter()
    pairs: list[list[_Turn]] = []
    least = WARMUP_PAIRS + MIN_PAIRS
    while True:
        spent = (time.perf_counter() - began) / max(seconds, 1e-9)
        over = len(pairs) >= most or (spent >= 1 and len(pairs) >= least)
        end = ASKED_TO_STOP if stop_requested() else ENOUGH if over else GO_ON
        (end,) = job.agree([end])
        if end == ASKED_TO_STOP:
            raise Interrupted
        if end == ENOUGH:
            return pairs
        for system in systems:
            system.updater.measured = len(pairs) < WARMUP_PAIRS
        turns: dict[int, _Turn] = {}
        for which in (0, 1) if len(pairs) % 2 == 0 else (1, 0):
            turns[which] = _take_turn(job, systems[which], len(pairs), rows, context, lr)
        pairs.append([turns[0], turns[1]])
        if line.due():
            line.show(min(1.0, spent), f"{spec.name}  pair {len(pairs)}")


def _build_pair(job: Job, spec: RaceSpec, state: TrainState, overlap: bool) -> list[System]:
    config = PRESETS[job.options.race_size]
    return [
        build_system(
            spec.parallel, spec.optimizer, config, wire, state, job.device, overlap=overlap
        )
        for wire in job.wires[:2]
    ]


def _check_losses(job: Job, name: str, by_rank: list[list[list[dict[str, Any]]]]) -> None:
    """Both backends train the same replica: their losses must stay equal; else the run fails."""
    gaps = [abs(pair[0]["loss"] - pair[1]["loss"]) for pairs in by_rank for pair in pairs]
    allowed = 0.0 if job.world_size == 2 else MANY_RANKS_TOLERANCE
    # Written so that a NaN fails as well.
    if not all(gap <= allowed for gap in gaps):
        first, second = (wire.backend for wire in job.wires[:2])
        job.fail(f"{name}: the losses over {first} and {second} differ by up to {max(gaps):.2e}")


def _why_no_claim(others: float | None, num_pairs: int) -> str | None:
    if num_pairs < MIN_CLAIMED_PAIRS:
        return f"fewer than {MIN_CLAIMED_PAIRS} pairs of steps were possible"
    return why_no_claim(others)


def _summarize(
    job: Job,
    spec: RaceSpec,
    system: System,
    by_rank: list[list[list[dict[str, Any]]]],
    blocking: list[list[list[dict[str, Any]]]] | None,
    others: float | None,
) -> RaceResult:
    """From every rank's turns to one result; a step lasts until its slowest rank is done."""

    def per_pair(ranks: list[list[list[dict[str, Any]]]], key: str, side: int) -> list[list[float]]:
        return [
            [pair[side][key] for pair in pairs]
            for pairs in zip(*(pairs[WARMUP_PAIRS:] for pairs in ranks), strict=True)
        ]

    def step_s(ranks: list[list[list[dict[str, Any]]]], side: int) -> list[float]:
        return [max(times) for times in per_pair(ranks, "step_s", side)]

    both = (0, 1)
    measured = blocking or by_rank
    steps = [step_s(by_rank, side) for side in both]
    ratios = sorted(second / first for first, second in zip(*steps, strict=True))
    low, middle, high = (quantile(ratios, fraction) for fraction in (0.1, 0.5, 0.9))
    memory = system.memory()
    last = by_rank[0][-1]
    return RaceResult(
        name=spec.name,
        num_pairs=len(ratios),
        ratio=(middle, low, high),
        step_s=[median(s) for s in steps],
        comm_s=[
            median(sum(t) / len(t) for t in per_pair(measured, "comm_s", side)) for side in both
        ],
        blocking_step_s=[median(step_s(blocking, side)) for side in both] if blocking else None,
        sent_bytes=[last[side]["sent_bytes"] for side in both],
        formula_bytes=last[0]["formula_bytes"],
        params_bytes=memory.params,
        grads_bytes=memory.grads,
        states_bytes=memory.states,
        others_share=others,
        no_claim=_why_no_claim(others, len(ratios)),
    )


def _race(
    job: Job, spec: RaceSpec, state: TrainState, seconds: float, line: LiveLine
) -> RaceResult | None:
    """One race; None on ranks other than 0."""
    systems = _build_pair(job, spec, state, overlap=True)
    is_apart = spec.parallel in ("ddp", "tp") and spec.optimizer != "lomo"
    watch = OtherPrograms(job.own_pids) if job.is_first else None
    share = 0.75 if is_apart else 1.0
    pairs = _alternate(job, spec, systems, seconds * share, 10**9, line)
    others = watch.share() if watch else None
    blocking = None
    if is_apart:
        del systems[1:]
        slow = _build_pair(job, spec, state, overlap=False)
        most = WARMUP_PAIRS + BLOCKING_PAIRS
        blocking = _alternate(job, spec, slow, seconds, most, line)
    shared = job.board.share(
        f"race {spec.name}",
        [[[asdict(turn) for turn in pair] for pair in p] for p in (pairs, blocking or [])],
    )
    if not job.is_first:
        return None
    by_rank = [rank[0] for rank in shared]
    _check_losses(job, spec.name, by_rank)
    for index, pair in enumerate(by_rank[0]):
        job.log.write("race pair", name=spec.name, pair=index, turns=pair)
    blocking_by_rank = [rank[1] for rank in shared] if blocking else None
    result = _summarize(job, spec, systems[0], by_rank, blocking_by_rank, others)
    job.log.write("race", **asdict(result))
    return result


def race(job: Job) -> list[RaceResult]:
    """Races every system over the first two backends. Collective; results on rank 0 only."""
    options = job.options
    config = PRESETS[options.race_size]
    state = TrainState.fresh(config, options.seed)
    results: list[RaceResult] = []
    with job.screen.live() as line:
        for spec in RACES:
            reason = why_impossible(spec.parallel, spec.optimizer, config, job.world_size)
            if reason is not None:
                job.screen.say(f"{spec.name}: left out; {reason}")
                continue
            result = _race(job, spec, state, options.race_seconds / len(RACES), line)
            gc.collect()  # hooks and weights refer to each other
            if result is not None:
                results.append(result)
    return results
