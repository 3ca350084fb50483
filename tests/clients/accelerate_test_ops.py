"""Accelerate's test_ops: gather, broadcast, reduce and padding."""

from __future__ import annotations

from pathlib import Path

from accelerate_scripts import run_script
from support import report

REQUIREMENTS = ("accelerate==1.15.0",)
RANKS = 2
IS_SHORT = False


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    return run_script("test_ops")


if __name__ == "__main__":
    report(main)
