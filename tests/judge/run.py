"""Puts each fault of the table into a copy of the product, and says which quick test notices.

    python -m tests.judge.run [--kind KIND] [--only REGEX] [--jobs N] [--missed] [--again]
                              [--near N] [--whole] [--limit-s S] [--no-control] [--recheck] [--dry]

Before the first fault of a selection of tests, these run without a fault and must pass. A fault
that has a result for its row is not run again without --again or --missed. Results are in
tests/judge/results/<kind>.jsonl, one line for each fault. At the end it prints a table by folder.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.judge import table
from tests.judge.backends import cpp
from tests.judge.backends.python import WHOLE, nearest
from tests.judge.table import Fault, FaultError, Verdict

_BACKENDS = {
    "python": "python",
    "engine": "cpp",
    "operators": "cpp",
    "ptx": "ptx",
    "triton": "triton",
}
Results = dict[str, dict[str, Any]]  # by id of the fault


def judge_of(kind: str) -> Callable[[Fault, Path, float], Verdict]:
    """The back end's function."""
    module = importlib.import_module(f"tests.judge.backends.{_BACKENDS[kind]}")
    function: Callable[[Fault, Path, float], Verdict] = module.judge
    return function


def _path(kind: str, root: Path) -> Path:
    return root / "tests" / "judge" / "results" / f"{kind}.jsonl"


def _lines(kind: str, root: Path) -> Results:
    path = _path(kind, root)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {line["id"]: line for line in map(json.loads, lines)}


def read_results(kind: str, faults: Iterable[Fault], root: Path = table.ROOT) -> Results:
    """Those whose row is still the same."""
    results = _lines(kind, root)
    known = {fault.id: fault.digest() for fault in faults}
    return {name: line for name, line in results.items() if known.get(name) == line["row"]}


def write_results(kind: str, results: Results, root: Path) -> None:
    """In the order of ids, so that a change of one result is a change of one line."""
    path = _path(kind, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(results[name]) + "\n" for name in sorted(results))
    new = path.with_suffix(".new")
    new.write_text(text, "utf-8")
    new.replace(path)


def _commit(root: Path) -> str:
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _judge_in(scratch: Path, kind: str, fault: Fault, limit_s: float) -> Verdict:
    """In a thread of the pool, which has its own copy of the product."""
    own = scratch / threading.current_thread().name
    own.mkdir(exist_ok=True)
    return judge_of(kind)(fault, own, limit_s)


def run(kind: str, faults: list[Fault], options: argparse.Namespace) -> None:
    """Judges these, and writes each result as it comes."""
    root: Path = options.root
    known, commit = {each.id for each in table.load(kind, root)}, _commit(root)
    # A run that is stopped early has judged a sample.
    faults = sorted(faults, key=Fault.digest)
    controls = {fault.tests: fault.control() for fault in faults if options.control}
    with (
        tempfile.TemporaryDirectory(prefix="judge-") as scratch,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        left_out = set()  # faults of which the nearest files run alone

        def submit(fault: Fault) -> concurrent.futures.Future[Verdict]:
            tests = WHOLE if options.whole else fault.tests
            if options.near and "tests/cpp" in tests:
                tests = tuple(cpp.NEAREST if name == "tests/cpp" else name for name in tests)
                left_out.add(fault.id)
            elif options.near and kind == "python":
                files = nearest(fault, root)
                tests = tuple(files[: options.near])
                if len(files) > options.near:
                    left_out.add(fault.id)
            fault = dataclasses.replace(fault, tests=tests)
            return pool.submit(_judge_in, Path(scratch), kind, fault, options.limit_s)

        for waiting in concurrent.futures.as_completed(
            [submit(fault) for fault in controls.values()]
        ):
            verdict = waiting.result()
            if verdict.noticed:
                pool.shutdown(cancel_futures=True)
                raise SystemExit(
                    f"without a fault {verdict.by} fails: {verdict.said}\nno fault was judged"
                )
            print(f"control: passed in {verdict.seconds:.0f} s", flush=True)
        futures = {submit(fault): fault for fault in faults}
        for future in concurrent.futures.as_completed(futures):
            fault = futures[future]
            try:
                verdict = future.result()
            except FaultError as error:
                print(f"{fault.id}: no verdict: {error}", flush=True)
                continue
            word = f"noticed by {verdict.by}" if verdict.noticed else "NOT NOTICED"
            print(f"{fault.id}: {word} ({verdict.seconds:.0f} s)", flush=True)
            # With those of rows that have changed, whose first verdict stays.
            results = {name: line for name, line in _lines(kind, root).items() if name in known}
            old = results.get(fault.id)
            has_first = old is not None and not old["near"]
            results[fault.id] = {
                "id": fault.id,
                "row": fault.digest(),
                "commit": commit,
                "noticed": verdict.noticed,
                # Of the first time, before tests were added.
                "first": old["first"] if old and has_first else verdict.noticed,
                # How many files ran, where none of them noticed and others did not run.
                "near": 0 if verdict.noticed or fault.id not in left_out else options.near,
                "by": verdict.by,
                "seconds": round(verdict.seconds, 1),
                "said": verdict.said[:300],
            }
            write_results(kind, results, root)


def recheck(kind: str, faults: list[Fault], options: argparse.Namespace) -> None:
    """Runs what has noticed without a fault, and drops the results of tests that fail then."""
    results = read_results(kind, faults, options.root)
    found = {line["by"] for line in results.values() if "::" in line["by"]}
    with tempfile.TemporaryDirectory(prefix="judge-") as scratch:
        while found:
            control = dataclasses.replace(faults[0].control(), tests=tuple(sorted(found)))
            verdict = _judge_in(Path(scratch), kind, control, options.limit_s)
            print(f"{len(found)} tests: {verdict.by or 'passed'} ({verdict.seconds:.0f} s)")
            if not verdict.noticed:
                break
            if verdict.by not in found:  # such as a test that is no more
                raise FaultError(f"{verdict.by}: {verdict.said}")
            found.discard(verdict.by)
            results = {name: line for name, line in results.items() if line["by"] != verdict.by}
            write_results(kind, results, options.root)


def summary(faults: Iterable[Fault], results: Results) -> list[tuple[Any, ...]]:
    """For each folder: its name, faults, and how many are equivalent, ran, were noticed at first
    and are noticed now.

    The last three count those that are not equivalent. The last row is the sum.
    """
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0, 0])
    for fault in faults:
        result = None if fault.equivalent else results.get(fault.id)
        for folder in (str(Path(fault.file).parent), "all"):
            count = counts[folder]
            count[0] += 1
            count[1] += bool(fault.equivalent)
            count[2] += result is not None
            count[3] += bool(result and result["first"])
            count[4] += bool(result and result["noticed"])
    names = sorted(counts.keys() - {"all"}) + ["all"] * ("all" in counts)
    return [(name, *counts[name]) for name in names]


