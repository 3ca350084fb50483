"""One page of interactive charts, which needs no network: `ringcomm bench OP --html FILE`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cells import LIBRARIES

from ringcomm.screen import COLORS

KINDS = ("collective", "collective_on_device", "systems")
TEMPLATE = Path(__file__).with_suffix(".html")


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


def write_html(records: Sequence[dict[str, Any]], path: Path, *, is_partial: bool = False) -> None:
    """Writes the page of records with their facts, and makes its folder.

    With `is_partial` the page says that the run was interrupted.

    Raises:
        ValueError: no record is of a kind that the page shows.
        OSError: the file cannot be written.
    """
    shown = [record for record in records if record["kind"] in KINDS]
    if not shown:
        raise ValueError(
            "nothing to show: no record of a collective or a training system was found"
        )
    # JSON in a <script>: the text must not end it.
    page = {"records": shown, "isPartial": is_partial}
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = TEMPLATE.read_text(encoding="utf-8").replace("@COLORS@", json.dumps(COLORS))
    text = text.replace("@LIBRARIES@", json.dumps(LIBRARIES)).replace("@RECORDS@", data)
    path.write_text(text, encoding="utf-8")
