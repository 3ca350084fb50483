"""Faults put into Triton's kernels, each with a case that must find it.

    python triton_mutants.py NAME

runs that case by the kernels with the fault, as triton_scripts.work_through() does.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """A text of a kernel's source and what takes its place."""

    where: str  # module and function
    old: str
    new: str
    script: str
    case: str
    said: str = ""  # a part of what the machine says, where it finds the fault
    variables: dict[str, str] = {}  # of the environment


MUTANTS = {
    "an edge's mask is off by one": Mutant(
        "logit_rows.edge_columns", "column < end", "column <= end", "loss_cases", "no_class",
        "outside of all tensors",
    ),
    "a row's maximum is a minimum": Mutant(
        "logit_rows.scan_row", "tl.max(lane_max, 0)", "tl.min(lane_max, 0)", "loss_cases",
        "shards",
    ),
    "the sum of a row is its largest part": Mutant(
        "logit_rows.scan_row", "tl.sum(lane_sum * factor, 0)", "tl.max(lane_sum * factor, 0)",
        "loss_cases", "shards",
    ),
    "no barrier before the target is overwritten": Mutant(
        "logit_rows.write_target", "    tl.debug_barrier()\n", "", "loss_cases", "beyond_32_bits",
        variables={"RINGCOMM_PTX_SEED": "1"},
    ),
    "rows are counted in 32 bits": Mutant(
        "cross_entropy.stats_and_grad_kernel", ".to(tl.int64)", "", "loss_cases",
        "beyond_32_bits", "outside of all tensors",
    ),
    "a weight is promised to be aligned": Mutant(
        "logit_rows.base_of", "if IS_ALIGNED:", "if True:", "update_cases", "sgd-shift-split",
        "misaligned",
    ),
    "ties are rounded up": Mutant(
        "weight_update.store_weight", "bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0x8000",
        "update_cases", "sgd-121-bfloat16-bfloat16-nearest",
    ),
    "the random bits are of another element": Mutant(
        "weight_update.random_bits", "elem.to(tl.uint32)", "(elem + 1).to(tl.uint32)",
        "update_cases", "sgd-2051",
    ),
    "a row's last token is left out": Mutant(
        "weight_update.embedding_kernel", "end = tl.load(ends + i)", "end = tl.load(ends + i) - 1",
        "update_cases", "embedding-padded",
    ),
    "a tile has a row too many": Mutant(
        "weight_update.tile_of", "(row < num_rows)", "(row <= num_rows)", "update_cases",
        "adalomo-row", "outside of all tensors",
    ),
    "sums of rows are of columns": Mutant(
        "weight_update.square_sums_kernel", "tl.sum(square, 1)", "tl.max(square, 1)",
        "update_cases", "adalomo-row",
    ),
}  # fmt: skip


def put_in(mutant: Mutant) -> None:
    """Changes the kernel in this process, before anything has been compiled."""
    module, name = mutant.where.split(".")
    function: Any = getattr(importlib.import_module(f"ringcomm.kernels.{module}"), name)
    assert mutant.old in function.src, f"{mutant.where} has no {mutant.old!r}"
    function._unsafe_update_src(function.src.replace(mutant.old, mutant.new))


def main() -> None:
    mutant = MUTANTS[sys.argv[1]]
    sys.argv[1:] = ["90", mutant.case]
    put_in(mutant)
    importlib.import_module(mutant.script).main()


if __name__ == "__main__":
    main()