def page(faults: list[Fault], results: Results) -> str:
    """The summary as a table of Markdown, and the faults that were not noticed."""
    lines = [
        "| folder | faults | equivalent | run | noticed at first | noticed now | per cent |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for *row, noticed in summary(faults, results):
        share = f"{100 * noticed / row[3]:.0f}" if row[3] else ""
        lines.append(f"| {' | '.join(map(str, row))} | {noticed} | {share} |")
    missed = [
        (fault.id, results[fault.id]["near"])
        for fault in faults
        if not fault.equivalent and fault.id in results and not results[fault.id]["noticed"]
    ]
    for what, names in (
        ("Not noticed", [name for name, near in missed if not near]),
        (
            "Not noticed by the nearest files; the others have not run",
            [n for n, near in missed if near],
        ),
    ):
        if names:
            lines += ["", f"{what}: {', '.join(f'`{name}`' for name in names)}."]
    return "\n".join(lines)


def tables() -> str:
    """The tables of all kinds that have faults, for the page of the site."""
    found = []
    for kind in table.KINDS:
        if faults := table.load(kind):
            found.append(f"### {kind}\n\n{page(faults, read_results(kind, faults))}")
    return "\n\n".join(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.judge.run", description=__doc__)
    parser.add_argument("--kind", choices=table.KINDS, help="default: all")
    parser.add_argument("--only", default="", help="a regular expression for ids and files")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1800, help="for each fault")
    parser.add_argument(
        "--near",
        type=int,
        default=0,
        metavar="N",
        help="run only the N nearest test files, of C++ four; what they miss runs again without",
    )
    parser.add_argument("--whole", action="store_true", help="python: run all of the quick tests")
    parser.add_argument("--missed", action="store_true", help="again those that were not noticed")
    parser.add_argument(
        "--no-control",
        dest="control",
        action="store_false",
        help="the tests are known to pass without a fault",
    )
    parser.add_argument(
        "--recheck",
        action="store_true",
        help="run what has noticed without a fault; a result of a test that fails then is dropped",
    )
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--dry", action="store_true", help="only check the rows, print the table")
    parser.add_argument("--root", type=Path, default=table.ROOT, help="another checkout")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Status 1 if a row is wrong, or if a fault that was judged here has not been noticed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.whole or options.recheck) and options.kind != "python":
        parser.error("--whole and --recheck need --kind python")
    root = options.root = options.root.resolve()
    missed = 0
    try:
        for kind in [options.kind] if options.kind else table.KINDS:
            faults = table.load(kind, root)
            wanted = [f for f in faults if re.search(options.only, f"{f.id} {f.file}")]
            if options.recheck:
                recheck(kind, faults, options)
            elif not options.dry:
                results = read_results(kind, faults, root)
                again = {
                    f.id
                    for f in wanted
                    if options.again
                    or f.id not in results
                    or (results[f.id]["near"] and not options.near)
                }
                if options.missed:
                    again = {name for name, line in results.items() if not line["noticed"]}
                judged = [f for f in wanted if f.id in again and not f.equivalent]
                if judged:
                    run(kind, judged, options)
                results = read_results(kind, faults, root)
                missed += sum(not results.get(f.id, {}).get("noticed") for f in judged)
            if wanted:
                print(f"\n{kind}\n{page(wanted, read_results(kind, faults, root))}")
    except FaultError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
