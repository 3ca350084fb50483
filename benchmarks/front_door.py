"""`ringcomm bench OP`: the module that measures an operation, and its command line.

Such a module has `add_arguments(parser)` and `run(options) -> int`, the exit status. Options have
the operations in ``op``, and their parser in ``parser``.
"""

from __future__ import annotations

import argparse
from types import ModuleType

import collectives
import cross_entropy
import systems
from operations import OPERATIONS

from _ringcomm_cli import OneLineParser

# Operations that must be the only one; several collectives may be separated by commas.
ALONE: dict[str, ModuleType] = {"cross_entropy": cross_entropy, "systems": systems}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows meaningful defaults only."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, [], 0)
        return super()._get_help_string(action) if has_default else action.help


def make_parser(op: str, program: str = "ringcomm bench") -> argparse.ArgumentParser:
    """The command line of an operation. Raises ValueError for an unknown one."""
    known = [*OPERATIONS, *ALONE]
    unknown = [name for name in op.split(",") if name not in known]
    if unknown:
        raise ValueError(f"invalid choice: {unknown[0]!r} (choose from {', '.join(known)})")
    alone = [name for name in op.split(",") if name in ALONE]
    if alone and op != alone[0]:
        raise ValueError(f"{alone[0]} must be the only operation, got {op}")
    module = ALONE.get(op, collectives)
    parser = OneLineParser(
        prog=f"{program} {op}",
        description=module.__doc__,
        formatter_class=HelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(parser=parser, op=op, run=module.run)
    return parser
