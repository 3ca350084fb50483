"""One rank of the soak of soak.py: what it does in a generation, and what it holds after it.

Calls and their oracle are those of sequences.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from held import memory, open_files
from ranks import init_group
from sequences import (
    FAMILY,
    KINDS_DRAWN,
    WAIT_S,
    WORLD,
    Case,
    Member,
    Run,
    draw_call,
    make_groups,
    marks_of,
)

import ringcomm
from ringcomm.backend import resolve_group
from ringcomm.torch_names import backend_of

# Of a generation: what is longer is stuck.
LIMIT_S = 2 * WAIT_S
# A rank that does not come within this time is left out, once per plan with the event "late".
LATE_S = 3.0
CALLS_PER_CASE = 12
CASES_PER_STAGE = 3
NUM_SUBGROUPS = 5
LOST = ("kill", "leave", "late")
# What the default group's next call raises on every rank; LOST, and what loses no rank. A rank that
# another group's end has taken out of the calls may make one that the others do not make, the
# barrier of next_error(), before the default group has ended.
ERRORS = {
    "kill": ("PeerDiedError", "MismatchError"),
    "leave": ("PeerDiedError", "MismatchError"),
    "late": ("CollectiveTimeoutError",),
    "abort": ("RingcommError", "MismatchError"),
    "give up": ("RingcommError", "MismatchError"),
    "mismatch": ("MismatchError",),
}
EVENTS = (*ERRORS, "none")
# The actor does these before one of its calls; the others when all calls are over.
BETWEEN_CALLS = ("kill", "leave", "abort", "give up")
ALL = CALLS_PER_CASE + 100  # as an index of calls: wait for all


@dataclass(frozen=True)
class Event:
    """What happens in one stage of a generation.

    Attributes:
        kind: one of EVENTS.
        seat: the process that does it, by its rank when the generation began.
        at: the call before which it does it.
        delay_s: from that call to the death, for "kill".
    """

    kind: str
    seat: int
    at: int
    delay_s: float


@dataclass(frozen=True)
class Plan:
    """A generation. `fault` is what a negative control does: see Generation.sabotage()."""

    seed: int
    number: int
    events: tuple[Event, ...]
    fault: str = ""

    def lost(self, kind: str) -> set[int]:
        return {event.seat for event in self.events if event.kind == kind}


def draw_plan(seed: int, number: int, kinds: Sequence[str] = EVENTS, fault: str = "") -> Plan:
    """Two or three events; the first is each of `kinds` in turn. Two ranks are left at least."""
    source = random.Random(f"{seed} {number}")
    seats, events = list(range(WORLD)), []
    for idx in range(source.randint(2, 3)):
        kind = kinds[number % len(kinds)] if idx == 0 else source.choice(kinds)
        if (kind in LOST and len(seats) <= 2) or (kind == "late" and idx > 0):
            kind = "none"
        # Without rank 0, the others of a monitored barrier wait for the group's timeout. The last
        # process is never killed: it shows what a whole soak leaves in a process.
        possible = {"late": seats[1:], "kill": [seat for seat in seats if seat < WORLD - 1]}
        seat = source.choice(possible.get(kind, seats))
        if kind in LOST:
            seats.remove(seat)
        events.append(Event(kind, seat, source.randrange(CALLS_PER_CASE), source.random() * 0.06))
    return Plan(seed, number, tuple(events), fault)


# ---- one rank of a generation


@dataclass
class Outcome:
    """What a rank reports of a generation.

    Attributes:
        wrong: what was not as it must be.
        counts: calls by kind, data types, errors and shrinks.
        memory: what the process holds when all groups have been destroyed.
        files: what its descriptors are then.
    """

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: dict[str, int] = field(default_factory=dict)
    files: Counter[str] = field(default_factory=Counter)


_kept: list[Any] = []  # by faults


class Generation:
    """A process's part in a generation."""

    def __init__(self, seat: int, plan: Plan, folder: Path) -> None:
        self.seat = seat
        self.plan = plan
        self.folder = folder
        self.seats = list(range(WORLD))  # of the default group's ranks
        self.groups: list[Member] = []
        self.found = Outcome()
        self.own_random = random.Random(f"{plan.seed} {plan.number} of {seat}")
        # A number of each process, which it sets when it has shrunk.
        self.progress = marks_of(str(folder / "progress"))

    @property
    def rank(self) -> int:
        return self.seats.index(self.seat)

    def run(self) -> Outcome:
        init_group(self.seat, WORLD, self.folder / f"store-{self.plan.number}", WAIT_S)
        self.sabotage()
        for stage, event in enumerate(self.plan.events):
            self.open(stage)
            self.call_all(stage)
            if event.kind != "none":
                if not self.fail(stage, event):
                    break  # this process is no part of the generation any more
                self.progress[self.seat] = self.stage_number(stage)
            else:
                self.close()
        else:
            self.open(len(self.plan.events))
            self.call_all(len(self.plan.events))
        if dist.is_initialized():
            dist.destroy_process_group()
        self.groups = []
        self.found.memory, self.found.files = memory(), open_files()
        return self.found

    def sabotage(self) -> None:
        """What a negative control wants found, in one process."""
        if self.seat == 1 and self.plan.fault == "leaks":
            os.dup(0)
            threading.Thread(target=time.sleep, args=(LIMIT_S,), daemon=True).start()
            _kept.append(torch.ones(8 << 20))

    def stage_number(self, stage: int) -> int:
        return self.plan.number * 8 + stage + 1

    # ---- calls that succeed

    def source(self, stage: int, what: str) -> random.Random:
        """The same on all ranks."""
        return random.Random(f"{self.plan.seed} {self.plan.number} {stage} {what}")

    def open(self, stage: int) -> None:
        """Groups beside the default one."""
        num_ranks = len(self.seats)
        possible = [entry for entry in FAMILY if max(entry[0]) < num_ranks]
        chosen = self.source(stage, "groups").sample(possible, min(NUM_SUBGROUPS, len(possible)))
        self.groups = [(tuple(range(num_ranks)), None), *make_groups(chosen)]

    def own_groups(self) -> list[Any]:
        return [group for members, group in self.groups[1:] if self.rank in members]

    def close(self) -> None:
        for group in self.own_groups():
            dist.destroy_process_group(group)
        self.groups = []

    def case(self, stage: int, idx: int) -> Case:
        source = self.source(stage, f"case {idx}")
        calls = []
        for _ in range(CALLS_PER_CASE):
            group = source.randrange(len(self.groups))
            calls.append(draw_call(source, KINDS_DRAWN, group, len(self.groups[group][0])))
        return Case(tuple(calls))

    def new_run(self, stage: int, idx: int) -> Run:
        serial = (self.stage_number(stage) * (CASES_PER_STAGE + 1)) + idx
        is_wrong = self.plan.fault == "element" and self.seat == 1
        mutation = "off_by_one" if is_wrong and stage == idx == 0 else ""
        marks = str(self.folder / "marks")
        return Run(self.rank, self.case(stage, idx), serial, marks, mutation, self.groups)

    def steps(self, run: Run) -> Iterator[int]:
        """Makes the calls of a run; yields before each."""
        for idx, call in enumerate(run.case.calls):
            yield idx
            if self.own_random.random() < 0.01:
                time.sleep(self.own_random.random() * 0.1)
            if (side := run.side(call, idx)) is not None:
                self.found.counts[f"call {call.kind}"] += 1
                self.found.counts[f"type {call.dtype}"] += 1
                run.begin(side, idx)
            run.finish_until(idx)
        run.finish_until(ALL)

    def call_all(self, stage: int) -> None:
        for idx in range(CASES_PER_STAGE):
            run = self.new_run(stage, idx)
            for _ in self.steps(run):
                pass
            self.found.wrong += run.wrong
        dist.barrier()  # or a rank that ends the group would end these calls on others

    # ---- an event that ends the group

    def fail(self, stage: int, event: Event) -> bool:
        run = self.new_run(stage, CASES_PER_STAGE)
        is_actor = event.seat == self.seat
        raised: ringcomm.RingcommError | None = None
        try:
            for idx in self.steps(run):
                if idx == event.at and is_actor and event.kind in BETWEEN_CALLS:
                    if event.kind != "kill":
                        run.finish_until(ALL)
                    self.act(event)
                    if event.kind != "kill":
                        break
            if event.kind == "leave" and is_actor:
                return False
            if event.kind == "late" and is_actor:
                self.wait_for_others(stage)
            elif not (event.kind == "give up" and is_actor):
                self.call_until_failure(event, is_actor)
        except ringcomm.RingcommError as error:
            self.found.counts[f"raised {type(error).__name__}"] += 1
            raised = error
        if event.kind == "late" and not is_actor:  # which does not end the group
            self.check_cause(event, raised)
        elif not (event.kind == "give up" and is_actor):
            self.check_cause(event, self.next_error())
        self.end_groups(run)
        return self.shrink(event, is_actor)

    def act(self, event: Event) -> None:
        if event.kind == "kill":  # by the kernel, at any instruction
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(event.delay_s, 1e-4))
        elif event.kind == "leave":
            dist.destroy_process_group()
        elif event.kind == "abort":
            backend_of(resolve_group(), torch.device("cpu")).abort()

    def call_until_failure(self, event: Event, is_actor: bool) -> None:
        """What all ranks but a late one do at the end of the calls."""
        if event.kind == "late":
            ringcomm.monitored_barrier(None, timedelta(seconds=LATE_S))
        if event.kind == "mismatch" and is_actor:
            dist.all_reduce(torch.ones(5))
        deadline = time.monotonic() + WAIT_S / 2
        while time.monotonic() < deadline:
            dist.all_reduce(torch.ones(4))
        self.found.wrong.append(f"{event}: no error")

    def wait_for_others(self, stage: int) -> None:
        deadline = time.monotonic() + WAIT_S
        others = [seat for seat in self.seats if seat != self.seat]
        while any(self.progress[seat] < self.stage_number(stage) for seat in others):
            if time.monotonic() > deadline:
                self.found.wrong.append("late: the others did not shrink")
                return
            time.sleep(0.01)

    def next_error(self) -> ringcomm.RingcommError | None:
        try:
            dist.barrier()
        except ringcomm.RingcommError as error:
            return error
        return None

    def check_cause(self, event: Event, error: ringcomm.RingcommError | None) -> None:
        """The error says what has happened, on every rank."""
        is_late_rank = event.kind == "late" and event.seat == self.seat  # others have shrunk
        expected = ("RingcommError",) if is_late_rank else ERRORS[event.kind]
        named = self.seats.index(event.seat) if event.kind in LOST and not is_late_rank else None
        kind, rank = type(error).__name__, getattr(error, "rank", None)
        is_cause = named in (None, rank)
        if kind == "MismatchError" and event.kind != "mismatch":
            is_cause = "barrier #" in str(error)
        if kind not in expected or not is_cause:
            self.found.wrong.append(f"{event} of seats {self.seats}: {kind}({rank}): {error}")

    def end_groups(self, run: Run) -> None:
        """Ends the waits of others in the other groups, and looks at the calls that are over."""
        for group in self.own_groups():
            backend_of(group, torch.device("cpu")).abort()
        for _, work, _ in run.pending:
            with contextlib.suppress(Exception):  # of torch, if a future is waited for
                work.wait()
        run.pending = []
        self.found.wrong += run.wrong
        for group in self.own_groups():
            with contextlib.suppress(ringcomm.RingcommError):
                dist.destroy_process_group(group)
        self.groups = []

    def shrink(self, event: Event, is_actor: bool) -> bool:
        expected = [seat for seat in self.seats if event.kind not in LOST or seat != event.seat]
        limit = timedelta(seconds=LATE_S) if event.kind == "late" else None
        begin = time.monotonic()
        try:
            new = ringcomm.shrink(timeout=limit)
        except ringcomm.RingcommError as error:
            if not (event.kind == "late" and is_actor and "in time" in str(error)):
                self.found.wrong.append(f"{event}: shrink raised {error}")
            return False
        self.found.counts["shrinks"] += 1
        self.found.counts["shrink attempts"] += int(new.group_name.rpartition(".")[2])
        self.found.counts[f"happened {event.kind}"] += 1
        if event.kind != "late":
            self.found.counts["shrink ms"] += round(1000 * (time.monotonic() - begin))
        seats = [torch.zeros(1, dtype=torch.int64) for _ in range(new.size())]
        dist.all_gather(seats, torch.tensor([self.seat]))
        self.seats = [int(seat) for seat in seats]
        if self.seats != expected:
            self.found.wrong.append(f"{event}: seats {self.seats} are left, not {expected}")
        return True


def run_generation(seat: int, plan: Plan, folder: Path) -> Outcome:
    return Generation(seat, plan, folder).run()
