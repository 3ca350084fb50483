"""Measures an operation of ringcomm beside other backends, in turn, on verified results.

OP is one of all_reduce, all_reduce_apart, all_reduce_shared, reduce_scatter, all_gather,
broadcast, all_to_all, round_trip, sendrecv and barrier, or several of them separated by commas; or
cross_entropy, or systems. `ringcomm bench OP --help` shows its options.

It starts its own ranks; under `torchrun ... -m ringcomm bench OP` the ranks that it finds are used.
The measurements are in the source checkout's folder benchmarks/, which a wheel does not have.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import ringcomm

HELP = "measure an operation beside other backends"
BENCHMARKS = Path(ringcomm.__file__).resolve().parents[1] / "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operation; what follows is its own."""
    parser.add_argument("op", metavar="OP", help="what to measure, see above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of OP")


def run(options: argparse.Namespace) -> int:
    """Runs the operation's own measurement in this process."""
    if not (BENCHMARKS / "front_door.py").is_file():
        options.parser.error(
            "the measurements are not in an installed wheel: clone ringcomm's repository and run"
            " this there after `pip install --no-build-isolation -e .`"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    try:
        options.parser = import_module("front_door").make_parser(options.op, options.parser.prog)
    except ValueError as error:
        options.parser.error(str(error))
    chosen = options.parser.parse_args(options.arguments)
    status: int = chosen.run(chosen)
    return status
