"""What the commands of `ringcomm` do; their options are in _ringcomm_cli, which imports no torch.

The function of a command checks its options, imports what it needs and returns the exit status.
"""

import argparse
import json
import signal
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from _ringcomm_cli import PAGES, OneLineParser, in_words, main, run  # noqa: F401
from ringcomm import tuning
from ringcomm.measure.ranks import joined_world_size
from ringcomm.screen import check_writable

VERDICT_S = 30
# Packages that collectives do not need: what needs them, and their names for pip.
_WANTED_FOR = {
    "liger_kernel": ("liger needs", "liger-kernel"),
    "matplotlib": ("--plot needs", "matplotlib"),
    "mpi4py": ("ranks of mpiexec need", "mpi4py"),
    "quack": ("quack needs", "quack-kernels"),
    "rich": ("tables need", "rich"),
}


def _bench(options: argparse.Namespace) -> int:
    if options.op is not None:
        return int(import_module("front_door").run(options))
    from ringcomm.measure import bench

    _check_between(options, "world_size", 2, tuning.MAX_WORLD_SIZE)
    _check_launcher(options)
    _check_files(options, "html", "json")
    return bench.run(options)


def _doctor(options: argparse.Namespace) -> int:
    error = options.parser.error
    if options.job is not None:
        return _doctor_of_job(options)
    if options.dump is not None or options.verdict:
        error(f"{'--verdict' if options.verdict else '--dump'} needs --job PID")
    _check_between(options, "world_size", 1, tuning.MAX_WORLD_SIZE)
    _check_launcher(options)
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
        print(f"ringcomm doctor: {in_words(error)}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, allow_nan=False))
    elif options.verdict:
        print(f"ringcomm doctor: {report['verdict']}")
    else:
        job.print_report(report)
    return 0


def _plan(options: argparse.Namespace) -> int:
    error = options.parser.error
    if options.collectives:
        from ringcomm.planner.collectives import tables

        if options.json:
            error("--collectives prints tables, and has no --json")
        try:
            costs = tuning.load(options.tuning) if options.tuning else None
        except (OSError, ValueError) as wrong:
            error(in_words(wrong))
        print(tables(costs))
        return 0
    if options.model is None or options.gpus < 1:
        error("--model and --gpus are required: --model llama-7b --gpus 8")
    if options.top < 0:
        error(f"--top must not be negative, got {options.top}")
    if 0 < options.memory < 1 << 20:
        error(f"--memory is {options.memory} bytes: did you mean {options.memory}GiB?")
    from ringcomm.planner import Cluster, Job, plan
    from ringcomm.planner.plans import LEGEND

    try:
        cluster = Cluster(options.gpus, options.hardware, options.memory, options.per_host)
        if options.tuning is not None:
            cluster = cluster.tuned(tuning.load(options.tuning))
        job = Job(**{field.name: getattr(options, field.name) for field in fields(Job)})
        plans = plan(options.model, cluster, job)
    except (ValueError, OSError) as problem:
        error(in_words(problem))
    if plans.ranked:
        _check_between(options, "why", 1, len(plans.ranked))
    if options.json:
        print(plans.to_json())
        return 0 if plans.ranked else 1
    print(plans.headline())
    if plans.ranked:
        print(plans.table(options.top))
        print(LEGEND)
        if tie_line := plans.tie_line(options.top):
            print(tie_line)
        chosen = plans.ranked[options.why - 1]
        print(f"Plan {options.why}, {chosen.candidate.name}:")
        for reason in chosen.reasons:
            print(f"- {reason}")
    print("Rejected plans:")
    for line in plans.refusal_lines(options.top):
        print(f"- {line}")
    return 0 if plans.ranked else 1


def _show(options: argparse.Namespace) -> int:
    error, known = options.parser.error, PAGES[options.page]
    given = {
        name: value
        for name in ("ranks", "model", "bytes", "micro_batches", "trace", "seq", "timeline")
        if (value := getattr(options, name)) is not None
    }
    for name in given.keys() - known.keys():
        error(f"page {options.page} has no option --{name.replace('_', '-')}")
    _check_seq(options)
    from ringcomm import show

    _check_between(options, "ranks", 2, show.MAX_RANKS)
    _check_between(options, "micro_batches", 1, show.MAX_MICRO_BATCHES)
    if "seq" in given and "trace" not in given:
        error("--seq needs --trace FILE")
    output = options.output or Path(f"ringcomm-{options.page}.html")
    try:
        data = getattr(show, options.page)(*(known | given).values())
        show.write_page(options.page, data, output)
    except BrokenPipeError:  # `-o /dev/stdout | head`: no bad input
        raise
    except (OSError, ValueError) as problem:
        error(in_words(problem))
    print(f"{output}: open it in a browser")
    return 0


def _check_between(options: argparse.Namespace, name: str, least: int, most: int) -> None:
    value = getattr(options, name)
    if value is not None and not least <= value <= most:
        option = f"--{name.replace('_', '-')}"
        options.parser.error(f"{option} must be {least} to {most}, got {value}")


def _check_launcher(options: argparse.Namespace) -> None:
    if joined_world_size() is not None:
        options.parser.error("it starts its own ranks: run it without torchrun")


def _check_files(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        try:
            check_writable(getattr(options, name))
        except ValueError as problem:
            options.parser.error(f"--{name}: {problem}")


def _check_seq(options: argparse.Namespace) -> None:
    if options.seq is not None and options.seq < 0:
        options.parser.error(f"--seq must not be negative, got {options.seq}")


def _trace(options: argparse.Namespace) -> int:
    error = options.parser.error
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if sum(map(bool, (command, options.merge, options.steps))) != 1:
        error("give one of: -- COMMAND, --merge FOLDER, --steps FILE")
    _check_between(options, "events", 64, 1 << 24)
    _check_seq(options)
    from ringcomm.trace import merge

    if options.steps:
        if options.html is not None:
            error("--html shows a whole trace: ringcomm show trace --trace FILE")
        if options.json:
            print(json.dumps(merge.steps_of(options.steps, options.seq), allow_nan=False))
        else:
            print(merge.steps(options.steps, options.seq))
        return 0
    if options.json or options.seq is not None:
        error(f"--{'json' if options.json else 'seq'} needs --steps FILE")
    if options.format == "torch":
        if not options.merge:
            error("--format torch needs --merge FOLDER: it converts dumps of the flight recorder")
        if options.html is not None:
            error("--html shows a trace, and --format torch writes none")
        return merge.convert_dumps(options.merge, options.output)
    if not options.output.absolute().parent.is_dir():
        error(f"--output: cannot write {str(options.output)!r}")
    _check_files(options, "output", "html")

    def write_page(trace: Path) -> None:
        from ringcomm import show

        if options.html is not None:
            show.write_page("trace", show.trace(trace), options.html)
            print(f"ringcomm trace: {options.html}: open it in a browser", file=sys.stderr)

    if options.merge:
        return merge.merge_folders(options.merge, options.output, then=write_page)
    return merge.run_recorded(command, options.events, options.output, write_page)


def _tune(options: argparse.Namespace) -> int:
    error = options.parser.error
    for world_size in options.world_sizes:
        if not 2 <= world_size <= tuning.MAX_WORLD_SIZE:
            error(f"--world-sizes must be 2 to {tuning.MAX_WORLD_SIZE}, got {world_size}")
    if len(set(options.sizes)) < 2:  # the cost model has three coefficients
        error("--sizes must have at least 2 different sizes, which the cost model needs")
    if options.repeats < 0:
        error(f"--repeats must not be negative, got {options.repeats}")
    if not options.json.absolute().parent.is_dir():
        error(f"--json: no such folder: {str(options.json.absolute().parent)!r}")
    _check_files(options, "json")
    _check_launcher(options)
    from ringcomm.measure.algorithms import tune

    how = (options.world_sizes, options.sizes, options.seconds, options.repeats)
    return tune(*how, options.json, is_forced=options.force)


_RUN = {
    "bench": _bench,
    "doctor": _doctor,
    "plan": _plan,
    "show": _show,
    "trace": _trace,
    "tune": _tune,
}


def run_command(options: argparse.Namespace) -> int:
    """Runs what `_ringcomm_cli.make_parser` has read; returns the exit status."""
    try:
        return _RUN[options.command_name](options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _WANTED_FOR:
            raise
        what, name = _WANTED_FOR[package]
        parser: OneLineParser = options.parser
        parser.error(f"{what} the package {name}: pip install {name}")
