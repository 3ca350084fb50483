"""benchmarks/floor.py end to end in small: its records. No test here asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import floor
import pytest

from ringcomm.measure.ranks import EXIT_OK


def test_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "floor.jsonl"
    argv = ["--worlds", "2", "--sizes", "1024,400000", "--seconds", "0.02", "--json", str(path)]
    assert floor.main(argv) == EXIT_OK
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(r["bytes"], r["variant"], r["algorithm"]) for r in records]
    assert found == [
        (1024, "floor", None),
        (1024, "staged", "one_shot"),
        (1024, "shared", "one_shot"),  # too small to be worth it
        (400000, "floor", None),
        (400000, "staged", "two_shot"),
        (400000, "shared", "direct"),
    ]
    for record in records:
        assert record["kind"] == "floor"
        assert record["wrong_elems"] == 0
        assert (record["ratio"] is None) == (record["variant"] == "floor")
    assert "share" in capfd.readouterr().out


@pytest.mark.parametrize("argv", [["--worlds", "1"], ["--sizes", "0"], ["--sizes", "x"]])
def test_wrong_options(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        floor.main(argv)
    assert argv[0] in capsys.readouterr().err
