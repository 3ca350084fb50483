"""Records: one JSON object per line, and the percentiles that they hold."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringcomm.bench.quantiles import quantile

# The fractions behind p10, p50, p90 and p99.
FRACTIONS = (0.1, 0.5, 0.9, 0.99)


def percentiles(values: Iterable[float], unit: str) -> dict[str, float]:
    """``{"p10_us": ..., "p50_us": ..., "p90_us": ..., "p99_us": ...}`` for the unit "us"."""
    ordered = sorted(values)
    return {f"p{round(f * 100)}_{unit}": quantile(ordered, f) for f in FRACTIONS}


def utc_now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


class Recorder:
    """Appends records to a JSONL file, each with the same facts in front."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """Makes the file's folder. Raises OSError when the file cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._facts = facts
        path.open("a", encoding="utf-8").close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, at once on disk for whoever reads while the run goes on."""
        line = json.dumps({**self._facts, **rounded(record)}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All records of JSONL files, in order. Raises ValueError naming a line that holds none."""
    records = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return records


def rounded(value: Any) -> Any:
    """Floats to five digits: more than a measurement holds, and lines stay legible."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return value
