"""Runs PyTorch's own distributed tests against ringcomm, and compares with Gloo.

Usage: python tests/torch/run.py [--mode gloo-2] [--test 'test_all_reduce*'] [--backend gloo] ...

Every test has ranks of its own, forked from a server that has imported torch's tests, and a limit
in time. Ends with status 1 if a test fails that is not in known.py, or passes that is, or if one
that passes on Gloo is skipped. Results are kept beside this file, by backend and torch minor:
`--refresh` renews them. page.py makes the site's page of them.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "support"))

import in_rank
import known
import outcomes
import ranks
import suites
from outcomes import FAIL, PASS, SKIP, Outcome

MAX_RUNS_OF_RACY = 3


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python tests/torch/run.py", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--backend", choices=("ringcomm", "gloo"), default="ringcomm")
    add("--mode", action="append", choices=suites.MODES, help="of these only (default: all)")
    add(
        "--test",
        action="append",
        metavar="PATTERN",
        help="only what has such a name, as in a shell",
    )
    add(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="of one test (default: 120)"
    )
    add("--refresh", action="store_true", help="keep the results in tests/torch")
    add("--verbose", action="store_true", help="show failures in full")
    return parser.parse_args(argv)


def run_once(
    server: ranks.Server, mode: suites.Mode, test: suites.TorchTest, options: argparse.Namespace
) -> Outcome:
    """Runs a test on ranks of its own."""
    started = time.monotonic()
    status, text = PASS, ""
    with tempfile.TemporaryDirectory(prefix="ringcomm-torch-") as folder:
        try:
            pool = ranks.Pool(server, [{}] * test.world_size)
            arguments = (mode, test.name, options.backend, folder)
            skips = pool.call(in_rank.run_test, arguments, options.timeout)
            pool.close()
            if skips[0] is not None:
                status, text = SKIP, skips[0]
        except ranks.RankFailure as failure:
            status, text = FAIL, str(failure).strip()
    return Outcome(mode.name, test.name, status, text, time.monotonic() - started)


def run_mode(mode: suites.Mode, options: argparse.Namespace) -> Iterator[Outcome]:
    """Runs a mode's tests one after the other."""
    server = ranks.Server(functools.partial(suites.import_tests, mode))
    try:
        lister = ranks.Pool(server, [{}])
        (tests,) = lister.call(suites.find_tests, (mode,), 120.0)
        lister.close()
        for test in tests:
            if not any(fnmatchcase(test.name, pattern) for pattern in options.test or ["*"]):
                continue
            if test.skip is not None:
                yield Outcome(mode.name, test.name, SKIP, test.skip)
                continue
            for _ in range(MAX_RUNS_OF_RACY if known.is_racy(mode.name, test.name) else 1):
                outcome = run_once(server, mode, test, options)
                if outcome.status != FAIL:
                    break
            yield outcome
    finally:
        left = server.stop()
        if left:
            print("left behind by the ranks:", *left, sep="\n  ", flush=True)
            raise SystemExit(1)


def show(outcome: Outcome, verbose: bool) -> None:
    """Prints the line of a test that had ranks."""
    if outcome.status == SKIP and not outcome.seconds:
        return
    print(f"{outcome.status}  {outcome.seconds:5.1f} s  {outcome.mode} {outcome.test}", flush=True)
    if outcome.status == FAIL:
        print(outcome.text if verbose else f"      {outcomes.cause(outcome.text)}", flush=True)


def judge(ended: list[Outcome], gloo: outcomes.KeptResults) -> list[str]:
    """What is wrong with ringcomm's results."""
    wrong = []
    for outcome in ended:
        is_known = known.why_failing(*outcome.key) is not None
        passes_on_gloo = gloo.get(outcome.key, ("", ""))[0] == PASS
        name = f"{outcome.mode} {outcome.test}"
        if outcome.status == PASS and is_known:
            wrong.append(f"{name} passes: take it out of known.py")
        elif outcome.status == FAIL and not is_known:
            wrong.append(f"{name} fails" + (", and passes on Gloo" if passes_on_gloo else ""))
        elif outcome.status == SKIP and passes_on_gloo:
            wrong.append(f"{name} is skipped, and passes on Gloo: {outcome.text}")
    return wrong


def commit() -> str:
    """The commit that is run."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty= + changes"]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(argv: list[str] | None = None) -> int:
    """Runs, prints, compares; returns the exit status."""
    options = parse(argv)
    modes = options.mode or list(suites.MODES)
    ended: list[Outcome] = []
    for name in modes:
        for outcome in run_mode(suites.MODES[name], options):
            show(outcome, options.verbose)
            ended.append(outcome)
    counts = Counter((outcome.mode, outcome.status) for outcome in ended)
    for name in modes:
        print(f"{name}:", *(f"{counts[name, status]} {status}" for status in (PASS, SKIP, FAIL)))
    if not ended:
        print("no test has such a name")
        return 1
    torch_version = metadata.version("torch")
    if options.refresh:
        kept = outcomes.kept_file(options.backend, torch_version)
        outcomes.write_kept(kept, f"{date.today()}, commit {commit()}", ended)
    if options.backend == "gloo":
        return 0
    gloo_path = outcomes.kept_file("gloo", torch_version)
    gloo = outcomes.read_kept(gloo_path)
    if not gloo:
        print(f"nothing is known of Gloo with torch {torch_version}: no {gloo_path.name}")
    wrong = judge(ended, gloo)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
