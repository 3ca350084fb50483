"""The command `ringcomm`, or `python -m ringcomm`.

A sub-command is a module of `ringcomm.cli.commands` named after it, found by being there:

    HELP = "one line"
    def add_arguments(parser): ...
    def run(options) -> int: ...       # the exit status; imports what it needs

`bench` hands its arguments to benchmarks/front_door.py of the source checkout.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import NoReturn

__all__ = ["OneLineParser", "main", "modules_of", "run"]

# Packages that communicating does not need: what does, and their names for pip.
_WANTED_FOR = {
    "liger_kernel": ("liger needs", "liger-kernel"),
    "matplotlib": ("--plot needs", "matplotlib"),
    "mpi4py": ("ranks of mpiexec need", "mpi4py"),
    "quack": ("quack needs", "quack-kernels"),
    "psutil": ("measuring needs", "psutil"),
    "rich": ("tables need", "rich"),
}


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong; `--help` says the rest."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def modules_of(package: ModuleType) -> list[ModuleType]:
    """The modules in a package, by name."""
    found = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [import_module(f"{package.__name__}.{name}") for name in found]


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; the chosen sub-command's parser and run() are among the options."""
    from ringcomm import __version__
    from ringcomm.cli import commands

    parser = OneLineParser(
        prog="ringcomm", description="Measures, tunes and examines ringcomm on this machine."
    )
    parser.add_argument("--version", action="version", version=f"ringcomm {__version__}")
    choices = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in modules_of(commands):
        name = command.__name__.rpartition(".")[2]
        sub = choices.add_parser(name, help=command.HELP, description=command.__doc__)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.set_defaults(parser=sub, run=command.run)
        command.add_arguments(sub)
    return parser


def run(argv: list[str]) -> int:
    """Runs a command line; its exit status. Raises SystemExit where it makes no sense."""
    options = make_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _WANTED_FOR:
            raise
        what, name = _WANTED_FOR[package]
        options.parser.error(f"{what} the package {name}: pip install {name}")
    return status


def main() -> int:
    """Runs the command line; returns the exit status: 2 for bad input, 130 after Ctrl-C."""
    from ringcomm.measure.ranks import run_main

    try:
        return run_main("ringcomm", run)
    finally:
        sys.stdout.flush()
