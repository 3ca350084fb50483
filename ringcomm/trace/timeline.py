"""The steps of one ring as text, from a trace of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    events = _events(path)
    found = [e for e in events if e.get("cat") == "step" and seq in (None, e["args"].get("seq"))]
    if not found:
        raise ValueError(
            f"{path} has no ring collective" + ("" if seq is None else f" of call #{seq}")
        )
    call = _call_of(min(found, key=lambda event: event["ts"]))
    found = sorted((e for e in found if _call_of(e) == call), key=lambda event: event["ts"])
    (whole, *_) = [e for e in events if e.get("cat") == "collective" and _call_of(e) == call]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = sorted({event["pid"] for event in found})
    waits = [e for e in events if e.get("cat") == "wait" and _call_of(e) == call]
    table = [["begin", "end", "waits", "slice", "step", *(names[row] for row in rows)]]
    for event in found:
        end = event["ts"] + event["dur"]
        waited = sum(e["dur"] for e in waits if _is_in(e, event))
        begin = event["ts"] - found[0]["ts"]
        times = [begin, end - found[0]["ts"], waited]
        cells = [_path(event) if row == event["pid"] else "" for row in rows]
        table.append(
            [*(f"{time:.1f}" for time in times), str(event["args"]["slice"]), event["name"], *cells]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_title(whole, len(rows), len(found))]
    for line in table:
        cells = [text.rjust(width) for text, width in zip(line[:4], widths, strict=False)]
        cells += [text.ljust(width) for text, width in zip(line[4:], widths[4:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _call_of(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["args"].get("group"), event["args"].get("seq")


def _is_in(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    is_beside = (event["pid"], event["tid"]) == (outer["pid"], outer["tid"])
    return is_beside and outer["ts"] <= event["ts"] < outer["ts"] + outer["dur"]


def _path(event: dict[str, Any]) -> str:
    arguments = event["args"]
    source = f"{arguments['from']} → " if "from" in arguments else ""
    target = f" → {arguments['to']}" if "to" in arguments else ""
    return f"{source}chunk {arguments['chunk']}{target}"


def _title(call: dict[str, Any], num_ranks: int, num_steps: int) -> str:
    arguments = call["args"]
    words = [str(arguments[key]) for key in ("op", "dtype", "algorithm") if key in arguments]
    about = ", ".join([*words, f"{arguments['bytes']} bytes", f"{num_ranks} ranks"])
    return f"{call['name']} #{arguments['seq']}: {about}, {num_steps} steps; times in µs"


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        with opened(path, "r") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not a trace written by `ringcomm trace`") from None
    return events
