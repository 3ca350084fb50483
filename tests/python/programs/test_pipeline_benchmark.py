"""benchmarks/pipeline.py end to end, in small. No test asserts a time."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from report import read_records

from ringcomm.measure.ranks import EXIT_OK

script = import_module("pipeline")


def test_records_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PICTURED", (2, 4))
    monkeypatch.setattr(script, "MIN_STEPS", 2)
    argv = ["--worlds", "2", "--factors", "2", "--unit-ms", "0.2", "--seconds", "0.01"]
    path = tmp_path / "records.jsonl"
    options = ["--repeats", "0", "--json", str(path), "--pictures", str(tmp_path)]
    assert script.main([*argv, *options]) == EXIT_OK
    records = read_records([path])
    assert [r["schedule"] for r in records] == list(script.pipeline.SCHEDULES)
    assert all(r["verified"] and r["num_steps"] >= 2 for r in records)
    # m = 4 over 2 ranks: 1/5; in halves of stages 1/9; ZB-H1 1/13, and in halves 1/25.
    found = [r["predicted_bubble"] for r in records]
    assert found == pytest.approx([1 / 5, 1 / 5, 1 / 9, 1 / 13, 1 / 25], rel=1e-4)
    for record in records:
        assert record["bound_us"] <= record["slept_bound_us"]  # a sleep is never early
        assert 0 < record["bubble"]["p50_share"] < 1
        assert (tmp_path / f"pipeline-{record['schedule']}.json").stat().st_size > 100


def test_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--worlds", "two"], ["--schedules", "1f1"], ["--unit-ms", "0"]):
        with pytest.raises(SystemExit):
            script.parse(argv)
    assert "--schedules: 1f1" in capsys.readouterr().err
