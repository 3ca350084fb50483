"""The command `ringcomm`, or `python -m ringcomm`: bench, doctor, plan, show, trace, tune.

Each sub-command has a function that adds its options to a parser, and one that runs it, imports
what it needs and returns the exit status.
"""

import argparse
import difflib
import inspect
import json
import os
import re
import signal
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ringcomm import __version__, tuning
from ringcomm.measure.ranks import joined_world_size, run_main
from ringcomm.screen import amount, as_option, byte_counts, check_writable, whole_numbers, words

VERDICT_S = 30
NUM_RANKS = max(2, min(4, len(os.sched_getaffinity(0))))
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# Packages that collectives do not need: what needs them, and their names for pip.
_WANTED_FOR = {
    "liger_kernel": ("liger needs", "liger-kernel"),
    "matplotlib": ("--plot needs", "matplotlib"),
    "mpi4py": ("ranks of mpiexec need", "mpi4py"),
    "quack": ("quack needs", "quack-kernels"),
    "rich": ("tables need", "rich"),
}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of options with a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest name; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w.-]+", wrong[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """Compares ringcomm with Gloo on this machine, in half a minute; verifies the results.

    `ringcomm bench OP` measures one operation in depth. OP is one of all_reduce, all_reduce_apart,
    all_reduce_shared, reduce_scatter, all_gather, broadcast, all_to_all, round_trip, sendrecv and
    barrier, or several of them separated by commas; or cross_entropy, or systems. It needs the
    folder benchmarks/ of a checkout. `ringcomm bench OP --help` shows its options.

    The command starts its own ranks. `torchrun ... -m ringcomm bench OP` uses torchrun's ranks.
    """
    add = parser.add_argument
    add("op", nargs="?", metavar="OP", help="an operation, with options of its own")
    about = "ranks to start, 2 to 64; by default one per CPU, 2 to 4"
    add("--world-size", type=int, default=NUM_RANKS, help=about)
    add("--seconds", type=float, default=20.0, help="of measurement in all")
    add("--html", type=Path, metavar="FILE", help="write a page with one picture (one file)")
    add("--json", type=Path, metavar="FILE", help="write the figures as one JSON object")


def _bench(options: argparse.Namespace) -> int:
    op = options.op
    if op is None:
        from ringcomm.measure import bench

        return bench.run(options)
    if not (BENCHMARKS / "front_door.py").is_file():
        options.parser.error(
            f"{op}: an installed package has the short comparison only, which needs no OP. Clone"
            " ringcomm's repository and run this there after `pip install -e .`"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    try:
        options.parser = import_module("front_door").make_parser(op, options.parser.prog)
    except ValueError as error:
        options.parser.error(str(error))
    chosen = options.parser.parse_args(options.arguments)
    return int(chosen.run(chosen))


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
    add("--job", type=int, metavar="PID", help="process id of torchrun or of any rank")
    about = "ranks to start, 1 to 64; by default one per CPU, 2 to 4"
    add("--world-size", type=int, default=NUM_RANKS, help=about)
    add("--seconds", type=float, default=0.3, help="seconds of measurement per size")
    add("--json", action="store_true", help="print the report as one JSON object")
    add("--verdict", action="store_true", help="with --job: print one line, the cause of a hang")
    add("--dump", type=Path, metavar="FOLDER", help="with --job: also write a dump of each rank")
    about = "format of the dumps; torch: FOLDER/rank0, for torch's analyser torchfrtrace"
    add("--format", choices=("json", "torch"), default="json", help=about)


def _doctor(options: argparse.Namespace) -> int:
    error = options.parser.error
    if options.job is not None:
        return _doctor_of_job(options)
    if options.dump is not None or options.verdict:
        error(f"{'--verdict' if options.verdict else '--dump'} needs --job PID")
    if not 1 <= options.world_size <= tuning.MAX_WORLD_SIZE:
        error(f"--world-size must be 1 to {tuning.MAX_WORLD_SIZE}, got {options.world_size}")
    if options.seconds < 0:
        error("--seconds must not be negative")
    if joined_world_size() is not None:
        error("it starts its own ranks: run it without torchrun")
    from ringcomm.measure.doctor import examine, print_report

    report = examine(options.world_size, options.seconds)
    if options.json:
        print(json.dumps(report, allow_nan=False))
    else:
        print_report(report)
    return 1 if "errors" in report["group"] else 0


def _doctor_of_job(options: argparse.Namespace) -> int:
    from ringcomm.measure import job

    if options.verdict:
        signal.alarm(VERDICT_S)  # the job's own question: nobody may wait for a blocked output
    try:
        report = job.examine(options.job, options.dump, options.format)
    except (job.JobError, OSError) as error:
        print(f"ringcomm doctor: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, allow_nan=False))
    elif options.verdict:
        print(f"ringcomm doctor: {report['verdict']}")
    else:
        job.print_report(report)
    return 0


def _add_plan(parser: argparse.ArgumentParser) -> None:
    """Ranks training systems and meshes for a model by predicted step time.

    No rank is started. For every system and mesh it predicts memory by part, traffic, the pipeline
    bubble and time, and ranks the plans that fit. Among plans within 2 % of the fastest, fewer
    axes, simpler systems and fewer bytes rank first. A model is a name or a config.json of
    transformers. See docs/design/planner.md.
    """
    add = parser.add_argument
    add("--model", help="a known name such as llama-7b, or the path of a config.json")
    add("--gpus", type=int, default=0, help="total number of devices over all hosts")
    add("--tokens", type=as_option(amount), default="4M", help="tokens per step over all ranks")
    about = "tokens per sequence; by default the model's context"
    or_none = as_option(lambda text: amount(text) if text != "0" else 0)
    add("--sequence", type=or_none, default=0, help=about)
    add("--top", type=int, default=10, help="plans to print; 0 for all")
    add("--why", type=int, default=1, help="number of the plan to explain")
    add("--json", action="store_true", help="print all plans as one JSON object")
    add = parser.add_argument_group("machines").add_argument
    add("--hardware", default="h100", help="a known name, or a JSON file")
    about = "a file of `ringcomm tune`, from which link times are taken"
    add("--tuning", type=Path, metavar="FILE", help=about)
    about = "memory per device, such as 80GiB or 80GB; by default the hardware's"
    add("--memory", type=as_option(amount), default=0, help=about)
    add("--per-host", type=int, default=0, help="devices per host; by default the hardware's")
    # Their names in the namespace are those of Job's fields.
    add = parser.add_argument_group("plans to consider, by default all").add_argument
    for name, what in (("dp", "data"), ("pp", "pipeline"), ("tp", "tensor"), ("ep", "expert")):
        add(f"--{name}", type=int, default=0, help=f"size of {what} parallelism")
    names = as_option(lambda text: tuple(words(text)))
    several: dict[str, Any] = {"type": names, "default": (), "metavar": "NAMES"}
    add("--systems", help="training systems, separated by commas", **several)
    add("--schedules", help="pipeline schedules", **several)
    about = "activation checkpointing: none, full"
    add("--checkpointing", dest="checkpointings", help=about, **several)
    add("--precision", default="bf16", help="bf16 (with float32 master weights) or fp32")
    add("--optimizer", default="adamw", help="adamw or sgd")
    about = "split tokens over ranks of tp; by default where they divide sequences"
    is_flag = argparse.BooleanOptionalAction
    add("--sequence-parallel", dest="is_sequence_split", action=is_flag, help=about)


def _plan(options: argparse.Namespace) -> int:
    error = options.parser.error
    if options.model is None or options.gpus < 1:
        error("--model and --gpus are required: --model llama-7b --gpus 8")
    if options.top < 0:
        error(f"--top must not be negative, got {options.top}")
    if options.why < 1:
        error(f"--why must be 1 or more, got {options.why}")
    from ringcomm.planner import Cluster, Job, plan
    from ringcomm.planner.plans import LEGEND

    try:
        cluster = Cluster(options.gpus, options.hardware, options.memory, options.per_host)
        if options.tuning is not None:
            cluster = cluster.tuned(tuning.load(options.tuning).worlds)
        job = Job(**{field.name: getattr(options, field.name) for field in fields(Job)})
        plans = plan(options.model, cluster, job)
    except (ValueError, OSError) as problem:
        error(str(problem))
    if options.json:
        print(plans.to_json())
        return 0 if plans.ranked else 1
    print(plans.headline())
    if plans.ranked:
        print(plans.table(options.top))
        print(LEGEND)
        if plans.tie_line():
            print(plans.tie_line())
        chosen = plans.ranked[min(options.why, len(plans.ranked)) - 1]
        number = plans.ranked.index(chosen) + 1
        print(f"Plan {number}, {chosen.candidate.name}:")
        for reason in chosen.reasons:
            print(f"- {reason}")
    print("Rejected plans:")
    for line in plans.refusal_lines(options.top):
        print(f"- {line}")
    return 0 if plans.ranked else 1


def _add_show(parser: argparse.ArgumentParser) -> None:
    """Writes a page that shows how an algorithm works: one file, for any browser, offline.

    Pages: ring (the steps of an all_reduce), memory (of a rank, by system and number of ranks),
    lomo (memory over a backward pass), pipeline (schedules and their idle time), tensor (one block
    over tensor-parallel ranks), loss (cross-entropy over a split vocabulary).
    With --trace or --timeline a page shows a recorded run. See docs/how-to/show.md.
    """
    add = parser.add_argument
    add("page", choices=_PAGES, metavar="PAGE", help=", ".join(_PAGES))
    add("--ranks", type=int, help="2 to 64, by default 4; of memory the most, by default 64")
    about = "of memory, lomo, tensor: a known name, or the path of a config.json; default llama-7b"
    add("--model", help=about)
    add("--bytes", type=as_option(amount), help="of ring: of a rank's buffer, by default 1MiB")
    add("--micro-batches", type=int, help="of pipeline, by default 8")
    about = "of ring: a trace of `ringcomm trace`"
    add("--trace", type=Path, metavar="FILE", help=about)
    add("--seq", type=int, metavar="N", help="with --trace: the call's number (default: the first)")
    about = "of pipeline: a file of Timeline.export_chrome_trace()"
    add("--timeline", type=Path, metavar="FILE", help=about)
    add("-o", "--output", type=Path, metavar="FILE", help="by default ringcomm-PAGE.html")


# Pages of `show`, the options of each and their defaults.
_PAGES: dict[str, dict[str, Any]] = {
    "ring": {"ranks": 4, "bytes": 1 << 20, "trace": None, "seq": None},
    "memory": {"model": "llama-7b", "ranks": 64},
    "lomo": {"model": "llama-7b"},
    "pipeline": {"ranks": 4, "micro_batches": 8, "timeline": None},
    "tensor": {"model": "llama-7b", "ranks": 4},
    "loss": {"ranks": 4},
}


def _show(options: argparse.Namespace) -> int:
    error, known = options.parser.error, _PAGES[options.page]
    given = {
        name: value
        for name in ("ranks", "model", "bytes", "micro_batches", "trace", "seq", "timeline")
        if (value := getattr(options, name)) is not None
    }
    for name in given.keys() - known.keys():
        error(f"page {options.page} has no option --{name.replace('_', '-')}")
    from ringcomm import show

    if not 2 <= given.get("ranks", 2) <= show.MAX_RANKS:
        error(f"--ranks must be 2 to {show.MAX_RANKS}, got {options.ranks}")
    if not 1 <= given.get("micro_batches", 1) <= show.MAX_MICRO_BATCHES:
        limit = show.MAX_MICRO_BATCHES
        error(f"--micro-batches must be 1 to {limit}, got {options.micro_batches}")
    if "seq" in given and "trace" not in given:
        error("--seq needs --trace FILE")
    output = options.output or Path(f"ringcomm-{options.page}.html")
    try:
        data = getattr(show, options.page)(*(known | given).values())
        show.write_page(options.page, data, output)
    except (OSError, ValueError) as problem:
        error(str(problem))
    print(f"{output}: open it in a browser")
    return 0


def _add_trace(parser: argparse.ArgumentParser) -> None:
    """Records every rank of a program and writes one trace for https://ui.perfetto.dev.

        ringcomm trace -o job.json -- torchrun --nproc-per-node 2 train.py
        ringcomm trace -o job.json --merge FOLDER
        ringcomm trace --steps job.json

    The first runs a command and exits with its status. A program that is started in another way
    records to FOLDER if RINGCOMM_TRACE=FOLDER is in its environment; the second merges these
    recordings, and dumps of the flight recorder, into a trace. The third prints the steps of a ring
    collective. See docs/how-to/trace.md.
    """
    add = parser.add_argument
    of_file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    about = "trace to write, replacing an existing file; with --format torch a new folder"
    add("-o", "--output", default=Path("ringcomm-trace.json"), help=about, **of_file)
    about = "newest events to keep for each thread"
    add("--events", type=int, metavar="N", default=1 << 16, help=about)
    about = "folders of recordings and dumps, of all hosts"
    add("--merge", type=Path, nargs="+", metavar="FOLDER", help=about)
    about = "of --merge: a trace, or for torch's analyser torchfrtrace one dump for each rank"
    add("--format", choices=("perfetto", "torch"), default="perfetto", help=about)
    add("--steps", help="print the ring steps of this trace", **of_file)
    add("--seq", type=int, metavar="N", help="with --steps: the call's number (default: the first)")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program to record")


def _trace(options: argparse.Namespace) -> int:
    error = options.parser.error
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if sum(map(bool, (command, options.merge, options.steps))) != 1:
        error("give one of: -- COMMAND, --merge FOLDER, --steps FILE")
    if not 64 <= options.events <= 1 << 24:
        error(f"--events must be 64 to {1 << 24}, got {options.events}")
    from ringcomm.trace import merge

    if options.steps:
        print(merge.steps(options.steps, options.seq))
        return 0
    if options.format == "torch":
        if not options.merge:
            error("--format torch needs --merge FOLDER: it converts dumps of the flight recorder")
        return merge.convert_dumps(options.merge, options.output)
    if not os.access(options.output.absolute().parent, os.W_OK) or options.output.is_dir():
        error(f"--output: cannot write {str(options.output)!r}")
    if options.merge:
        return merge.merge_folders(options.merge, options.output)
    return merge.run_recorded(command, options.events, options.output)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    """Measures the algorithms of all_reduce on this machine and writes a tuning file for groups.

    For each number of ranks the file has a cost model (alpha per transfer, beta per MiB) and the
    size up to which one_shot is the fastest algorithm. Run it on an idle machine.
    """
    add = parser.add_argument
    numbers, sizes = as_option(whole_numbers), as_option(byte_counts)
    about = "numbers of ranks to measure, 2 to 64"
    add("--world-sizes", type=numbers, default="2,4", help=about)
    some_sizes = "1k,4k,16k,32k,64k,128k,256k,512k,1m,4m"
    add("--sizes", type=sizes, default=some_sizes, help="buffer sizes in bytes")
    about = "seconds of measurement for each size and number of ranks"
    add("--seconds", type=float, default=0.6, help=about)
    about = "repeats of a measurement that other programs disturbed"
    add("--repeats", type=int, default=2, help=about)
    path = Path("ringcomm-tuning.json")
    add("--json", type=Path, metavar="FILE", default=path, help="the file to write")
    add("--force", action="store_true", help="write it even if other programs disturbed it")


def _tune(options: argparse.Namespace) -> int:
    error = options.parser.error
    for world_size in options.world_sizes:
        if not 2 <= world_size <= tuning.MAX_WORLD_SIZE:
            error(f"--world-sizes must be 2 to {tuning.MAX_WORLD_SIZE}, got {world_size}")
    if len(set(options.sizes)) < 2:  # the cost model has three coefficients
        error("--sizes must have at least 2 different sizes, which the cost model needs")
    if options.seconds < 0 or options.repeats < 0:
        error("--seconds and --repeats must not be negative")
    if not options.json.absolute().parent.is_dir():
        error(f"--json: no such folder: {str(options.json.absolute().parent)!r}")
    try:
        check_writable(options.json)
    except ValueError as problem:
        error(f"--json: {problem}")
    if joined_world_size() is not None:
        error("it starts its own ranks: run it without torchrun")
    from ringcomm.measure.algorithms import tune

    how = (options.world_sizes, options.sizes, options.seconds, options.repeats)
    return tune(*how, options.json, is_forced=options.force)


_COMMANDS = {
    "bench": (_add_bench, _bench, "compare ringcomm with Gloo on this machine"),
    "doctor": (_add_doctor, _doctor, "examine this machine and a group on it"),
    "plan": (_add_plan, _plan, "rank training systems and meshes for a model by predicted time"),
    "show": (_add_show, _show, "write a page that shows how an algorithm works"),
    "trace": (_add_trace, _trace, "record all ranks of a program and write one trace for Perfetto"),
    "tune": (_add_tune, _tune, "measure the algorithms of all_reduce and write a tuning file"),
}


def run(argv: list[str]) -> int:
    """Runs a command line and returns its exit status. Raises SystemExit for invalid options."""
    about = "Measures, tunes and examines ringcomm on this machine."
    parser = OneLineParser(prog="ringcomm", description=about)
    parser.add_argument("--version", action="version", version=f"ringcomm {__version__}")
    choices = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (add_arguments, run_command, about) in _COMMANDS.items():
        sub = choices.add_parser(name, help=about, description=inspect.getdoc(add_arguments))
        sub.formatter_class = _HelpFormatter
        add_arguments(sub)
        sub.set_defaults(parser=sub, run=run_command)
    # What follows an operation of `bench` is for that operation's parser.
    is_operation = argv[:1] == ["bench"] and len(argv) > 1 and not argv[1].startswith("-")
    num_own = 2 if is_operation else len(argv)
    options = parser.parse_args(argv[:num_own])
    options.arguments = argv[num_own:]
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
    return run_main("ringcomm", run)
