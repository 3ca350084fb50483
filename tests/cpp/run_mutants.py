#!/usr/bin/env python3
"""Breaks the protocols of csrc/core, one way at a time, and demands that the checker sees it.

Each mutant (checker/mutants.py) is one textual replacement in a copy of csrc/core, so the shipped
source carries no hooks. The text must occur exactly once: if the source has moved on, the run
fails and says which mutant needs an update. The checker is compiled against the mutated copy and
must report the expected kind of violation in each of the mutant's scenarios. That the shipped
source passes is the checker's own run.

This is not a back end of tests/judge: its verdict is not whether tests fail, but which kind of
violation each scenario has, and of some mutants that a scenario has none. What is above the
protocols has rows in tests/judge/faults/engine.toml.

    python3 tests/cpp/run_mutants.py [--cxx c++] [--only NAME]

Exit status 0 if every mutant behaves as expected.
"""

import argparse
import functools
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from checker.mutants import MUTANTS, Mutant

CPP_TESTS = pathlib.Path(__file__).resolve().parent
ROOT = CPP_TESTS.parent.parent
CORE = ROOT / "csrc" / "core"
CHECKER = CPP_TESTS / "checker"
# The rest of the checker includes only this of core: no mutant may touch it, so that its objects
# serve all mutants.
SHARED_HEADERS = {"arch.h"}
COMPILE_FLAGS = ["-std=c++20", "-O1", f"-I{CHECKER}"]
TIMEOUT_S = 120


class Failure(Exception):
    pass


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"no end after {TIMEOUT_S} s: {' '.join(command)}") from error


def compile_one(
    cxx: str, source: pathlib.Path, include: pathlib.Path, to: pathlib.Path
) -> pathlib.Path:
    done = run(
        [*shlex.split(cxx), *COMPILE_FLAGS, f"-I{include}", "-c", str(source), "-o", str(to)]
    )
    if done.returncode != 0:
        raise Failure(f"{source.name} does not compile:\n{done.stderr}")
    return to


def link(cxx: str, objects: list[pathlib.Path], to: pathlib.Path) -> pathlib.Path:
    done = run([*shlex.split(cxx), *map(str, objects), "-o", str(to)])
    if done.returncode != 0:
        raise Failure(f"{to.name} does not link:\n{done.stderr}")
    return to


def is_protocol_source(source: pathlib.Path) -> bool:
    """Only the scenarios instantiate the protocols."""
    return source.name.startswith("scenarios_")


def mutate(mutant: Mutant, include: pathlib.Path) -> None:
    if mutant.header in SHARED_HEADERS:
        raise Failure(
            f"{mutant.header} is compiled into the shared objects; no mutant may change it"
        )
    shutil.copytree(CORE, include / "core")
    replace(include / "core" / mutant.header, mutant.old, mutant.new)


def replace(source: pathlib.Path, old: str, new: str) -> None:
    """Replaces what occurs once: token by token, so that line breaks do not matter."""
    text = source.read_text()
    tokens = re.findall(r"\w+|[^\w\s]", old)
    places = list(re.finditer(r"\s*".join(map(re.escape, tokens)), text))
    if len(places) != 1:
        raise Failure(
            f"its text occurs {len(places)} times in {source.name} instead of once; "
            f"update checker/mutants.py:\n{old}"
        )
    source.write_text(text[: places[0].start()] + new + text[places[0].end() :])


def check(checker: pathlib.Path, scenario: str, *flags: str) -> tuple[str, float]:
    """What the checker found ("ok" or a kind of violation), and how long it took."""
    begin = time.monotonic()
    done = run([str(checker), "--scenario", scenario, *flags])
    took_s = time.monotonic() - begin
    found = re.search(r"^violation: (\w+)", done.stdout, re.MULTILINE)
    if found:
        return found.group(1), took_s
    if done.returncode == 0:
        return "ok", took_s
    return f"exit status {done.returncode} {done.stderr.strip()}", took_s


def headers_of(text: str) -> set[str]:
    """The core headers that this text includes, directly or through others."""
    found: set[str] = set()
    waiting = re.findall(r'#include "core/([\w.]+)"', text)
    while waiting:
        header = waiting.pop()
        if header not in found:
            found.add(header)
            waiting += re.findall(r'#include "core/([\w.]+)"', (CORE / header).read_text())
    return found


def try_mutant(
    mutant: Mutant, cxx: str, work: pathlib.Path, objects: dict[pathlib.Path, pathlib.Path]
) -> list[str]:
    """The lines of the table for this mutant. `objects` are the shipped source's, by source."""
    place = work / mutant.name
    place.mkdir()
    try:
        mutate(mutant, place)
        # What does not include the mutated header stays; what does must not be mixed with shipped
        # instances of the same templates, of which the linker would keep either.
        mutated = {
            source: compile_one(cxx, source, place, place / f"{source.stem}.o")
            for source in objects
            if is_protocol_source(source) and mutant.header in headers_of(source.read_text())
        }
        checker = link(cxx, list((objects | mutated).values()), place / "checker")
        lines = []
        for text in mutant.runs.split(", "):
            scenario, expected, *flags = text.split()
            found, took_s = check(checker, scenario, *flags)
            verdict = "as expected" if found == expected else f"MISSED, expected {expected}"
            ran = " ".join((scenario, *flags))
            lines.append(f"{mutant.name:24} {ran:32} {found:10} {took_s:6.2f} s  {verdict}")
        return lines
    except Failure as failure:
        return [f"{mutant.name:24} FAILED: {failure}"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cxx", default="c++", help="C++20 compiler (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; repeatable")
    arguments = parser.parse_args()
    names = arguments.only or [mutant.name for mutant in MUTANTS]
    arguments.mutants = [mutant for mutant in MUTANTS if mutant.name in names]
    if unknown := {*names} - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    return arguments


def run_all(arguments: argparse.Namespace, work: pathlib.Path) -> bool:
    begin = time.monotonic()
    cxx = arguments.cxx
    sources = sorted(CHECKER.glob("*.cc"))
    with ThreadPoolExecutor(max_workers=2) as pool:
        built = pool.map(
            lambda source: compile_one(cxx, source, CORE.parent, work / f"{source.stem}.o"), sources
        )
        attempt = functools.partial(
            try_mutant, cxx=cxx, work=work, objects=dict(zip(sources, built, strict=True))
        )
        print(f"{'mutant':24} {'scenario or test':32} {'found':10}")
        num_bad = 0
        for lines in pool.map(attempt, arguments.mutants):
            print("\n".join(lines), flush=True)
            num_bad += any(not line.endswith("as expected") for line in lines)
    num = len(arguments.mutants)
    print(
        f"\n{num - num_bad} of {num} mutants behave as expected, "
        f"{time.monotonic() - begin:.0f} s in all"
    )
    return num_bad == 0


def main() -> int:
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="ringcomm_mutants_") as work:
            return 0 if run_all(arguments, pathlib.Path(work)) else 1
    except Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
