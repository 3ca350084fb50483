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

"A person's program" has what users put around a model. Rows have different numbers of labels.

- *loss*: the model's own, or one of the user's. It is a mean over labels other than -100, shifts
  labels itself, ignores -1, has class weights, or divides a sum by num_items_in_batch. The user
  passes it to parallelize() as loss_fn. Under ZeRO and Lomo the user weights the losses of ranks.
- *wrapper*: what the system gets: the model, or the model in DistributedDataParallel,
  torch.compile, or a module of the user's. With *adapters*, low-rank adapters are trained in a
  module as PEFT's. With *checkpoint_wrapper*, torch's wrapper is around one layer.
- *default dtype*: torch.set_default_dtype() while the user trains; weights are float32.
- *first forward*: a training step, or an evaluation in no_grad or inference_mode before it.
- *trained*: the first layer is always trained, frozen for good, or thawed before the second step.
- *memory format*: a weight is transposed in memory, or a convolution is in channels_last.

`tests/python/pairs/test_schedulers.py` runs every scheduler of torch under ZeRO and Lomo. Each is
made before or after the system, and resumes from a checkpoint.

Under Lomo and AdaLomo an exception in a backward pass leaves updated the weights that the pass has
gone through, as with any optimizer inside the backward pass.

`make stress` draws random combinations of all axes.
"""
# Where a table's cases run.
NOTES = {
    "Between steps": "on 2 ranks, and 4 for mesh (dp 2 x tp 2 with ZeRO-2), ",
    "A person's program": "on as many ranks (data: dp 2 without ZeRO) ",
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
