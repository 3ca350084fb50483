"""A soak: four ranks call at random while ranks are stopped, late, aborted, killed and replaced.

Runs by generations. In each, four processes make a default group and go through a plan of events,
of which most end the group; those that are left shrink it and go on. A process lives until it is
killed, and joins one generation after another. Plans are drawn from a seed; test_soak.py runs them.
What a rank does is in soak_rank.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ranks import Pool, RankFailure
from sequences import WORLD, make_marks
from soak_rank import EVENTS, LIMIT_S, Outcome, draw_plan, run_generation


class Stopper:
    """Stops ranks for a moment, at random, while the context lasts."""

    def __init__(self, seed: int) -> None:
        self.num_stops = 0
        self._source = random.Random(f"{seed} stops")
        self._pidfds: list[int] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-stopper")

    def set_ranks(self, pids: Sequence[int]) -> None:
        with self._lock:
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._pidfds = [os.pidfd_open(pid) for pid in pids]

    def _run(self) -> None:
        while not self._end.wait(self._source.expovariate(4.0)):
            with self._lock:
                if not self._pidfds:
                    continue
                pidfd = self._source.choice(self._pidfds)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                    self.num_stops += 1
                self._end.wait(self._source.choice([0.001, 0.01, 0.05, 0.2]))
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def __enter__(self) -> Stopper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.set_ranks([])


# Growth of a process beyond the most that it held in its first generations, and the number of
# these. Of stores, which shrink() keeps, those that no attempt has made. Free shared buffers keep
# up to 64 MiB (docs/design/protocol.md). Anonymous memory is also that which malloc's arenas of
# threads keep: 15 MiB more in 130 generations, and the same from the 60th to the 100th.
WARM_UP = 12
BOUNDS = {
    "descriptors": 0,
    "stores": 0,
    "threads": 0,
    "bytes of C's heap": 2 << 20,
    "anonymous bytes": 32 << 20,
    "shared bytes": 64 << 20,
    "proportional bytes": 64 << 20,
}


@dataclass
class Life:
    """The samples of one process."""

    samples: list[dict[str, int]] = field(default_factory=list)
    files: Counter[str] = field(default_factory=Counter)  # the first ones
    num_attempts: int = 0

    def add(self, outcome: Outcome) -> None:
        self.files = self.files or outcome.files
        self.num_attempts += outcome.counts["shrink attempts"]
        stores = outcome.memory["stores"] - self.num_attempts
        self.samples.append({**outcome.memory, "stores": stores})

    def grown(self, warm_up: int) -> dict[str, tuple[int, int]]:
        """What grew beyond its bound: the most of the warm-up, and the least of the last three."""
        if len(self.samples) < warm_up + 3:
            return {}
        found = {}
        for name, bound in BOUNDS.items():
            before = max(sample[name] for sample in self.samples[:warm_up])
            after = min(sample[name] for sample in self.samples[-3:])
            if after > before + bound:
                found[name] = (before, after)
        return found


@dataclass
class Report:
    """What a soak has found."""

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lives: list[Life] = field(default_factory=list)
    num_generations: int = 0
    seconds: float = 0.0

    def add(
        self, life: Life, outcome: Outcome | None, may_be_dead: bool, warm_up: int
    ) -> list[str]:
        """Counts what a process reports of a generation, None if it has died; what is wrong."""
        if outcome is None:
            return [] if may_be_dead else ["the process is gone"]
        self.counts += outcome.counts
        life.add(outcome)
        growth = [
            f"{name} grew from {before:,} to {after:,} since the first {warm_up} generations"
            for name, (before, after) in life.grown(warm_up).items()
        ]
        if growth:
            growth += [f"descriptors since the first: {dict(outcome.files - life.files)}"]
        return outcome.wrong + growth

    def text(self) -> str:
        """Numbers of what was done, and the memory of the process that lived longest."""
        life = max(self.lives, key=lambda life: len(life.samples))
        if not life.samples:
            return "no generation has ended"
        counts = ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))
        num_calls = sum(n for name, n in self.counts.items() if name.startswith("call "))
        lines = [
            f"{self.num_generations} generations in {self.seconds:.0f} s, {num_calls} calls;"
            f" {len(self.lives)} processes",
            f"summed over ranks: {counts}",
        ]
        for name in BOUNDS:
            values = [sample[name] for sample in life.samples]
            warm = max(values[:WARM_UP])
            lines.append(
                f"{name} of a process of {len(values)} generations: first {values[0]:,}, most of"
                f" the first {WARM_UP} {warm:,}, most {max(values):,}, last {values[-1]:,}"
            )
        return "\n".join(lines)


def soak(
    make_pool: Callable[[], Pool],
    folder: Path,
    seed: int,
    seconds: float,
    *,
    first: int = 0,
    kinds: Sequence[str] = EVENTS,
    fault: str = "",
    warm_up: int = WARM_UP,
) -> Report:
    """Runs generations for that long, or until one has found something wrong.

    Args:
        make_pool: makes four ranks without a group.
        first: number of the first generation.
        kinds: the events that are drawn.
        fault: what a negative control plants in each generation.
    """
    make_marks(folder / "marks")
    make_marks(folder / "progress")
    report, lives = Report(), [Life() for _ in range(WORLD)]
    report.lives += lives
    pool, number = make_pool(), first
    begin = time.monotonic()  # so that there is a generation, however late the ranks are
    try:
        with Stopper(seed) as stopper:
            while not report.wrong and time.monotonic() - begin < seconds:
                plan = draw_plan(seed, number, kinds, fault)
                dead = plan.lost("kill")
                stopper.set_ranks(pool.pids)
                try:
                    outcomes = pool.call(run_generation, (plan, folder), LIMIT_S, dead)
                except RankFailure as failure:
                    report.wrong.append(f"generation {number}: {failure}")
                    outcomes = []
                stopper.set_ranks([])
                for seat, outcome in enumerate(outcomes):
                    report.wrong += [
                        f"generation {number}, seat {seat}: {text}"
                        for text in report.add(lives[seat], outcome, seat in dead, warm_up)
                    ]
                    if seat in dead and not report.wrong:
                        pool.renew(seat)
                        lives[seat] = Life()
                        report.lives.append(lives[seat])
                (folder / f"store-{number}").unlink(missing_ok=True)
                number += 1
            report.counts["stops"] = stopper.num_stops
    finally:
        pool.kill()
    report.num_generations, report.seconds = number - first, time.monotonic() - begin
    return report
