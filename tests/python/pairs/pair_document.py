"""docs/pairs.md: the tables of pairs as the tests run them."""

from __future__ import annotations

from pathlib import Path

from pair_model import TOLERANCES
from pair_runs import TABLES, world_size
from pair_table import Table

PAGE = Path(__file__).parents[3] / "docs" / "pairs.md"

HEAD = """# Which features work together

<!-- Written by RINGCOMM_WRITE_PAIRS=1 pytest tests/python/pairs -k page. -->

Every feature is tested together with every other one. A training run with both either makes the
steps of one process, or raises an error that names the unsupported combination.
`tests/python/pairs/test_pairs.py` trains a small language model in each case. It compares the
change of all weights with that of one process that has all rows and float32 masters: the difference
is less than {tolerances} of its norm. All ranks end with equal bits.

The first value of each feature is the default. Every combination that is not listed under "Refused"
gives the result of one process.
"""


def page() -> str:
    """The text of the page."""
    tolerances = ", ".join(
        f"{value:g} ({str(dtype).removeprefix('torch.')})" for dtype, value in TOLERANCES.items()
    )
    parts = [HEAD.format(tolerances=tolerances)]
    parts += [_section(name, table) for name, (table, _, _) in TABLES.items()]
    return "\n".join(parts)


def _section(name: str, table: Table) -> str:
    cases, refusals = table.covering, table.refusals
    lines = [
        f"## {name}",
        "",
        f"{len(cases)} cases on {world_size(name)} ranks cover all pairs; {len(refusals)} cases are"
        " refused.",
        "",
        "| feature | values |",
        "|---|---|",
        *(f"| {axis} | {' · '.join(values)} |" for axis, values in table.axes.items()),
        "",
        "Refused:",
        "",
        "| combination | error | use instead |",
        "|---|---|---|",
    ]
    for refused in table.refused:
        error = refused.raises.split(": ")[0].replace("|", " or ")
        late = ", in the first step()" if refused.is_late else ""
        lines.append(f"| {refused.when} | {error}{late} | {refused.instead} |")
    return "\n".join([*lines, ""])
