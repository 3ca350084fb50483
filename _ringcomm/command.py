"""The command `ringcomm`: its options.

The command starts here, outside of ringcomm: `import ringcomm` imports torch, for which `--help`,
an error and shell completion would wait. ringcomm.cli has what a command does.
"""

# PYTHON_ARGCOMPLETE_OK

import argparse
import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from _ringcomm.status import EXIT_BAD_INPUT, EXIT_OK, run_main
from _ringcomm.values import (
    MAX_MICRO_BATCHES,
    MAX_WORLD_SIZE,
    all_known,
    amount,
    byte_counts,
    did_you_mean,
    input_file,
    number,
    output_file,
    output_folder,
    recordings,
    several,
    whole,
)

SHORTEST = "0: the fewest calls that give percentiles"
NUM_RANKS = max(2, min(4, len(os.sched_getaffinity(0))))
HARDWARE = ("h100", "h200", "a100", "4090", "l4", "cpu-core")  # of `plan`
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
SYSTEMS = (
    *("single", "ddp", "zero1", "zero2", "zero3", "offload-cpu", "offload-nvme"),
    *("infinity-cpu", "infinity-nvme", "lomo", "lomo-shards"),
)
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# Of `bench OP`, whose options are in the folder benchmarks/ of a checkout.
OPERATIONS = (
    *("all_reduce", "all_reduce_apart", "all_reduce_shared", "reduce_scatter", "all_gather"),
    *("reduce_scatter_shared", "all_gather_shared", "broadcast", "all_to_all", "round_trip"),
    *("sendrecv", "barrier", "cores", "cross_entropy", "systems"),
)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of options with a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest name; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        message = message.removeprefix("argument ").replace(": must be ", " must be ", 1)
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def print_help(self, file: Any = None) -> None:
        """As ArgumentParser's, which ignores that the output cannot be written."""
        (file or sys.stdout).write(self.format_help())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ArgumentParser's; an unknown option is an error of the sub-command's parser."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(options, "parser", self)
            known = re.findall(r"(?<![\w-])--[\w-]+", parser.format_help())
            near = did_you_mean(unknown[0].partition("=")[0], known)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return options


def _has_operations() -> bool:
    return (BENCHMARKS / "front_door.py").is_file()


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """Compares ringcomm with Gloo on this machine, and verifies the results.

    It takes about half a minute on 2 cores, and 8 s more for each further number of ranks.

    `ringcomm bench OP` measures one operation in depth, or several collectives separated by commas.
    It needs the folder benchmarks/ of a checkout. `ringcomm bench OP --help` shows its options.

    The command starts its own ranks. `torchrun ... -m ringcomm bench OP` uses torchrun's ranks.
    """
    add = parser.add_argument
    about = f"{', '.join(OPERATIONS)}; _apart is out of place, _shared in memory that ranks share"
    about = about if _has_operations() else argparse.SUPPRESS
    op = add("op", nargs="?", metavar="OP", help=about)
    op.completer = lambda **_: OPERATIONS if _has_operations() else ()  # type: ignore[attr-defined]
    about = "ranks to start, 2 to 64; by default 2, 4, ... up to one per core"
    add("--world-size", type=whole(2, MAX_WORLD_SIZE), help=about)
    add("--seconds", type=number, default=20.0, help=f"of measurement in all; {SHORTEST}")
    of_file: dict[str, Any] = {"type": output_file, "metavar": "FILE"}
    add("--html", help="write a page with one picture (one file)", **of_file)
    add("--json", help="write the figures as one JSON object", **of_file)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    """Examines this machine and a group of ringcomm on it, and lists problems.

    Reads the cores, the container's limits, versions and RINGCOMM_* variables. Then it starts
    ranks, makes a group, and measures all_reduce, messages between each pair of ranks, and memory.
    The exit status is 1 if the group cannot be made.

    With --job it starts nothing: it shows the call of each rank of a running job, the rank that it
    waits for, and which rank is the cause of a hang. The exit status is 1 if the job cannot be
    examined.
    """
    add = parser.add_argument
    about = "process id of torchrun or of any rank"
    add("--job", type=whole(1, 1 << 22), metavar="PID", help=about)
    about = "ranks to start, 1 to 64; one per CPU by default, at least 2, at most 4"
    add("--world-size", type=whole(1, MAX_WORLD_SIZE), default=NUM_RANKS, help=about)
    about = f"seconds of measurement per size; {SHORTEST}"
    add("--seconds", type=number, default=0.3, help=about)
    add("--json", action="store_true", help="print the report as one JSON object")
    add("--verdict", action="store_true", help="with --job: print one line, the cause of a hang")
    about = "with --job: also write a dump of each rank, in this folder or a new one; torch's"
    about += " analyser torchfrtrace reads the folder"
    add("--dump", type=output_folder, metavar="FOLDER", help=about)


