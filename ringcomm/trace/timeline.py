"""The steps of one ring as text, from a trace of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringcomm.measure.screen import columns
from ringcomm.trace.merge import opened

__all__ = ["steps"]


def steps(path: Path, seq: int | None = None) -> str:
    """The steps of a ring in the order in which they began, a column for each rank.

    Times are in µs from the first rank's begin. "2 → chunk 1 → 0" in the column of a rank: it
    receives chunk 1 from rank 2 and sends it to rank 0.

    Args:
        path: a trace from merge().
        seq: the call's number in its group; None means the first ring collective.

    Raises:
        ValueError: the file is not a trace, or has no such ring collective.
        OSError: it cannot be read.
    """
    try:
        with opened(path, "r") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a trace written by `ringcomm trace`") from None
    found = [e for e in events if e.get("cat") == "step" and seq in (None, e["args"].get("seq"))]
    if not found:
        raise ValueError(
            f"{path} has no ring collective" + ("" if seq is None else f" of call #{seq}")
        )
    found.sort(key=lambda event: event["ts"])
    first_us, call = found[0]["ts"], _call_of(found[0])
    found = [event for event in found if _call_of(event) == call]
    (whole, *_) = [e for e in events if e.get("cat") == "collective" and _call_of(e) == call]
    waits = [e for e in events if e.get("cat") == "wait" and _call_of(e) == call]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = sorted({event["pid"] for event in found})
    table = [["begin", "end", "waits", "slice", "step", *(names[row] for row in rows)]]
    for event in found:
        place, begin, end = _place(event), event["ts"], event["ts"] + event["dur"]
        inside = [e for e in waits if _place(e) == place and begin <= e["ts"] < end]
        times = [begin - first_us, end - first_us, sum(e["dur"] for e in inside)]
        cells = [_path(event) if row == event["pid"] else "" for row in rows]
        slice_number = str(event["args"]["slice"])
        table.append([*(f"{time:.1f}" for time in times), slice_number, event["name"], *cells])
    about = whole["args"]
    words = [str(about[key]) for key in ("op", "dtype", "algorithm") if key in about]
    words += [f"{about['bytes']} bytes", f"{len(rows)} ranks", f"{len(found)} steps"]
    title = f"{whole['name']} #{about['seq']}: {', '.join(words)}; times in µs"
    return f"{title}\n{columns(table, '>>>>' + '<' * (1 + len(rows)))}"


def _call_of(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["args"].get("group"), event["args"].get("seq")


def _place(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def _path(event: dict[str, Any]) -> str:
    arguments = event["args"]
    source = f"{arguments['from']} → " if "from" in arguments else ""
    target = f" → {arguments['to']}" if "to" in arguments else ""
    return f"{source}chunk {arguments['chunk']}{target}"
