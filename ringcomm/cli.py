"""What the commands of `ringcomm` do; _ringcomm.command has their options and imports no torch.

The function of a command checks its options, imports what it needs and returns the exit status.
"""

import argparse
import json
import signal
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from _ringcomm.status import in_words
from ringcomm import tuning
from ringcomm.measure.ranks import joined_world_size

VERDICT_S = 30


def _bench(options: argparse.Namespace) -> int:
    if options.op is not None:
        return int(import_module("front_door").run(options))
    _check_launcher(options)
    from ringcomm.measure import bench

    return bench.run(options)


def _doctor(options: argparse.Namespace) -> int:
    if options.job is not None:
        return _doctor_of_job(options)
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
        report = job.examine(options.job, options.dump)
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
        try:
            costs = tuning.load(options.tuning) if options.tuning else None
        except (OSError, ValueError) as wrong:
            error(in_words(wrong))
        print(tuning.tables(costs))
        return 0
    from ringcomm.planner import Cluster, Job, plan
    from ringcomm.planner.plans import LEGEND

    try:
        cluster = Cluster(options.gpus, options.hardware, options.memory, options.per_host)
        if options.tuning is not None:
            cluster = cluster.tuned(tuning.load(options.tuning))
        for name in ("systems", "schedules", "checkpointings"):
            setattr(options, name, tuple(getattr(options, name)))
        job = Job(**{field.name: getattr(options, field.name) for field in fields(Job)})
        plans = plan(options.model, cluster, job)
    except (ValueError, OSError) as problem:
        error(in_words(problem))
    if plans.ranked and options.why > len(plans.ranked):
        error(f"--why must be 1 to {len(plans.ranked)}, got {options.why}")
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
    from ringcomm import show

    known: dict[str, Any] = options.defaults
    given = {name: value for name in known if (value := getattr(options, name)) is not None}
    try:
        data = getattr(show, options.page)(*(known | given).values())
    except (OSError, ValueError) as problem:
        options.parser.error(in_words(problem))
    show.write_page(options.page, data, options.output)
    print(f"{options.output}: open it in a browser")
    return 0


def _check_launcher(options: argparse.Namespace) -> None:
    if joined_world_size() is not None:
        options.parser.error("it starts its own ranks: run it without torchrun")


def _trace(options: argparse.Namespace) -> int:
    from ringcomm.trace import merge

    def write_page(trace: Path) -> None:
        from ringcomm import show

        if options.html is not None:
            show.write_page("trace", show.trace(trace), options.html)
            print(f"ringcomm trace: {options.html}: open it in a browser", file=sys.stderr)

    parser: argparse.ArgumentParser = options.parser
    try:
        if options.merge:
            return merge.merge_folders(options.merge, options.output, write_page)
        return merge.run_recorded(options.command, options.events, options.output, write_page)
    except ValueError as problem:
        parser.error(str(problem))


def _tune(options: argparse.Namespace) -> int:
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
    """Runs what `_ringcomm.command.make_parser` has read; returns the exit status."""
    return _RUN[options.command_name](options)