def _hardware(text: str) -> str:
    """A known name, or a file."""
    if text not in HARDWARE and not Path(text).is_file():
        near = did_you_mean(text, HARDWARE)
        known = ", ".join(HARDWARE)
        raise argparse.ArgumentTypeError(f"{text!r} is neither a file nor one of {known}{near}")
    return text


def _memory(text: str) -> int:
    """Bytes of a device, which has more than a megabyte."""
    if (value := amount(text)) < 1 << 20:
        raise argparse.ArgumentTypeError(
            f"must be 1MiB or more, got {value} bytes; did you mean {value}GiB?"
        )
    return value


def _add_plan(parser: argparse.ArgumentParser) -> None:
    """Ranks training systems and meshes for a model by predicted step time.

    No rank is started. For every system and mesh it predicts memory by part, traffic, the pipeline
    bubble and time, and ranks the plans that fit. Among plans within 2 % of the fastest, fewer
    axes rank first, then data parallelism before a pipeline, simpler systems and fewer bytes. A
    model is a name or a config.json of transformers. See docs/design/planner.md.
    """
    add = parser.add_argument
    add("--model", help="a known name such as llama-7b, or the path of a config.json")
    add("--gpus", type=whole(1), help="total number of devices over all hosts")
    add("--tokens", type=amount, default="4M", help="tokens per step over all ranks")
    about = "tokens per sequence; by default the model's context"
    add("--sequence", type=lambda text: 0 if text == "0" else amount(text), default=0, help=about)
    add("--top", type=whole(0), default=10, help="plans to print; 0 for all")
    add("--why", type=whole(1), default=1, help="number of the plan to explain")
    add("--json", action="store_true", help="print all plans as one JSON object")
    about = "print the time of collectives on CPUs instead of plans; with --tuning as measured"
    add("--collectives", action="store_true", help=about)
    add = parser.add_argument_group("machines").add_argument
    about = f"{', '.join(HARDWARE)}, or a JSON file"
    add("--hardware", type=_hardware, default="h100", help=about)
    about = "a file of `ringcomm tune`, for collectives between CPUs of a host"
    add("--tuning", type=input_file, metavar="FILE", help=about)
    about = "memory per device, such as 80GiB or 80GB; by default the hardware's"
    add("--memory", type=_memory, default=0, help=about)
    add("--per-host", type=whole(1), default=0, help="devices per host; by default the hardware's")
    # Their names in the namespace are those of Job's fields.
    add = parser.add_argument_group("plans to consider, by default all").add_argument
    for name, what in (("dp", "data"), ("pp", "pipeline"), ("tp", "tensor"), ("ep", "expert")):
        add(f"--{name}", type=whole(1), default=0, help=f"size of {what} parallelism")
    for name, names, about in (
        ("systems", SYSTEMS, "training systems, separated by commas"),
        ("schedules", SCHEDULES, "pipeline schedules"),
        ("checkpointing", ("none", "full"), "activation checkpointing: none, full"),
    ):
        named: dict[str, Any] = {"type": all_known(names), "default": (), "metavar": "NAMES"}
        add(f"--{name}", dest=f"{name.rstrip('s')}s", help=about, **named)
    about = "bf16 (with float32 master weights) or fp32"
    add("--precision", choices=("bf16", "fp32"), default="bf16", help=about)
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="adamw or sgd")
    about = "split tokens over ranks of tp; by default where they divide sequences"
    is_flag = argparse.BooleanOptionalAction
    add("--sequence-parallel", dest="is_sequence_split", action=is_flag, help=about)


