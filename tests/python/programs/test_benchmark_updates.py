"""The benchmark of the fused update in small: its records, and that a wrong update is seen.

No test here asserts a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_update
import pytest

from ringcomm.measure.ranks import EXIT_OK, EXIT_WRONG_RESULTS

WAYS = ["fused", "zero1", "ringcomm", "gloo"]


def run(path: Path, optimizer: str) -> tuple[int, list[dict[str, Any]]]:
    """A comparison that takes as little time as one can: its exit code and records."""
    quick = ["--seconds", "0.02", "--sizes", "40006", "--json", str(path)]
    code = fused_update.main([*quick, "--optimizer", optimizer])
    return code, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_all_ways_end_at_the_same_parameters(tmp_path: Path, optimizer: str) -> None:
    code, records = run(tmp_path / "records.jsonl", optimizer)
    assert code == EXIT_OK
    assert [(r["bytes"], r["way"]) for r in records] == [(40_000, way) for way in WAYS]
    for record in records:
        assert (record["kind"], record["optimizer"]) == ("fused_update", optimizer)
        assert record["verified"]
        assert record["p10_us"] <= record["p50_us"] <= record["p99_us"]
        assert (record["ratio"] is None) == (record["way"] == "fused")


def test_a_wrong_update_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fused_update.Way._whole

    def spoiled(self: fused_update.Way) -> Callable[[], None]:
        step = whole(self)

        def spoil() -> None:
            step()
            self.param[7] += 0.5

        return spoil

    monkeypatch.setattr(fused_update.Way, "_zero1", spoiled)
    code, records = run(tmp_path / "records.jsonl", "sgd")
    assert code == EXIT_WRONG_RESULTS
    assert [r["way"] for r in records if not r["verified"]] == ["zero1"]
    assert all(r["wrong_elems"] == 2 for r in records if r["way"] == "zero1")
    assert all(r["ratio"] is None for r in records if r["way"] == "zero1")
