#!/usr/bin/env python3
"""Compares c10d backends in one run: collectives on the same buffers, alternating in short blocks.

    python benchmarks/all_reduce.py --backends ringcomm,gloo --world 2 --seconds 4
    I_MPI_PIN=off mpiexec -n 2 python benchmarks/all_reduce.py --backends ringcomm,gloo,mpi4py
    python benchmarks/all_reduce.py --device cuda --layout one --mps --graph 20

Each result is verified with exact integers before and after the clocks run; of each call the
slowest rank counts. A size is measured again while other programs disturb it, and says so if they
never stop. One JSON line per backend and size is appended to benchmarks/results; table.py makes
README's table of those lines. `python -m ringcomm bench` measures the same and records on request.
"""

from __future__ import annotations

import sys
from pathlib import Path

import harness  # before torch: it sets the number of threads

from ringcomm.bench.ranks import joined_world_size
from ringcomm.bench.script import run_main
from ringcomm.bench.sweep import Sweep, add_arguments, run_sweep, sweep_of
from ringcomm.bench.wording import as_option, words


def parse(argv: list[str]) -> tuple[Sweep, Path]:
    """The command line; ends the process with a message when it makes no sense."""
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    names = as_option(words)
    add("--backends", type=names, default="ringcomm,gloo", help="one may be given twice")
    add("--world", type=int, default=joined_world_size() or 2, help="ranks, all on this machine")
    add("--ops", type=names, default="all_reduce", help="see `python -m ringcomm bench --help`")
    add_arguments(parser, seconds=4.0, repeats=3)
    options = parser.parse_args(argv)
    try:
        sweep = sweep_of(options, options.ops, options.backends, options.world)
    except ValueError as error:
        parser.error(str(error))
    stem = sweep.ops[0] if len(sweep.ops) == 1 else "collectives"
    where = "" if sweep.device == "cpu" else f"-{sweep.device}-{sweep.layout}"
    return sweep, options.json or harness.default_path(f"{stem}-w{sweep.world_size}{where}")


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit code, 3 when any result was wrong."""
    sweep, path = parse(argv)
    return run_sweep(sweep, path)


if __name__ == "__main__":
    sys.exit(run_main("all_reduce.py", main))
