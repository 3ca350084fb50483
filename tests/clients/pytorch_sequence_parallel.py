"""pytorch/examples: sequence parallelism."""

from __future__ import annotations

from pathlib import Path

from example_runs import run_example
from support import report

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = False
SOURCE = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    return {
        "parameters": run_example(folder, source, "tensor_parallelism/sequence_parallel_example.py")
    }


if __name__ == "__main__":
    report(main)
