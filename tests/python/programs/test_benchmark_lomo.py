"""benchmarks/lomo.py in small: its records, its table, and an optimizer that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lomo
import pytest
import table
import torch
from report import read_records

from ringcomm.measure.ranks import EXIT_OK

QUICK = ["--size", "tiny", "--rows", "1", "--context", "8", "--seconds", "0.1", "--repeats", "1"]


def run(path: Path, world: int, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = lomo.main([*QUICK, "--world", str(world), "--json", str(path), *more])
    return code, {record["way"]: record for record in read_records([path])}


@pytest.mark.parametrize("world", [1, 2])
def test_records(tmp_path: Path, world: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lomo.jsonl"
    code, records = run(path, world)
    assert code == EXIT_OK
    asked = [way for way in lomo.WAYS if way != lomo.NO_AGREEMENT]
    assert list(records) == [way for way in asked if world > 1 or "overlapped" not in way]
    assert all(record["verified"] for record in records.values())
    whole = records["SGD"]["grad_bytes"]
    assert whole >= 4 * records["SGD"]["num_params"]
    for way in ("Lomo", "Lomo, clip two_pass", "AdaLomo"):
        assert records[way]["grad_bytes"] <= records[way]["largest_weight_bytes"]
    assert records["Lomo"]["grad_bytes"] < records["Lomo, clip deferred"]["grad_bytes"] <= whole
    capsys.readouterr()
    assert table.main(["--kind", "lomo", str(path)]) == EXIT_OK
    assert "| Lomo, clip two_pass |" in capsys.readouterr().out


def test_steps_that_are_not_sgds_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: torch.nn.Module, _: Any) -> torch.optim.Optimizer:
        return lomo.Lomo(model, 2 * lomo.LEARNING_RATE)

    monkeypatch.setitem(lomo.WAYS, "Lomo", lomo.Way(wrong, "SGD"))
    code, records = run(tmp_path / "lomo.jsonl", 1, "--ways", "Lomo;SGD")
    assert code == 3
    assert not records["Lomo"]["verified"]
    assert records["SGD"]["verified"]
    assert records["SGD"]["ratio"] is None
