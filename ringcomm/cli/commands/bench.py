"""Measures an operation of ringcomm beside other backends, in turn, on verified results.

Starts its own ranks; under `torchrun ... -m ringcomm bench OP` the ranks that it finds are used.
"""

from __future__ import annotations

import argparse

from ringcomm.cli import benches, modules_of

HELP = "measure an operation beside other backends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A sub-command per operation."""
    choices = parser.add_subparsers(metavar="OP", required=True)
    for bench in modules_of(benches):
        for name in bench.NAMES:
            sub = choices.add_parser(name, help=bench.HELP, description=bench.__doc__)
            sub.set_defaults(parser=sub, op=name, run_bench=bench.run)
            bench.add_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """Runs the operation's own bench."""
    status: int = options.run_bench(options)
    return status
