"""Facts about the machine, what other programs do on it, and the speed of its memory."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import ringcomm
from ringcomm.bench.others import MAX_OTHERS_SHARE, OtherPrograms
from ringcomm.bench.quantiles import median
from ringcomm.bench.ranks import Team
from ringcomm.bench.records import utc_now

# Longest wait for git.
TOOL_TIMEOUT_S = 60.0
MAX_OTHERS_PERCENT = 100 * MAX_OTHERS_SHARE
FLOOR_SECONDS = 0.05
NUM_FLOOR_CALLS = (5, 2000)  # at least, at most
CHECKOUT = Path(ringcomm.__file__).resolve().parents[1]
# A run adds its records there, which changes no figure.
RECORDS_FOLDER = "benchmarks/results"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(CHECKOUT), *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _commit_facts() -> dict[str, Any]:
    """The commit that runs, and whether it was changed; None for both of an installed package."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != CHECKOUT:  # somebody's repository with a .venv in it
        return {"commit": None, "dirty": None}
    changes = _git("status", "--porcelain", "--", ".", f":!{RECORDS_FOLDER}")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else changes != "",
    }


def cpu_model() -> str:
    """The name of the CPU, as far as the kernel tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def identity() -> dict[str, Any]:
    """What must be equal for figures to be comparable: CPU, usable cores, kernel."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }


def variables(*prefixes: str) -> dict[str, str]:
    """The environment variables with a prefix, to be told and not to be obeyed."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def facts() -> dict[str, Any]:
    """What every record begins with. `date` is the run's, `dirty` leaves the records out."""
    return {
        "date": utc_now().isoformat(),
        **_commit_facts(),
        "machine": identity(),
        "torch": torch.__version__,
        "ringcomm": ringcomm.__version__,
        "python": platform.python_version(),
        "threads_per_rank": 1,
        "environment": variables("RINGCOMM_", "GLOO_"),
    }


class OthersWatch(OtherPrograms):
    """The same clocks, in percent."""

    def percent(self) -> float:
        """Percent of all cores that others used; 100 where that is not known."""
        share = self.share()
        return 100.0 if share is None else 100 * share


def memory_floor_us(team: Team, tensor: torch.Tensor) -> float:
    """Median µs of scaling ``tensor`` in place by one, on all ranks at once. Collective.

    Each byte is read once and written once, which no all_reduce can avoid. The slowest rank
    counts. For small tensors it is what calling torch costs.
    """

    def scale() -> float:
        begin = time.perf_counter()
        tensor.mul_(1)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - begin

    scale()
    estimate_s = max(team.share(scale()))
    least, most = NUM_FLOOR_CALLS
    num_calls = min(most, max(least, int(FLOOR_SECONDS / max(estimate_s, 1e-9))))
    by_rank = team.share([scale() for _ in range(num_calls)])
    return 1e6 * median(max(calls) for calls in zip(*by_rank, strict=True))
