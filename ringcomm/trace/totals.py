"""What a trace says in a few lines: time in collectives, waits by peer, the longest calls."""

import heapq
from collections import Counter, defaultdict
from typing import Any

from ringcomm.screen import columns, in_seconds

NUM_LONGEST = 5


def is_wait_for_peer(event: dict[str, Any]) -> bool:
    """Whether a rank waits for another one, and not for its own thread."""
    return event.get("cat") == "wait" and event["args"].get("rank") is not None


class Totals:
    """Adds up the events of a trace, in µs."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._num_calls: Counter[int] = Counter()
        self._in_calls: Counter[int] = Counter()
        self._waits: dict[int, Counter[int]] = defaultdict(Counter)  # by row and awaited rank
        self._phases: dict[int, Counter[str]] = defaultdict(Counter)  # by row and name
        self._longest: list[tuple[float, int, str]] = []

    def add(self, event: dict[str, Any]) -> None:
        """An event as it is written."""
        kind, row = event.get("cat"), event["pid"]
        if event["name"] == "process_name":
            self._names[row] = event["args"]["name"]
        elif kind == "collective":
            self._num_calls[row] += 1
            self._in_calls[row] += event["dur"]
            call = f"{event['name']} #{event['args'].get('seq', '')}"
            push = heapq.heappush if len(self._longest) < NUM_LONGEST else heapq.heappushpop
            push(self._longest, (event["dur"], row, call))
        elif kind == "program":
            self._phases[row][event["name"]] += event["dur"]
        elif is_wait_for_peer(event):
            self._waits[row][event["args"]["rank"]] += event["dur"]

    def lines(self) -> list[str]:
        """A row for each rank, the rank that was awaited longest, and the longest calls."""
        if not self._num_calls:
            return []
        phases = list(dict.fromkeys(name for found in self._phases.values() for name in found))
        table = [["", "collectives", "time in them", "of it waiting", "most for", *phases]]
        for row in sorted(self._num_calls):
            waits = self._waits[row]
            cells = [in_seconds(us / 1e6) for us in (self._in_calls[row], waits.total())]
            most = f"rank {max(waits, key=waits.__getitem__)}" if waits else ""
            times = [in_seconds(self._phases[row][name] / 1e6) for name in phases]
            table.append([self._names[row], str(self._num_calls[row]), *cells, most, *times])
        lines = columns(table, "<").splitlines()
        awaited = sum(self._waits.values(), Counter())
        if awaited:
            rank, us = awaited.most_common(1)[0]
            whole = in_seconds(us / 1e6)
            lines.append(f"the others waited longest for rank {rank}: {whole} in all")
        longest = [
            f"{call} of {self._names[row]} {in_seconds(us / 1e6)}"
            for us, row, call in sorted(self._longest, reverse=True)
        ]
        return [*lines, f"the longest: {', '.join(longest)}"]
