"""pytorch/examples: FSDP2 in bfloat16 with prefetching and torch's checkpoints, and again."""

from __future__ import annotations

from pathlib import Path

from example_runs import run_example
from support import report

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = False
SOURCE = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
OPTIONS = ("--mixed-precision", "--explicit-prefetching", "--dcp-api")


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    program = "FSDP2/example.py"
    first = run_example(folder, source, program, *OPTIONS)
    resumed = run_example(folder, source, program, *OPTIONS)  # from its checkpoint
    return {"first": first, "resumed": resumed}


if __name__ == "__main__":
    report(main)
