"""The page of results: counts, what fails and why, what is skipped and why."""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import known
import suites
from outcomes import FAIL, PASS, SKIP, GlooResults, Outcome, cause

__all__ = ["render"]

HERE = Path(__file__).parent

INTRODUCTION = """\
# PyTorch's own tests on ringcomm

Written by `make test-torch ARGS="--write docs/torch-tests.md"`, with torch {version}, {date},
commit {commit}.

The tests are part of torch's wheel (`torch.testing._internal.distributed`). They are imported, not
copied. Each runs with its own ranks, under a time limit. A mode is the backend name under which
they are imported, because their decorators check it; all groups are ringcomm's.
GPUs are hidden. Gloo's results are kept in `tests/torch/gloo-*.txt`.

Two checks of the backend's name are patched to accept ringcomm: the lists of backends
with profiler events, and `torch.distributed.monitored_barrier`, which refuses every
backend but Gloo (the tests then run ringcomm's barrier).
"""
SKIPPED = """\
torch's own decorators skip these, also on Gloo. The number of tests follows each mode.
"""


def render(outcomes: list[Outcome], gloo: GlooResults, torch_version: str) -> str:
    """The page, from a whole run on ringcomm and Gloo's kept results."""
    failed = [
        (*outcome.key, _failure(outcome), gloo.get(outcome.key, (SKIP, ""))[0])
        for outcome in outcomes
        if outcome.status == FAIL
    ]
    only_ours = [
        (*outcome.key, gloo[outcome.key][1])
        for outcome in outcomes
        if outcome.status == PASS and gloo.get(outcome.key, ("", ""))[0] == FAIL
    ]
    sections = [
        INTRODUCTION.format(
            version=".".join(torch_version.split(".")[:2]), date=date.today(), commit=_commit()
        ),
        _table(
            ("mode", "what", "tests", "backend", "pass", "skip", "fail"), _counts(outcomes, gloo)
        ),
        "## Fail on ringcomm\n",
        _table(("mode", "test", "why", "on Gloo"), failed) if failed else "None.\n",
        "## Pass on ringcomm, fail on Gloo\n",
        _table(("mode", "test", "Gloo says"), only_ours) if only_ours else "None.\n",
        "## Skipped\n",
        SKIPPED,
        _table(("reason", "modes", "tests"), _skips(outcomes)),
    ]
    return "\n".join(sections)


def _commit() -> str:
    command = ["git", "describe", "--always", "--exclude=*", "--dirty= + changes"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _failure(outcome: Outcome) -> str:
    return known.why_failing(*outcome.key) or cause(outcome.text)


def _counts(outcomes: list[Outcome], gloo: GlooResults) -> Iterable[tuple[object, ...]]:
    for mode in suites.MODES.values():
        ours = Counter(outcome.status for outcome in outcomes if outcome.mode == mode.name)
        theirs = Counter(status for (name, _), (status, _) in gloo.items() if name == mode.name)
        total = ours.total()
        theirs[SKIP] = total - theirs[PASS] - theirs[FAIL]
        for backend, counts in (("ringcomm", ours), ("gloo", theirs)):
            yield mode.name, mode.about, total, backend, counts[PASS], counts[SKIP], counts[FAIL]


def _skips(outcomes: list[Outcome]) -> Iterable[tuple[str, str, str]]:
    modes: dict[str, Counter[str]] = defaultdict(Counter)
    tests: dict[str, dict[str, None]] = defaultdict(dict)
    for outcome in outcomes:
        if outcome.status == SKIP:
            modes[outcome.text][outcome.mode] += 1
            tests[outcome.text][outcome.test] = None
    for reason, counts in sorted(modes.items(), key=lambda item: -item[1].total()):
        numbers = ", ".join(f"{mode} {count}" for mode, count in counts.items())
        yield reason, numbers, ", ".join(f"`{test}`" for test in sorted(tests[reason]))


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
