"""Runs PyTorch's own distributed tests against ringcomm, and compares with Gloo.

Usage: make test-torch ARGS="[--mode gloo-2] [--test 'test_all_reduce*'] [--backend gloo] ..."

Every test has ranks of its own, forked from a server that has imported torch's tests, and a limit
in time. Ends with status 1 if a test fails on ringcomm that is not in known.py, or passes that is.
Gloo's results are kept beside this file, by torch minor; --refresh --backend gloo renews them.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "python"))

import in_rank
import known
import page
import ranks
import results
import suites
from results import FAIL, PASS, SKIP, Outcome


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make test-torch", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--backend", choices=("ringcomm", "gloo"), default="ringcomm")
    parser.add_argument(
        "--mode", action="append", choices=suites.MODES, help="of these only (default: all)"
    )
    parser.add_argument(
        "--test", action="append", metavar="PATTERN", help="only tests with such names, as in a shell"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="of a test, in seconds")
    parser.add_argument("--refresh", action="store_true", help="keep Gloo's results")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of results")
    parser.add_argument("--verbose", action="store_true", help="show failures in full")
    options = parser.parse_args(argv)
    if options.refresh and options.backend != "gloo":
        parser.error("--refresh keeps Gloo's results: it wants --backend gloo")
    if options.write and (options.mode or options.test or options.backend == "gloo"):
        parser.error("--write wants all tests, on ringcomm")
    return options


def run_one(server: ranks.Server, mode: suites.Mode, test: suites.TorchTest, backend: str,
            timeout_s: float) -> Outcome:
    """Runs a test on ranks of its own."""
    started = time.monotonic()
    status, text = PASS, ""
    with tempfile.TemporaryDirectory(prefix="ringcomm-torch-") as folder:
        pool = ranks.Pool(server, test.world_size, {})
        arguments = (mode, test.name, backend, folder)
        try:
            skip = pool.call(in_rank.run_test, arguments, timeout_s)[0]
            pool.close()
            if skip is not None:
                status, text = SKIP, skip
        except ranks.RankFailure as failure:
            status, text = FAIL, str(failure).strip()
    return Outcome(mode.name, test.name, status, text, time.monotonic() - started)


def run_mode(mode: suites.Mode, options: argparse.Namespace) -> Iterator[Outcome]:
    """Runs a mode's tests one after the other."""
    server = ranks.Server(functools.partial(suites.import_tests, mode))
    try:
        lister = ranks.Pool(server, 1, {})
        (tests,) = lister.call(suites.find_tests, (mode,), 120.0)
        lister.close()
        for test in tests:
            if not any(fnmatch.fnmatch(test.name, pattern) for pattern in options.test or ["*"]):
                continue
            if test.skip is not None:
                yield Outcome(mode.name, test.name, SKIP, test.skip)
            else:
                yield run_one(server, mode, test, options.backend, options.timeout)
    finally:
        left = server.stop()
        if left:
            yield Outcome(mode.name, "(what the ranks left)", FAIL, "\n".join(["left:", *left]))


def show(outcome: Outcome, verbose: bool) -> None:
    """Prints the line of a test that was run."""
    if outcome.status == SKIP and not outcome.seconds:
        return
    name = f"{outcome.mode} {outcome.test}"
    print(f"{outcome.status}  {outcome.seconds:5.1f} s  {name}", flush=True)
    if outcome.status == FAIL:
        print(outcome.text if verbose else f"      {results.cause(outcome.text)}", flush=True)


def judge(outcomes: list[Outcome], gloo: results.GlooResults) -> list[str]:
    """What is wrong with ringcomm's results."""
    wrong = []
    for outcome in outcomes:
        reason = known.reason(outcome.mode, outcome.test)
        passes_on_gloo = gloo.get(outcome.key, ("", ""))[0] == PASS
        name = f"{outcome.mode} {outcome.test}"
        if outcome.status == PASS and reason is not None:
            wrong.append(f"{name} passes: take it out of known.py")
        elif outcome.status == FAIL and reason is None:
            wrong.append(f"{name} fails" + (", and passes on Gloo" if passes_on_gloo else ""))
        elif outcome.status == SKIP and passes_on_gloo:
            wrong.append(f"{name} is skipped, and passes on Gloo: {outcome.text}")
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Runs, prints, compares; returns the exit status."""
    options = parse(argv)
    outcomes: list[Outcome] = []
    for name in options.mode or suites.MODES:
        for outcome in run_mode(suites.MODES[name], options):
            show(outcome, options.verbose)
            outcomes.append(outcome)
    counts = Counter((outcome.mode, outcome.status) for outcome in outcomes)
    for name in options.mode or suites.MODES:
        print(f"{name}:", ", ".join(f"{counts[name, status]} {status}" for status in (PASS, SKIP, FAIL)))
    import torch

    gloo_path = results.gloo_file(torch.__version__)
    if options.backend == "gloo":
        if options.refresh:
            results.write_gloo(gloo_path, outcomes)
        return 0
    gloo = results.read_gloo(gloo_path)
    wrong = judge(outcomes, gloo)
    if options.write:
        options.write.write_text(page.render(outcomes, gloo, torch.__version__), encoding="utf-8")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong) or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
