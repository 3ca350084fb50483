"""Faults put into Triton's kernels, each with a case that must find it.

    python triton_mutants.py [NAME...]

runs each one's case by the kernels with the fault, in a process of its own, and prints as JSON what
is said of it: why the case fails, or the last words of the machine, which ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import IO, Any, NamedTuple


class Mutant(NamedTuple):
    """A text of a kernel's source and what takes its place."""

    where: str  # module and function
    old: str
    new: str
    script: str
    case: str
    said: str  # a part of what is said of it


RESULT, UPDATE = "AssertionError", "Tensor-likes are not equal"
MUTANTS = {
    "an edge's mask is off by one": Mutant(
        "logit_rows.edge_columns", "column < end", "column <= end",
        "loss_cases", "beyond_32_bits", "outside of all tensors",
    ),
    "a row's maximum is a minimum": Mutant(
        "logit_rows.scan_row", "tl.max(lane_max, 0)", "tl.min(lane_max, 0)",
        "loss_cases", "no_class", RESULT,
    ),
    "the sum of a row is its largest part": Mutant(
        "cross_entropy.differentiate_held_row", "tl.sum(power, 0) +", "tl.max(power, 0) +",
        "loss_cases", "beyond_32_bits", RESULT,
    ),
    "no barrier before the target is overwritten": Mutant(
        "logit_rows.write_target", "    tl.debug_barrier()\n", "",
        "loss_cases", "saturated", "a race",
    ),
    "rows are counted in 32 bits": Mutant(
        "cross_entropy.stats_and_grad_kernel", ".to(tl.int64)", "",
        "loss_cases", "beyond_32_bits", "outside of all tensors",
    ),
    "a gradient is promised to be aligned": Mutant(
        "logit_rows.base_of", "if IS_ALIGNED:", "if True:",
        "update_cases", "sgd-far-from-a-vector", "misaligned",
    ),
    "ties are rounded up": Mutant(
        "weight_update.store_weight", "bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0x8000",
        "update_cases", "sgd-2500-bfloat16-bfloat16-nearest", UPDATE,
    ),
    "the random bits are another element's": Mutant(
        "weight_update.random_bits", "elem.to(tl.uint32)", "(elem + 1).to(tl.uint32)",
        "update_cases", "sgd-2051", UPDATE,
    ),
    "a row's last token is left out": Mutant(
        "weight_update.embedding_kernel", "end = tl.load(ends + i)", "end = tl.load(ends + i) - 1",
        "update_cases", "embedding-padded", UPDATE,
    ),
    "a tile has a row too many": Mutant(
        "weight_update.tile_of", "(row < num_rows)", "(row <= num_rows)",
        "update_cases", "adalomo-row", "outside of all tensors",
    ),
    "a row's sum of squares is its largest": Mutant(
        "weight_update.square_sums_kernel", "tl.sum(square, 1)", "tl.max(square, 1)",
        "update_cases", "adalomo-row", "Not equal to tolerance",
    ),
}  # fmt: skip


def put_in(mutant: Mutant) -> None:
    """Changes the kernel in this process, before anything has been compiled."""
    module, name = mutant.where.split(".")
    function: Any = getattr(importlib.import_module(f"ringcomm.kernels.{module}"), name)
    assert mutant.old in function.src, f"{mutant.where} has no {mutant.old!r}"
    function._unsafe_update_src(function.src.replace(mutant.old, mutant.new))


def try_case(mutant: Mutant) -> str:
    """What is said of the case with the fault in the kernels; nothing if it passes."""
    importlib.import_module("triton_launch").install(90)
    put_in(mutant)
    try:
        importlib.import_module(mutant.script).check_by_name(mutant.case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def said_of(mutant: Mutant, log: IO[str]) -> str:
    """The same, from a process that may be ended by the machine."""
    child = os.fork()
    if child == 0:
        os.dup2(log.fileno(), 2)
        print(try_case(mutant), file=log, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    log.seek(0)
    return log.read().strip()


def main() -> None:
    found = {}
    for module in ("loss_cases", "update_cases", "triton_launch"):  # once for all
        importlib.import_module(module)
    for name in sys.argv[1:] or MUTANTS:
        with tempfile.TemporaryFile("w+") as log:
            found[name] = said_of(MUTANTS[name], log)
        print(f"{name}: {found[name][:200]}", file=sys.stderr, flush=True)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
