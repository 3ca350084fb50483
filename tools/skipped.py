"""Prints the tests that the jobs of .ci/run have skipped, each time, and why: `.ci/run --skipped`.

    python tools/skipped.py FOLDER

The folder has the results of jobs, as pytest's XML. Tests of a GPU are not among them: they run
where there is one. Nor are those of `user`, an account that may not write there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def always_skipped(folder: Path) -> dict[str, str]:
    """The reasons by test, in order. Raises FileNotFoundError if no job has left results."""
    reasons: dict[str, str] = {}
    ran = set()
    paths = [*folder.rglob("*.xml")]
    if not paths:
        raise FileNotFoundError(f"no job has left results of Python tests in {folder}")
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            skipped = case.find("skipped")
            if skipped is None:
                ran.add(name)
            else:
                reasons[name] = skipped.get("message", "")
    return {name: reasons[name] for name in sorted(reasons.keys() - ran)}


def main() -> int:
    """Status 1 if there are some, 2 if there are no results."""
    try:
        skipped = always_skipped(Path(sys.argv[1]))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    found = {name: why for name, why in skipped.items() if "CUDA" not in why}
    for name, why in found.items():
        print(f"{name}: {why}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
