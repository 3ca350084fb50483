"""docs/pairs.md: the tables of pairs as the tests run them."""

from __future__ import annotations

from pathlib import Path

import between_table
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

WHOLE_LOOPS = """## Whole loops

The next tables train a small Llama of transformers, with different rows on each data-parallel rank.
The loss of a step is the mean over the labels of all ranks. Before the third of four steps the user
does something else: `tests/python/pairs/between_runs.py` has each action. Losses in evaluation
mode, generated tokens, gradients of inputs, states, and all weights at the end equal those of one
process in float64, within {tolerance:g}. Replicas end with equal bits.

- *labels*: rows have different numbers of labels, or a rank has none. Without data-parallel ranks
  it is a micro-batch that has none.
- *scheduler*: made for the optimizer that zero.shard() returns, or before for the given one.
- *seeds*: all ranks make the same model, or each its own; weights and buffers start from rank 0's.
- *leaving*: one by one, every rank but rank 0 ends right after its last send, without
  destroy_process_group(), while rank 0 receives.
- *used*: each layer has adapters, which rows of all ranks use, rows of one rank, or nobody's.

Under Lomo and AdaLomo an exception in a backward pass leaves updated the weights that the pass has
gone through, as with any optimizer inside the backward pass.

`make stress` draws random combinations of all axes.
"""
# Where a table's cases run.
NOTES = {
    "Between steps": "on 2 ranks, and 4 for mesh (dp 2 x tp 2 with ZeRO-2), ",
    "Meshes whose ranks differ": "of parallelize() on 4 ranks ",
    "Meshes of three axes": "of parallelize() on 8 ranks ",
}


def page() -> str:
    """The text of the page."""
    tolerances = ", ".join(
        f"{value:g} ({str(dtype).removeprefix('torch.')})" for dtype, value in TOLERANCES.items()
    )
    parts = [HEAD.format(tolerances=tolerances)]
    parts += [
        _section(name, table, f"on {world_size(name)} ranks ")
        for name, (table, _, _) in TABLES.items()
    ]
    parts.append(WHOLE_LOOPS.format(tolerance=between_table.TOLERANCE))
    parts += [_section(name, table, NOTES[name]) for name, table in between_table.TABLES.items()]
    if between_table.PENDING:
        parts.append(_not_right_yet())
    return "\n".join(parts)


def _not_right_yet() -> str:
    lines = [
        *("## Not right yet", ""),
        "These combinations of the tables of whole loops fail their tests:",
        *("", "| combination | what is wrong |", "|---|---|"),
        *(f"| {words} | {why} |" for words, why in between_table.PENDING.items()),
    ]
    return "\n".join([*lines, ""])


def _section(name: str, table: Table, where: str) -> str:
    cases, refusals = table.covering, table.refusals
    kinds = {2: "pairs", 3: "triples"}[table.strength]
    lines = [
        f"## {name}",
        "",
        f"{len(cases)} cases {where}cover all {kinds}; {len(refusals)} cases are refused.",
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
