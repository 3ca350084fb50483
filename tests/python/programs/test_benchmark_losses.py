"""`ringcomm bench cross_entropy` in small: its records, and what is drawn of them.

No test here asserts a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cross_entropy
import plot
import pytest
import table
import torch
from report import read_records
from torch import Tensor

from ringcomm import cli
from ringcomm.measure.ranks import EXIT_OK, EXIT_WRONG_RESULTS


def bench(path: Path, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    quick = ["--seconds", "0.02", "--repeats", "0", "--tokens", "40", "--threads", "1"]
    code = cli.run(["bench", "cross_entropy", *quick, "--json", str(path), *argv])
    return code, read_records([path])


def test_ways_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    code, records = bench(path, "--vocabularies", "100,1001")
    assert code == EXIT_OK
    points = [(dtype, size) for dtype in ("float32", "bfloat16") for size in (100, 1001)]
    ways = ("ringcomm", "in place", "torch", "copy")
    found = [(r["dtype"], r["vocab_size"], r["way"]) for r in records]
    assert found == [(*point, way) for point in points for way in ways]
    assert all(r["verified"] and r["extra_bytes"] >= 0 for r in records)

    capsys.readouterr()
    assert table.main(["--kind", "cross_entropy", str(path)]) == EXIT_OK
    text = capsys.readouterr().out
    assert "40 tokens, cpu, 1 thread" in text
    assert "| bfloat16 | 1,001 |" in text
    pytest.importorskip("matplotlib")
    assert plot.main(["--out", str(tmp_path), str(path)]) == EXIT_OK
    drawn = (tmp_path / "cross_entropy.svg").read_text(encoding="utf-8")
    assert all(word in drawn for word in ("float32, 40 tokens", "in place", "MiB"))


def test_a_vocabulary_over_two_ranks(tmp_path: Path) -> None:
    argv = ["--world-size", "2", "--vocabularies", "101", "--dtypes", "float32"]
    code, records = bench(tmp_path / "records.jsonl", *argv)
    assert code == EXIT_OK
    assert [record["way"] for record in records] == ["ringcomm", "one rank"]
    assert all(record["verified"] for record in records)


def test_a_wrong_gradient_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, target) + 1e-2 * logits[0, 3]

    monkeypatch.setitem(cross_entropy.PEERS, "torch", lambda: spoiled)
    argv = ["--vocabularies", "100", "--dtypes", "float32"]
    code, records = bench(tmp_path / "records.jsonl", *argv)
    assert code == EXIT_WRONG_RESULTS
    assert [(r["way"], r["wrong_elems"]) for r in records if not r["verified"]] == [("torch", 1)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--peers", "apex"], "apex"),
        (["--dtypes", "float64"], "float64"),
        (["--vocabularies", "1", "--world-size", "2"], "a class"),
    ],
)
def test_wrong_arguments(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["bench", "cross_entropy", *argv])
    assert said in capsys.readouterr().err
