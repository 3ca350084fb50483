"""The first steps once more: over the other backend, and in one process with all rows."""

from __future__ import annotations

from dataclasses import dataclass

from training.job import Job
from training.launch import Interrupted, stop_requested
from training.learn import Learned
from training.systems import build_system
from training.wire import Wire

REPLAYED_STEPS = 20
# One process adds the rows of all ranks up in another order, so fp32 rounding differs.
TOLERANCE = 1e-5


@dataclass
class Replays:
    """Losses in nats, means over the ranks, of the steps that were run again; rank 0 only."""

    trained: list[float]
    other: list[float]
    single: list[float]
    other_differences: int
    """Steps at which any rank's loss over the other backend was not equal to the last bit."""


def _again(job: Job, parallel: str, wire: Wire | None, learned: Learned) -> list[float]:
    options = job.options
    system = build_system(
        parallel,
        options.optimizer,
        job.config,
        wire,
        job.start.state,
        job.device,
        **(job.system_options if wire else {"clip_grad_norm": options.clip_grad_norm}),
    )
    batches = job.batches()
    losses = []
    for i, lr in enumerate(learned.lrs[:REPLAYED_STEPS]):
        asked = [float(stop_requested())]
        if any(wire.from_rank_zero(asked) if wire else asked):
            raise Interrupted
        rows = batches.rows(learned.first_step + i, options.learn_rows)
        losses.append(system.step(*rows, lr))
    system.close()
    return losses


def _means(by_rank: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*by_rank, strict=True)]


def _largest_gap(a: list[float], b: list[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def replay(job: Job, learned: Learned) -> Replays | None:
    """Repeats the first 20 steps and compares; a difference fails the run. Collective.

    With two ranks the sum of two fp32 numbers is the same in either order, so another backend must
    give the very same losses; with more, backends may add in different orders.

    Returns:
        the losses on rank 0, None elsewhere.
    """
    trained = learned.losses[:REPLAYED_STEPS]
    by_rank = job.board.share("trained", trained)
    other_by_rank: list[list[float]] = []
    if len(job.wires) > 1:
        other = _again(job, job.options.parallel, job.wires[1], learned)
        other_by_rank = job.board.share("replayed", other)
    single = _again(job, "single", None, learned) if job.is_first and job.wires else []
    job.board.share("replays done", True)
    if not job.is_first:
        return None
    differences = sum(
        any(mine[i] != theirs[i] for mine, theirs in zip(by_rank, other_by_rank, strict=True))
        for i in range(len(trained) if other_by_rank else 0)
    )
    result = Replays(_means(by_rank), _means(other_by_rank), single, differences)
    _judge(job, result)
    job.log.write("replay", **vars(result))
    return result


def _judge(job: Job, result: Replays) -> None:
    """Says what was found, and fails the run where a promise did not hold."""
    count = len(result.trained)
    if result.other:
        ours, theirs = (wire.backend for wire in job.wires)
        gap = _largest_gap(result.trained, result.other)
        text = f"the first {count} steps over {ours} and over {theirs}"
        if result.other_differences == 0:
            job.screen.say(f"{text}: all losses [green]equal to the last bit[/green]")
        elif job.world_size > 2 and gap <= TOLERANCE:
            job.screen.say(
                f"{text}: losses equal within {gap:.1e} (to the last bit is promised for 2 ranks)"
            )
        else:
            job.fail(f"{text}: losses differ at {result.other_differences} steps, by {gap:.2e}")
    if result.single:
        gap = _largest_gap(result.trained, result.single)
        text = f"the first {count} steps on {job.world_size} ranks and in one process"
        if gap <= TOLERANCE:
            job.screen.say(f"{text}: losses [green]equal within {gap:.1e}[/green]")
        else:
            job.fail(f"{text}: losses differ by {gap:.2e}, more than {TOLERANCE:.0e}")
