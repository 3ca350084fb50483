"""The tables in docs/pairs.md as the tests run them; the text around them is written there."""

from __future__ import annotations

import re
from pathlib import Path

from pair_table import Table
from pair_tables import TABLES

PAGE = Path(__file__).parents[3] / "docs" / "pairs.md"
# Where a table's cases run.
WHERE = {
    "zero.shard": "on 2 ranks ",
    "Lomo and AdaLomo": "on 2 ranks ",
    "Meshes": "on 4 ranks ",
    "Between steps": "on 2 ranks, and 4 for mesh (dp 2 x tp 2 with ZeRO-2), ",
    "A person's program": "on as many ranks (data: dp 2 without ZeRO) ",
    "Meshes whose ranks differ": "of parallelize() on 4 ranks ",
    "Meshes of three axes": "of parallelize() on 8 ranks ",
}


def page() -> str:
    """The page with the sections of today's tables; those of other titles stay as they are."""
    made = {name: _section(name, table) for name, table in TABLES.items()}
    head, *sections = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    titles = [section.split("\n", 1)[0].removeprefix("## ") for section in sections]
    found = [made.pop(name, text) for name, text in zip(titles, sections, strict=True)]
    return "\n".join(text.rstrip("\n") + "\n" for text in [head, *found, *made.values()])


def _section(name: str, table: Table) -> str:
    kinds = {2: "pairs", 3: "triples"}[table.strength]
    num, num_refused = len(table.covering), len(table.refusals)
    lines = [
        *(f"## {name}", ""),
        f"{num} cases {WHERE[name]}cover all {kinds}; {num_refused} cases are refused.",
        *("", "| feature | values |", "|---|---|"),
        *(f"| {axis} | {' · '.join(values)} |" for axis, values in table.axes.items()),
        *("", "Refused:", "", "| combination | error | use instead |", "|---|---|---|"),
    ]
    for refused in table.refused:
        error = refused.raises.split(": ")[0].replace("|", " or ")
        late = ", in the first step()" if refused.is_late else ""
        lines.append(f"| {refused.when} | {error}{late} | {refused.instead} |")
    return "\n".join(lines)
