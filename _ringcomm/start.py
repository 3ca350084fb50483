"""Starts the command `ringcomm`, which imports torch once its options are right."""

import sys

from _ringcomm.command import name_of, read
from _ringcomm.status import run_main


def run(argv: list[str]) -> int:
    """Runs a command line and returns its exit status. Raises SystemExit for invalid options."""
    options = read(argv)
    from ringcomm.cli import run_command

    return run_command(options)


def main() -> int:
    """Runs the command line; returns the exit status: 2 for bad input, 130 after Ctrl-C."""
    return run_main(name_of(sys.argv[1:]), run)
