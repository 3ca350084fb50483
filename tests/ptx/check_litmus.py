#!/usr/bin/env python3
"""Compares the weak memory with the axioms of PTX, on litmus tests and on random programs.

    check_litmus.py RUNNER [--random NUM] [--runs NUM] [--seed NUM]

RUNNER is the program of litmus.cc. Every outcome that it sees must be one that the checker of the
axioms (tests/litmus/ptx_model.py) allows. Of the tests in tests/litmus it must see the bad outcome
as soon as one instruction is weaker, except where a load would have to take the value of a later
store: this memory gives a load its value when it executes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "litmus"))

import ptx_model  # noqa: E402
from weakened import TEXTBOOK, WEAKENED, read, textbook_program, weaker  # noqa: E402

Outcome = frozenset[tuple[str, int]]
# A relaxed store that another thread sees before an earlier load of the same block has its value.
NEEDS_LATER_STORES = {
    "board_reuse": ("st.relaxed.sys", "ld.relaxed.sys", "st.release.gpu", "ld.acquire.gpu", ""),
    "link_slot": (
        *("st.relaxed.sys h", "ld.relaxed.sys r0", "st.release.gpu h", "bar.cta.sync", ""),
    ),
    "packet_reuse": ("",),
}


def lines_of(program: ptx_model.Program, num_runs: int, seed: int) -> Iterable[str]:
    """The test in the notation of litmus.cc."""
    places = sorted({event.place for event in program.events if event.kind in "RW"})
    for thread, (cta, gpu) in enumerate(program.blocks):
        yield f"thread {cta} {gpu}"
        for event in program.events:
            if event.thread != thread:
                continue
            what = f"{event.order} {event.scope or 'sys'}"
            if event.kind == "R":
                yield f"ld {what} {event.operand[1:]} {places.index(event.place)}"
            elif event.kind == "W":
                yield f"st {what} {places.index(event.place)} {event.operand}"
            elif event.kind == "F":
                yield f"fence {what}"
            else:
                yield f"bar {event.place}"
    yield f"run {num_runs} {seed}"


def run(
    runner: str, programs: list[ptx_model.Program], num_runs: int, seed: int
) -> list[dict[Outcome, int]]:
    """How often each outcome of each program was seen."""
    text = "\n".join(line for each in programs for line in lines_of(each, num_runs, seed))
    done = subprocess.run(
        [runner], input=text + "\n", capture_output=True, text=True, check=True, timeout=600
    )
    results = []
    for line in done.stdout.splitlines():
        seen: dict[Outcome, int] = {}
        for outcome in filter(None, line.split(";")):
            registers, _, count = outcome.rpartition(" = ")
            pairs = re.findall(r"(P\d+:r\d+)=(\d+)", registers)
            seen[frozenset((name, int(value)) for name, value in pairs)] = int(count)
        results.append(seen)
    return results


def allowed(program: ptx_model.Program) -> set[Outcome]:
    return {frozenset(registers.items()) for registers in ptx_model.Model(program).outcomes()}


def random_program(generator: random.Random) -> ptx_model.Program:
    places = generator.choice(
        [[(0, 0), (0, 0)], [(0, 0), (1, 0)], [(0, 0), (1, 1)], [(0, 0), (0, 0), (1, 1)],
         [(0, 0), (1, 0), (2, 1)], [(0, 0), (1, 1), (2, 2)]]
    )  # fmt: skip
    events = [
        ptx_model.Event(i, ptx_model.INIT, "W", place, operand="0") for i, place in enumerate("xy")
    ]
    value = 0
    for thread in range(len(places)):
        num = generator.randint(2, 3 if len(places) == 2 else 2)
        cells = []
        for i in range(num):
            place = generator.choice("xy")
            scope = generator.choice(["cta", "gpu", "sys", "sys"])
            kind = generator.random()
            if kind < 0.45:
                order = generator.choice(["weak", "relaxed", "acquire"])
                cells.append(("R", place, order, scope, f"r{i}"))
            elif kind < 0.9:
                value += 1
                order = generator.choice(["weak", "relaxed", "release"])
                cells.append(("W", place, order, scope, str(value)))
            else:
                cells.append(("F", "", "acq_rel", scope, ""))
        if len(places) > 1 and places[0] == places[1] and thread < 2:
            cells.insert(generator.randint(0, num), ("B", "7", "weak", "", ""))
        for kind_, place, order, scope, operand in cells:
            used = "" if order == "weak" else scope
            events.append(ptx_model.Event(len(events), thread, kind_, place, order, used, operand))
    return ptx_model.Program(tuple(events), tuple(places), False, ())


def check_files(runner: str, num_runs: int, seed: int) -> list[str]:
    wrong = []
    for name, changes in WEAKENED.items():
        texts = [("", "", read(name))]
        texts += [(old, new, weaker(name, old, new)) for old, new in changes]
        programs = [ptx_model.parse(text) for *_, text in texts]
        for (old, new, _), program, seen in zip(
            texts, programs, run(runner, programs, num_runs, seed), strict=True
        ):
            bad = frozenset(program.outcome)
            count = sum(num for outcome, num in seen.items() if bad <= outcome)
            change = f"{name}, {new or 'nothing'!r} for {old!r}" if old else name
            print(f"{change}: {count} of {num_runs}, {len(seen)} outcomes")
            if extra := set(seen) - allowed(program):
                wrong.append(f"{change}: forbidden, but seen: {sorted(map(sorted, extra))[:3]}")
            if not old:
                continue
            is_modelled = not any(
                new.startswith(each) if each else not new
                for each in NEEDS_LATER_STORES.get(name, ())
            )
            if is_modelled and count == 0:
                wrong.append(f"{change}: the outcome was not seen")
    return wrong


def check_textbook(runner: str, num_runs: int, seed: int) -> list[str]:
    wrong = []
    for name in TEXTBOOK:
        program = ptx_model.parse(textbook_program(name))
        wanted = frozenset(program.outcome)
        (seen,) = run(runner, [program], num_runs, seed)
        count = sum(num for outcome, num in seen.items() if wanted <= outcome)
        print(f"{name}: {count} of {num_runs}")
        if count == 0:
            wrong.append(f"{name}: not seen")
        if set(seen) - allowed(program):
            wrong.append(f"{name}: a forbidden outcome was seen")
    return wrong


def check_random(runner: str, num: int, num_runs: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    programs = [random_program(generator) for _ in range(num)]
    wrong, num_seen, num_allowed = [], 0, 0
    for program, seen in zip(programs, run(runner, programs, num_runs, seed), strict=True):
        may_be = allowed(program)
        num_seen += len(seen)
        num_allowed += len(may_be)
        if extra := set(seen) - may_be:
            code = "\n  ".join(lines_of(program, num_runs, seed))
            wrong.append(f"forbidden, but seen: {sorted(map(sorted, extra))[:3]}\n  {code}")
    print(f"{num} random programs: {num_seen} of {num_allowed} allowed outcomes were seen")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runner")
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="says only what is wrong, and a total")
    options = parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()) if options.quiet else contextlib.nullcontext():
        wrong = check_files(options.runner, options.runs, options.seed)
        wrong += check_textbook(options.runner, options.runs, options.seed)
    num_runs = max(options.runs // 5, 1)
    wrong += check_random(options.runner, options.random, num_runs, options.seed)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
