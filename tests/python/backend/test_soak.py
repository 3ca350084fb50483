"""The soak of soak.py: some seconds here, 10 minutes in `.ci/run stress`.

RINGCOMM_SOAK_SECONDS sets how long, RINGCOMM_SOAK_SEED the seed, RINGCOMM_SOAK_GENERATION the first
generation. A failure prints all three.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import slow
from ranks import Pool, server
from sequences import WORLD
from soak import soak
from soak_rank import EVENTS

SECONDS = float(os.environ.get("RINGCOMM_SOAK_SECONDS", "3"))
SEED = int(os.environ.get("RINGCOMM_SOAK_SEED", "0")) or int.from_bytes(os.urandom(4), "big")
FIRST = int(os.environ.get("RINGCOMM_SOAK_GENERATION", "0"))
IS_STRESS = "RINGCOMM_SOAK_SECONDS" in os.environ
# A late rank takes the others 6 seconds.
QUICK = tuple(kind for kind in EVENTS if kind != "late")


def make_pool() -> Pool:
    return Pool(server(), [{}] * WORLD, "soak_rank")


def test_soak(tmp_path: Path) -> None:
    print(f"\nRINGCOMM_SOAK_SEED={SEED}")
    kinds = EVENTS if IS_STRESS else QUICK
    report = soak(make_pool, tmp_path, SEED, SECONDS, first=FIRST, kinds=kinds)
    print(report.text())
    last = FIRST + report.num_generations - 1
    again = f"RINGCOMM_SOAK_SEED={SEED} RINGCOMM_SOAK_GENERATION={last}"
    again += f" RINGCOMM_SOAK_SECONDS={SECONDS:g}" if IS_STRESS else ""
    again += " pytest -s tests/python/backend/test_soak.py"
    assert not report.wrong, "\n".join([*report.wrong[:20], "", f"Run it again: {again}"])
    assert report.num_generations > 0


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("element", ["instead of"]),
        slow(
            "leaks", ["descriptors grew", "threads grew", "C's heap grew", "anonymous bytes grew"]
        ),
    ],
)
def test_faults_are_found(fault: str, found: list[str], tmp_path: Path) -> None:
    """A wrong element, or what is kept in each generation, in one process."""
    report = soak(make_pool, tmp_path, 1, 60.0, kinds=["none"], fault=fault, warm_up=2)
    assert all("seat 1" in text for text in report.wrong)
    for words in found:
        assert any(words in text for text in report.wrong), report.wrong