def _add_show(parser: argparse.ArgumentParser) -> None:
    """Writes a page that shows how an algorithm works: one file, for any browser, offline.

    Pages: ring (the steps of an all_reduce), memory (of a rank, by system and number of ranks),
    lomo (memory over a backward pass), pipeline (schedules and their idle time), tensor (one block
    over tensor-parallel ranks), loss (cross-entropy over a split vocabulary), trace (a recorded
    job).
    With --trace or --timeline a page shows a recorded run. See docs/reference/command.md.
    """
    add = parser.add_argument
    add("page", choices=PAGES, metavar="PAGE", help=", ".join(PAGES))
    add(
        "--ranks",
        type=whole(2, MAX_WORLD_SIZE),
        help="2 to 64 (default 4); memory: the slider's maximum (default 64)",
    )
    about = "memory, lomo, tensor only: a known name or a config.json's path (default llama-7b)"
    add("--model", help=about)
    add("--bytes", type=amount, help="ring only: a rank's buffer (default 1MiB)")
    about = "pipeline only: 1 to 256 (default 8)"
    add("--micro-batches", type=whole(1, MAX_MICRO_BATCHES), help=about)
    about = "ring and trace only: a file of `ringcomm trace`"
    add("--trace", type=input_file, metavar="FILE", help=about)
    about = "ring with --trace: the call's number (default: the first)"
    add("--seq", type=whole(0), metavar="N", help=about)
    about = "pipeline only: a file of Timeline.export_chrome_trace()"
    add("--timeline", type=input_file, metavar="FILE", help=about)
    add("-o", "--output", type=Path, metavar="FILE", help="by default ringcomm-PAGE.html")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    """Records every rank of a program and writes one trace for https://ui.perfetto.dev.

        ringcomm trace -o job.json -- torchrun --nproc-per-node 2 train.py
        ringcomm trace -o job.json --merge FOLDER

    The first runs a command and exits with its status. A program that is started in another way
    records to FOLDER if RINGCOMM_TRACE=FOLDER is in its environment; the second merges these
    recordings, and dumps of the flight recorder, into a trace. See docs/how-to/trace.md.
    """
    add = parser.add_argument
    about = "trace to write, replacing an existing file"
    default = Path("ringcomm-trace.json")
    add("-o", "--output", type=Path, metavar="FILE", default=default, help=about)
    about = "newest events that a process keeps, 64 to 16,777,216"
    add("--events", type=whole(64, 1 << 24), metavar="N", default=1 << 16, help=about)
    about = "folders of recordings and dumps, of all hosts; or prefixes of dumps"
    add("--merge", type=recordings, nargs="+", metavar="FOLDER", help=about)
    about = "also write a page that shows the trace, offline"
    add("--html", type=output_file, metavar="FILE", help=about)
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program to record")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    """Measures the algorithms of all_reduce on this machine and writes a tuning file for groups.

    The file has what calls, copies and sums cost, for `ringcomm plan`, and for each number of ranks
    the size up to which one_shot is the fastest algorithm. Run it on an idle machine.
    """
    add = parser.add_argument
    about = "numbers of ranks to measure, 2 to 64"
    add("--world-sizes", type=several(whole(2, MAX_WORLD_SIZE)), default="2,4", help=about)
    some_sizes = "1k,4k,16k,32k,64k,128k,256k,512k,1m,4m,16m,64m"
    add("--sizes", type=byte_counts, default=some_sizes, help="buffer sizes in bytes")
    about = f"seconds of measurement for each size and number of ranks; {SHORTEST}"
    add("--seconds", type=number, default=0.6, help=about)
    about = "repeats of a measurement that other programs disturbed"
    add("--repeats", type=whole(0), default=2, help=about)
    about = "the file to write"
    add("--json", type=output_file, metavar="FILE", default="ringcomm-tuning.json", help=about)
    add("--force", action="store_true", help="write it even if other programs disturbed it")


NUM_CLASSES = 12  # of page loss
# Pages of `show`, the options of each and their defaults.
PAGES: dict[str, dict[str, Any]] = {
    "ring": {"ranks": 4, "bytes": 1 << 20, "trace": None, "seq": None},
    "memory": {"model": "llama-7b", "ranks": 64},
    "lomo": {"model": "llama-7b"},
    "pipeline": {"ranks": 4, "micro_batches": 8, "timeline": None},
    "tensor": {"model": "llama-7b", "ranks": 4},
    "loss": {"ranks": 4},
    "trace": {"trace": None},
}


# By command: what an option needs, and options without effect beside another one, or a value.
_NEEDS = {
    "doctor": {"dump": "job", "verdict": "job"},
    "show": {"seq": "trace"},
}
_IDLE: dict[str, dict[str, Collection[str]]] = {
    "bench": {
        "device cpu": ("layout", "mps", "graph", "clock", "nccl_library", "plot"),
        "op barrier": ("sizes", "dtype"),
    },
    "doctor": {"job": ("world_size", "seconds"), "verdict": ("json",)},
    "plan": {"json": ("top", "why")},
    "show": {"trace": ("ranks", "bytes"), "timeline": ("ranks", "micro_batches")},
    "trace": {"merge": ("events",)},
    "tune": {},
}
_COMMANDS = {
    "bench": (_add_bench, "compare ringcomm with Gloo on this machine"),
    "doctor": (_add_doctor, "examine this machine and a group on it"),
    "plan": (_add_plan, "rank training systems and meshes for a model by predicted time"),
    "show": (_add_show, "write a page that shows how an algorithm works"),
    "trace": (_add_trace, "record all ranks of a program and write one trace for Perfetto"),
    "tune": (_add_tune, "measure the algorithms of all_reduce and write a tuning file"),
}


class _Version(argparse.Action):
    """Reads the version from its file, which is not imported: the package would be, too."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        spec = find_spec("ringcomm")
        (folder,) = (spec and spec.submodule_search_locations) or [""]
        text = Path(folder, "version.py").read_text(encoding="utf-8")
        print(f"ringcomm {re.findall(r'__version__ = .(.*).$', text, re.M)[0]}")
        parser.exit(EXIT_OK)


