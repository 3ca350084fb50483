"""The options of a benchmark, and of `ringcomm bench OP`, with the module that measures it.

Help and wrong options need no torch, so that a module is imported when it runs. It has
`run(options) -> int`, the exit status. Options have the operations in ``op``, and their parser in
``parser``.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from _ringcomm.command import OPERATIONS, OneLineParser
from _ringcomm.values import (
    MAX_WORLD_SIZE,
    all_known,
    byte_counts,
    input_file,
    number,
    output_file,
    several,
    whole,
    words,
)

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


# ---- operations

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
LOSS_DTYPES = ("float32", "float16", "bfloat16")
LOSS_PEERS = ("triton", "torch", "compile", "liger", "quack")
CLOCKS = ("events", "host")
SIZES = "bytes of the larger buffer of a rank, such as 4096,64k,4m"
DEFAULT_SIZES = "1k,16k,256k,4m,64m"
CLOCK = "for eager calls: the device's events, or the host's clock around a synchronize"
RANKS = "number of ranks, 1 to 64 (default: the launcher's, or 2)"
THREADS = "of each rank (default: the cores, or 1 with several ranks)"
CORE_COUNTS = "of each rank (default: 1, 2, 4, ... up to its share of the cores)"
PEERS = "of triton (on a GPU), torch, compile, liger, quack; with one rank (default: torch)"
PREDICTED = "a file of `ringcomm tune`, with costs for the times that the planner predicts"
DETAILS = "show losses, percentiles and memory by part too"
CHARTS = flag(
    "--html", output_file, None, "write a page of charts (HTML, one file)", metavar="FILE"
)
NO_BUFFERS = ("barrier", "cores", "cross_entropy", "systems")
WITH_BUFFERS = tuple(name for name in OPERATIONS if name not in NO_BUFFERS)

COLLECTIVES = CommandLine(
    doc=doc_of("collectives"),
    seconds=1.0,
    per="size and operation, for all backends",
    repeats=1,
    device="cpu",
    has_sharing=True,
    flags=[
        flag("--world-size", whole(1, MAX_WORLD_SIZE), None, RANKS),
        flag("--peers", words, "gloo", "backends to compare with, or none"),
        flag("--sizes", byte_counts, DEFAULT_SIZES, SIZES),
        flag("--dtype", words, "float32", "names of torch's dtypes", known=DTYPES),
        NCCL_FLAG,
        flag("--clock", str, "events", CLOCK, choices=CLOCKS),
        flag(
            "--graph", whole(1), 0, "also measure CUDA graphs of this many calls", metavar="CALLS"
        ),
        flag("--plot", output_file, None, "draw bus bandwidth by size (PNG, SVG)", metavar="FILE"),
        CHARTS,
    ],
)
CROSS_ENTROPY = CommandLine(
    doc=doc_of("cross_entropy"),
    seconds=4.0,
    per="vocabulary and dtype, for all contenders",
    repeats=2,
    device="cpu",
    has_sharing=True,
    flags=[
        flag("--world-size", whole(1, MAX_WORLD_SIZE), 1, "ranks that share the vocabulary"),
        flag("--threads", whole(1), None, THREADS),
        flag("--tokens", whole(1), 2048, "rows of logits"),
        flag("--vocabularies", several(whole(1)), "8000,32000,50257,128256", "of all ranks"),
        flag("--dtypes", words, "float32,bfloat16", "of the logits", known=LOSS_DTYPES),
        flag("--peers", words, None, PEERS, known=LOSS_PEERS),
    ],
)
SYSTEMS = CommandLine(
    doc=doc_of("systems"),
    seconds=20.0,
    per="measurement, for all systems",
    repeats=2,
    flags=[
        flag("--world-size", whole(1, MAX_WORLD_SIZE), 2, "number of ranks, all on this machine"),
        flag("--systems", names, None, "separated by commas or semicolons (default: all)"),
        flag("--over", words, [], "also measure the systems over these backends: gloo, fake"),
        flag("--width", whole(1), 128, "width of the model, a multiple of 32"),
        flag("--layers", whole(1), 4, "layers of the model"),
        flag("--rows", whole(1), 1, "sequences per rank in a step"),
        flag("--tokens", whole(1), 64, "tokens per sequence"),
        flag("--tuning", input_file, None, PREDICTED),
        ("--all", {"action": "store_true", "help": DETAILS}),
        flag("--plot", output_file, None, "draw time and memory (SVG, PNG, PDF)", metavar="FILE"),
        CHARTS,
    ],
)
CORES = CommandLine(
    doc=doc_of("cores"),
    seconds=4.0,
    per="number of ranks, operation and size",
    repeats=2,
    flags=[
        flag("--worlds", several(whole(2, MAX_WORLD_SIZE)), "2", "numbers of ranks"),
        flag("--threads", several(whole(1)), None, CORE_COUNTS),
        flag("--ops", words, "all_reduce,all_gather", "collectives", known=WITH_BUFFERS),
        flag("--sizes", byte_counts, "256k,1m,16m,64m", SIZES),
        flag("--tuning", input_file, None, "a file of `ringcomm tune`, with costs for the model"),
    ],
)
# Packages that collectives do not need: what needs them, and their names for pip.
WANTED_FOR = {
    "liger_kernel": ("liger needs", "liger-kernel"),
    "matplotlib": ("--plot needs", "matplotlib"),
    "mpi4py": ("ranks of mpiexec need", "mpi4py"),
    "quack": ("quack needs", "quack-kernels"),
    "rich": ("tables need", "rich"),
}
# Operations that must be the only one; several collectives may be separated by commas.
ALONE = {"cores": CORES, "cross_entropy": CROSS_ENTROPY, "systems": SYSTEMS}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows meaningful defaults only."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, [], 0)
        return super()._get_help_string(action) if has_default else action.help


def split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The operation, wherever it is among the arguments of `bench`, and the others in their order.

    The first word that is neither an option nor the value of one; None without one.
    """
    finder = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    for command in (COLLECTIVES, *ALONE.values()):
        command.add_arguments(finder)
    for action in finder._actions:
        action.type = action.choices = None
    finder.add_argument("op", nargs="?")
    op = finder.parse_known_args(arguments)[0].op
    rest = list(arguments)
    if op is not None:
        rest.remove(op)  # or an equal value of an option: the others are the same
    return op, rest


def make_parser(op: str, program: str = "ringcomm bench") -> argparse.ArgumentParser:
    """The command line of an operation. Raises ValueError for an unknown one."""
    chosen = op.split(",")
    unknown = [name for name in chosen if name not in OPERATIONS]
    if unknown:
        raise ValueError(f"invalid choice: {unknown[0]!r} (choose from {', '.join(OPERATIONS)})")
    alone = [name for name in chosen if name in ALONE]
    if alone and op != alone[0]:
        raise ValueError(f"{alone[0]} must be the only operation, got {op}")
    command = ALONE.get(op, COLLECTIVES)
    parser = OneLineParser(
        prog=f"{program} {op}", description=command.doc, formatter_class=HelpFormatter
    )
    command.add_arguments(parser)
    parser.set_defaults(op=op)
    return parser


def run(options: Any) -> int:
    """Measures what the options of a parser of `make_parser` say; returns the exit status."""
    try:
        module = import_module(options.op if options.op in ALONE else "collectives")
        return int(module.run(options))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in WANTED_FOR:
            raise
        what, name = WANTED_FOR[package]
        parser: argparse.ArgumentParser = options.parser
        parser.error(f"{what} the package {name}: pip install {name}")
