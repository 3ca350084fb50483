"""The site's page of results: counts, and each test that fails over one backend only.

tools/site_pages.py makes it of the results that run.py has kept, without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import known
import suites
from outcomes import FAIL, PASS, KeptResults, made_on, read_kept

__all__ = ["render"]

HERE = Path(__file__).parent

INTRODUCTION = """\
# PyTorch's own tests

PyTorch's wheel has tests of torch.distributed (`torch.testing._internal.distributed`).
`python tests/torch/run.py` runs them over ringcomm. These are the results with torch {minor}
({made}).

Each test starts its own ranks under a time limit. No GPU is visible to it. Tests that torch's
decorators skip are not counted. A mode is the backend name under which the tests are imported,
because the decorators check it. All groups are of the backend under test.

Two of torch's checks of the backend's name are patched to accept ringcomm: the list of backends
with profiler events, and `torch.distributed.monitored_barrier`, which accepts Gloo only. The tests
then call `ringcomm.monitored_barrier`.
"""


def render() -> str:
    """The page, from the newest kept results over ringcomm and those over Gloo with that torch."""
    kept = max(HERE.glob("ringcomm-*.txt"), key=lambda path: _version(path.stem))
    minor = kept.stem.rpartition("-")[2]
    ours, gloo = read_kept(kept), read_kept(HERE / f"gloo-{minor}.txt")
    failed = [
        (*key, known.why_failing(*key) or why, gloo.get(key, ("skip",))[0])
        for key, (status, why) in ours.items()
        if status == FAIL
    ]
    only_ours = [
        (*key, gloo[key][1])
        for key, (status, _) in ours.items()
        if status == PASS and gloo.get(key, ("",))[0] == FAIL
    ]
    sections = [
        INTRODUCTION.format(minor=minor, made=made_on(kept)),
        _table(("mode", "tests", "backend", "pass", "fail"), _counts(ours, gloo)),
        "## Fail over ringcomm\n",
        _table(("mode", "test", "why", "over Gloo"), failed) if failed else "None.\n",
        "## Pass over ringcomm, fail over Gloo\n",
        _table(("mode", "test", "Gloo's error"), only_ours) if only_ours else "None.\n",
    ]
    return "\n".join(sections)


def _version(stem: str) -> list[int]:
    return [int(part) for part in stem.rpartition("-")[2].split(".")]


def _counts(ours: KeptResults, gloo: KeptResults) -> Iterable[tuple[object, ...]]:
    for mode in suites.MODES.values():
        for backend, results in (("ringcomm", ours), ("gloo", gloo)):
            of_mode = [status for key, (status, _) in results.items() if key[0] == mode.name]
            counts = Counter(of_mode)
            yield mode.name, mode.about, backend, counts[PASS], counts[FAIL]


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
