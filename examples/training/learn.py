"""Phase 1: the model learns the text over the first backend."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from training.checkpoint import Checkpoint, save_checkpoint
from training.job import Job
from training.launch import stop_requested
from training.options import CONTEXT_BYTES, LEARN_ROWS_PER_RANK, PEAK_LR
from training.system import System
from training.systems import build_system
from training.wire import SentBytes, Wire, comparison_sign

WARMUP_STEPS = 20
# What is left of the learning rate at the end.
FINAL_LR_SHARE = 0.05
CHECKPOINT_EVERY_S = 10.0
SMOOTHED_STEPS = 20
# What rank 0 tells before each step, since a signal reaches the ranks at different steps.
GO_ON, ENOUGH, ASKED_TO_STOP = 0.0, 1.0, 2.0
# What a system's own traffic consists of; the rest is control, DDP's set-up, barriers.
SYSTEM_COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "reduce_scatter_update_all_gather",
    "send",
)


@dataclass
class Learned:
    """What phase 1 did on this rank; lists have one entry per step of THIS run."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    """This rank's mean loss, nats."""
    lrs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: SentBytes | None = None
    formula_bytes: float = 0.0
    final: Checkpoint | None = None
    interrupted: bool = False
    """Whether it ended because it was asked to; the same on every rank."""


def learning_rate(optimizer: str, step: int, progress: float) -> float:
    """Linear warm-up by steps, then linear decay by ``progress`` in [0, 1]."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LR[optimizer] * warm * (1 - (1 - FINAL_LR_SHARE) * min(1.0, progress))


class _Clock:
    """Rank 0's decisions, made before each step and then told to all: go on, how far, save."""

    def __init__(self, job: Job) -> None:
        self._options = job.options
        self._before = job.start.elapsed_s
        self._began = self._saved = time.perf_counter()

    def elapsed_s(self) -> float:
        return self._before + time.perf_counter() - self._began

    def decide(self, step: int) -> list[float]:
        """[progress in [0, 1], one of GO_ON, ENOUGH, ASKED_TO_STOP, 1 to save a checkpoint]."""
        steps = self._options.steps
        progress = step / steps if steps else self.elapsed_s() / self._options.seconds
        save = time.perf_counter() - self._saved >= CHECKPOINT_EVERY_S
        if save:
            self._saved = time.perf_counter()
        end = ASKED_TO_STOP if stop_requested() else ENOUGH if progress >= 1 else GO_ON
        return [progress, end, float(save)]


def system_bytes(sent: SentBytes) -> int:
    """The part of what was sent that the system's formula speaks of."""
    return sum(sent.by_collective.get(name, 0) for name in SYSTEM_COLLECTIVES)


def _line(job: Job, wire: Wire | None, done: Learned, before: SentBytes | None) -> str:
    recent = done.losses[-SMOOTHED_STEPS:]
    bits = sum(recent) / len(recent) / math.log(2)
    tokens = LEARN_ROWS_PER_RANK * CONTEXT_BYTES * job.world_size
    rate = tokens * len(recent) / sum(done.seconds[-SMOOTHED_STEPS:])
    text = (
        f"step {done.first_step + len(done.losses)}  [bold]{bits:.3f}[/bold] bits/byte  "
        f"{rate:,.0f} tokens/s"
    )
    if wire is None or wire.world_size == 1:
        return text
    now, formula = wire.sent(), wire.formula_bytes
    if now is None or before is None:
        return f"{text}  {wire.backend} sends {formula / 1e6:,.1f} MB by the formula"
    sent = system_bytes(now.since(before))
    sign = comparison_sign(sent, formula)
    return f"{text}  sent {sent / 1e6:,.1f} MB {sign} formula {formula / 1e6:,.1f} MB"


def _checkpoint(job: Job, system: System, step: int, elapsed_s: float) -> Checkpoint:
    """Saves where training stands. Collective: a sharded state is gathered."""
    checkpoint = Checkpoint(system.state(), step, elapsed_s, job.start.identity)
    if job.is_first:
        save_checkpoint(job.run_dir, checkpoint)
    return checkpoint


def learn(job: Job) -> Learned:
    """Trains until the steps or the seconds are over, or until asked to stop. Collective.

    The last state is in ``checkpoint.pt`` when it returns, also when it was asked to stop.
    """
    options = job.options
    wire = job.wires[0] if job.wires else None
    system = build_system(
        options.parallel,
        options.optimizer,
        job.config,
        wire,
        job.start.state,
        job.device,
        **job.system_options,
    )
    batches = job.batches()
    clock = _Clock(job)
    step = job.start.step
    done = Learned(first_step=step)
    before = wire.sent() if wire else None
    if wire:
        wire.reset()
    with job.screen.live() as line:
        while True:
            progress, end, save = job.agree(clock.decide(step))
            if save or end != GO_ON:
                done.final = _checkpoint(job, system, step, clock.elapsed_s())
            if end != GO_ON:
                done.interrupted = end == ASKED_TO_STOP
                break
            began = time.perf_counter()
            lr = learning_rate(options.optimizer, step, progress)
            loss = system.step(*batches.rows(step, options.learn_rows), lr)
            done.seconds.append(time.perf_counter() - began)
            done.losses.append(loss)
            done.lrs.append(lr)
            step += 1
            job.log.write("step", step=step, loss=loss, lr=lr, seconds=done.seconds[-1])
            if line.due():
                line.show(progress, _line(job, wire, done, before))
        if done.losses:
            line.show(1.0, _line(job, wire, done, before))
    if wire:
        now = wire.sent()
        done.sent = now.since(before) if now and before else None
        done.formula_bytes = wire.formula_bytes
    system.close()
    return done