def make_parser() -> OneLineParser:
    """The parser of all commands. Options have the name in `command`, its parser in `parser`."""
    about = "Measures, tunes and examines ringcomm on this machine."
    parser = OneLineParser(prog="ringcomm", description=about)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    choices = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (add_arguments, about) in _COMMANDS.items():
        sub = choices.add_parser(name, help=about, description=inspect.getdoc(add_arguments))
        sub.formatter_class = _HelpFormatter
        add_arguments(sub)
        sub.set_defaults(parser=sub, command_name=name)
    return parser


def read(argv: list[str]) -> argparse.Namespace:
    """The options of a command line. Raises SystemExit for invalid ones, and after --help."""
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:
        with contextlib.suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)  # ends the process
    if argv[:1] == ["bench"] and _has_operations():
        if str(BENCHMARKS) not in sys.path:
            sys.path.insert(0, str(BENCHMARKS))
        op, rest = import_module("front_door").split(argv[1:])
        if op is not None:
            return _read_operation(op, rest)
    options = parser.parse_args(argv)
    if getattr(options, "op", None) is not None:
        near = did_you_mean(options.op, OPERATIONS)
        options.parser.error(
            f"{options.op}: an installed package has the short comparison only, which needs no OP."
            f" Clone ringcomm's repository and run this there after `pip install -e .`{near}"
        )
    _check_together(options, argv[1:])
    return options


