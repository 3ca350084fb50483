"""The page of results: counts, what fails and why, what is skipped and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import known
import suites
from outcomes import FAIL, PASS, SKIP, GlooResults, Outcome, cause

__all__ = ["render"]

INTRODUCTION = """\
# PyTorch's own tests on ringcomm

Written by `make test-torch ARGS="--write docs/torch-tests.md"`, with torch {version}.

The tests ship in torch's wheel (`torch.testing._internal.distributed`). They are imported, not
copied; each runs with ranks of its own, under a limit in time. A mode says under which backend's
name they are imported, since their decorators ask for it; the groups are ringcomm's all the same.
GPUs are hidden. Gloo's results are kept in `tests/torch/gloo-*.txt`.

Two things are told to know ringcomm, because they ask for a backend by name: the lists of backends
whose profiler events are looked at, and `torch.distributed.monitored_barrier`, which refuses every
backend but Gloo (the tests reach what stands behind that check).
"""
SKIPPED = """\
By torch's own decorators, hence on Gloo as well. Behind a mode stands the number of its tests.
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
        INTRODUCTION.format(version=".".join(torch_version.split(".")[:2])),
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
