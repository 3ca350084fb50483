"""How busy OTHER programs kept the machine, so that a race does not claim what it cannot know."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Above this share of all cores a measured ratio says more about the neighbour than about us.
MAX_OTHERS_SHARE = 0.10


def _busy_seconds() -> float:
    """CPU seconds that all programs have used since boot, and that a hypervisor has taken.

    user + nice + system + steal. Interrupts are left out: loopback traffic of our own runs there
    and is charged to nobody.
    """
    ticks = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (ticks[0] + ticks[1] + ticks[2] + ticks[7]) / os.sysconf("SC_CLK_TCK")


def _process_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children that it has waited for.

    0 if it is gone: what it has used then counts for the others, and no claim is made in error.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # the command's name may hold spaces
    return sum(int(v) for v in fields[11:15]) / os.sysconf("SC_CLK_TCK")


class OtherPrograms:
    """Reads the machine's clocks at the start and at ``share``; Linux only, else unknown.

    The clocks tick every 10 ms: ask after a second.
    """

    def __init__(self, own_pids: list[int]) -> None:
        """``own_pids``: the ranks and their parent, all alive until ``share`` is called.

        Children that these start have to be waited for until then.
        """
        self._pids = own_pids
        self._num_cores = os.cpu_count() or 1
        self._start = self._read()

    def _read(self) -> tuple[float, float] | None:
        try:
            others = _busy_seconds() - sum(_process_seconds(pid) for pid in self._pids)
        except (OSError, ValueError, IndexError):
            return None
        return time.monotonic(), others

    def share(self) -> float | None:
        """Share of all cores in [0, 1] that others used since the start; None if unknown."""
        now = self._read()
        if now is None or self._start is None:
            return None
        elapsed = max(now[0] - self._start[0], 1e-9) * self._num_cores
        return min(1.0, max(0.0, (now[1] - self._start[1]) / elapsed))


def why_no_claim(share: float | None) -> str | None:
    """The reason not to claim a ratio measured while others used ``share``, or None."""
    if share is None:
        return "it is not known what other programs did"
    if share > MAX_OTHERS_SHARE:
        return f"other programs used more than {MAX_OTHERS_SHARE:.0%} of the machine"
    return None
