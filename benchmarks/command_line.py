"""The options of a benchmark, without torch: `ringcomm bench OP --help` need not import it."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _ringcomm.values import all_known, input_file, number, output_file, whole, words

LAYOUTS = ("all", "one")  # of ranks on GPUs
Flag = tuple[str, dict[str, Any]]


def names(text: str) -> list[str]:
    """Names, of which some have a comma: semicolons separate them where there is one."""
    return words(text, ";" if ";" in text else ",")


def flag(
    name: str,
    parse: Callable[[str], Any],
    default: Any,
    text: str | None = None,
    *,
    known: Collection[str] = (),
    **more: Any,
) -> Flag:
    """An option of a command line with its value's parser, its default and its help.

    ``known`` has the words that are allowed.
    """
    return name, {
        "type": all_known(known, parse) if known else parse,
        "default": default,
        "help": text,
        **more,
    }


NCCL_FLAG: Flag = (
    "--nccl-library",
    {"type": input_file, "metavar": "FILE", "help": "a libnccl.so.2 to use instead of torch's"},
)


def doc_of(module: str) -> str | None:
    """The docstring of a module here, which is not imported."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{module}.py").read_text("utf-8")))


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The options of a benchmark.

    Attributes:
        doc: its module's text, whose first line describes the command.
        seconds: the default of --seconds, given to each ``per``; None is no such option.
        repeats: the default of --repeats, which comes with --seconds.
        device: the default of --device; "" is no such option.
        has_sharing: whether it has options for ranks that share a GPU.
        flags: its own options.
    """

    doc: str | None
    seconds: float | None = None
    per: str = ""
    repeats: int = 3
    device: str = ""
    has_sharing: bool = False
    flags: Sequence[Flag] = ()

    def add_arguments(self, parser: argparse.ArgumentParser, json_default: str = "") -> None:
        """Adds all options: those that many have, and its own."""
        add = parser.add_argument
        if self.seconds is not None:
            add("--seconds", type=number, default=self.seconds, help=f"per {self.per}")
            text = "at most, while other programs disturb the machine"
            add("--repeats", type=whole(0), default=self.repeats, help=text)
        if self.device:
            add("--device", default=self.device, help="cpu, or cuda for GPUs")
        if self.has_sharing:
            text = "all: rank i on GPU i mod their number; one: all ranks on the first"
            add("--layout", choices=LAYOUTS, default="all", help=text)
            text = "run NVIDIA's Multi-Process Service during the measurement"
            add("--mps", action=argparse.BooleanOptionalAction, default=False, help=text)
        for name, how in self.flags:
            add(name, **how)
        text = f"append one record per contender here{json_default}"
        add("--json", type=output_file, metavar="FILE", help=text)
        parser.set_defaults(parser=parser)
