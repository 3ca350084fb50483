"""The report of stragglers, which destroy_process_group prints on request."""

import sys
from collections.abc import Sequence
from typing import Any

_MOST_ROWS = 16


def report(*counted: Any) -> None:
    """Writes text(*counted) to stderr; the engine calls it on one rank when its group ends."""
    if sys.stderr is not None:  # as it is where a daemon has closed it
        sys.stderr.write(text(*counted))
        sys.stderr.flush()


def text(
    name: str, ranks: Sequence[int], num_calls: int, views: Sequence[Sequence[dict[str, Any]]]
) -> str:
    """Which ranks the others have waited for: a sentence and a table; empty for an unused group.

    Over messages the wait for one rank passes from rank to rank, and each but the first waits for a
    neighbour that waits itself. So ranks are in the order of the time that others waited for them,
    less the time that they waited themselves. `ranks` are numbers in the job, `views` are by rank
    what it has counted of each rank (`ringcomm.peer_stats`), or empty if unknown.
    """
    numbers = range(len(ranks))
    known = [rank for rank in numbers if views[rank]]

    def seen(rank: int, key: str) -> list[Any]:
        """What the others have counted of a rank."""
        return [views[viewer][rank][key] for viewer in known if viewer != rank] or [0]

    late = [max(seen(rank, "num_late")) for rank in numbers]
    caused_s = [sum(seen(rank, "waited_s")) for rank in numbers]
    waited_s = [sum(each["waited_s"] for each in views[rank]) for rank in numbers]
    if not any(caused_s):
        calls = f"{num_calls:,} collective{'s' * (num_calls != 1)}"
        none = f"no rank has waited for another for as long as 100 µs, in {calls}"
        return _line(name, none) if num_calls else ""

    order = sorted(numbers, key=lambda rank: waited_s[rank] - caused_s[rank])
    worst = order[0]
    lines = [
        _line(
            name,
            f"rank {ranks[worst]} was the last to arrive in {late[worst]:,} of {num_calls:,} "
            f"collectives; the others waited {_seconds(caused_s[worst])} for it",
        ),
        f"{'rank':>6}  {'last to arrive':>14}  {'others waited':>13}  {'it waited':>9}\n",
    ]
    for rank in order[:_MOST_ROWS]:
        own = _seconds(waited_s[rank]) if rank in known else "?"
        row = f"{ranks[rank]:>6}  {late[rank]:>14,}  {_seconds(caused_s[rank]):>13}  {own:>9}\n"
        lines.append(row)
    if len(order) > _MOST_ROWS:
        lines.append(f"  and {len(order) - _MOST_ROWS} ranks that the others waited for less\n")
    if len(known) < len(ranks):
        unknown = ", ".join(str(ranks[rank]) for rank in numbers if rank not in known)
        lines.append(f"  without what rank {unknown} counted, which cannot be read from here\n")
    return "".join(lines)


def _line(name: str, words: str) -> str:
    return f"ringcomm group {name}: {words}\n"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
