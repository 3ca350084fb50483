"""Times a collective of c10d on the same buffers over several backends, in alternating blocks.

Results are verified with exact integers before and after; of each call the slowest rank counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ringcomm.bench.operations import OPERATIONS
from ringcomm.bench.wording import as_option, words

NAMES = tuple(OPERATIONS)
HELP = "a collective of c10d"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks, which sizes, which peers, how long."""
    from ringcomm.bench.ranks import joined_world_size
    from ringcomm.bench.sweep import add_arguments as add_sweep_arguments

    add = parser.add_argument
    add("--world-size", type=int, default=joined_world_size() or 2, help="ranks, 1 to 64")
    add(
        "--peers",
        type=as_option(words),
        default="gloo",
        help="backends to compare with, or none",
    )
    add("--json", type=Path, metavar="FILE", help="append one record per backend and size here")
    add_sweep_arguments(parser, seconds=1.0, repeats=1)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter


def run(options: argparse.Namespace) -> int:
    """Measures; the status is 3 when a result was wrong."""
    from ringcomm.bench.ranks import joined_world_size
    from ringcomm.bench.sweep import run_sweep, sweep_of

    peers = [] if options.peers == ["none"] else options.peers
    started = joined_world_size()
    if started not in (None, options.world_size):
        options.parser.error(f"torchrun has started {started} ranks, not {options.world_size}")
    try:
        sweep = sweep_of(options, [options.op], ["ringcomm", *peers], options.world_size)
    except ValueError as error:
        options.parser.error(str(error))
    return run_sweep(sweep, options.json)