def _read_operation(op: str, arguments: list[str]) -> argparse.Namespace:
    """The options of `bench OP`, whose parser is in the folder benchmarks/ of a checkout."""
    try:
        parser = import_module("front_door").make_parser(op)
    except ValueError as error:
        OneLineParser(prog="ringcomm bench").error(str(error))
    options: argparse.Namespace = parser.parse_args(arguments)
    options.command_name = "bench"
    _check_together(options, arguments)
    return options


def _check_together(options: argparse.Namespace, arguments: list[str]) -> None:
    """Ends the process with an error where options do not fit each other."""
    parser, command = options.parser, options.command_name
    shown = {
        action.dest: f"{option} {action.metavar or ''}".strip()
        for action in parser._actions
        for option in reversed(action.option_strings)
        if option.startswith("--")
    }
    unset = argparse.Namespace(**dict.fromkeys(shown, unset_value := object()))
    found = vars(parser.parse_known_args(arguments, unset)[0])
    given = [name for name in shown if found[name] is not unset_value]
    idle = dict(_IDLE[command])
    if command == "plan":
        idle["collectives"] = shown.keys() - {"collectives", "tuning"}
    if command == "show":
        idle[f"page {options.page}"] = shown.keys() - {*PAGES[options.page], "output"}
    values = (f"{name} {getattr(options, name, None)}" for name in ("op", "device", "page"))
    for name in (*given, *values):
        for other in idle.get(name, ()):
            if other in given:
                what = shown[other].split()[0]
                parser.error(f"{what} has no effect with {shown.get(name, name)}")
    for name, needed in _NEEDS.get(command, {}).items():
        if name in given and needed not in given:
            parser.error(f"{shown[name].split()[0]} needs {shown[needed]}")
    if command in _CHECKS:
        _CHECKS[command](options)
    paths = [path.resolve() for path in vars(options).values() if isinstance(path, Path)]
    for path in paths:
        if paths.count(path) > 1:
            parser.error(f"{path} is given for two files")


def _check_plan(options: argparse.Namespace) -> None:
    missing = [f"--{name}" for name in ("model", "gpus") if getattr(options, name) is None]
    if missing and not options.collectives:
        options.parser.error(f"the following arguments are required: {', '.join(missing)}")


def _check_show(options: argparse.Namespace) -> None:
    if options.page == "trace" and options.trace is None:
        options.parser.error("page trace needs --trace FILE")
    if options.page == "loss" and NUM_CLASSES % (options.ranks or 1):
        options.parser.error(
            f"page loss has {NUM_CLASSES} classes: {options.ranks} ranks cannot share them"
        )
    options.defaults = PAGES[options.page]
    options.output = options.output or Path(f"ringcomm-{options.page}.html")
    _check_output(options)


def _check_trace(options: argparse.Namespace) -> None:
    options.command = options.command[options.command[:1] == ["--"] :]
    if bool(options.command) == bool(options.merge):
        options.parser.error("give one of: -- COMMAND, --merge FOLDER")
    _check_output(options)


def _check_output(options: argparse.Namespace) -> None:
    """Also of a default, which argparse does not check."""
    try:
        output_file(str(options.output))
    except argparse.ArgumentTypeError as error:
        options.parser.error(f"-o/--output: {error}")


def _check_tune(options: argparse.Namespace) -> None:
    if len(set(options.sizes)) < 2:  # the cost model has three coefficients
        options.parser.error("--sizes must have at least 2 different sizes, for the cost model")


_CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "plan": _check_plan,
    "show": _check_show,
    "trace": _check_trace,
    "tune": _check_tune,
}


def answer_before_torch() -> None:
    """Ends the process if its command line asks for help or the version, or is wrong.

    `python -m ringcomm` calls it from the package's own import, because Python imports a package
    before its __main__, and this package imports torch.
    """

    def read_only(argv: list[str]) -> int:
        read(argv)
        return EXIT_OK

    if status := run_main(name_of(sys.argv[1:]), read_only):
        sys.exit(status)


def name_of(argv: list[str]) -> str:
    """With the command, for errors."""
    return " ".join(["ringcomm", *(name for name in argv[:1] if name in _COMMANDS)])
