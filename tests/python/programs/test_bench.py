"""`ringcomm bench` without an operation: Gloo beside ringcomm in a short run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringcomm import cli
from ringcomm.measure import bench
from ringcomm.screen import EXIT_OK, EXIT_WRONG_RESULTS

QUICK = ["bench", "--world-size", "2", "--seconds", "0"]


def test_a_table_a_sentence_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SIZES": (1 << 10, 64 << 10), "WIDTH": 32, "TOKENS": 8}.items():
        monkeypatch.setattr(bench, name, value)
    path = tmp_path / "folder" / "bench.html"
    figures = tmp_path / "bench.json"
    assert cli.run([*QUICK, "--html", str(path), "--json", str(figures)]) == EXIT_OK
    out, err = capfd.readouterr()
    assert re.search(r"^1 of 3: all_reduce, 1 KiB$", err, re.M)
    for name in ("1 KiB", "64 KiB"):
        assert re.search(rf"^all_reduce, {name} .*× \(.*–.*\)$", out, re.M)
    assert re.search(rf"^{bench.STEP_TITLE} .*× \(.*–.*\)$", out, re.M)
    said = re.search(r"^With 2 ranks on this machine, ringcomm's all_reduce is .*$", out, re.M)
    assert said is not None
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert [row["num_bytes"] for row in rows] == [1 << 10, 64 << 10, 0]
    page = path.read_text(encoding="utf-8")
    assert f"<h1>{said[0].replace(chr(39), '&#x27;')}</h1>" in page
    assert page.count('class="row"') == 2 * (len(bench.SIZES) + 1)
    assert not re.search(r"https?:|src=|href=|@import", page)  # it needs no other file


def test_a_wrong_sum_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    all_reduce = bench.dist.all_reduce

    def spoil(tensor: Any, **options: Any) -> None:
        all_reduce(tensor, **options)
        tensor[7] += 1

    monkeypatch.setattr(bench.dist, "all_reduce", spoil)
    assert cli.run(QUICK) == EXIT_WRONG_RESULTS
    assert "2 wrong elements in all_reduce of 1024 B by ringcomm" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--world-size 1", "--world-size must be 2 to 64, got 1"),
        ("--seconds -1", "--seconds must not be negative"),
        ("--html /proc/no.html", "--html: /proc/no.html cannot be written"),
    ],
)
def test_bad_options(line: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["bench", *line.split()])
    assert ended.value.code == 2
    assert said in capfd.readouterr().err


def row(num_bytes: int, low: float, high: float, others: float = 0.0) -> bench.Row:
    times = {name: {"p50_us": 10.0, "p99_us": 20.0} for name in ("ringcomm", "gloo")}
    ratio = {"p10": low, "p50": (low + high) / 2, "p90": high}
    return bench.Row("a title", num_bytes, times, ratio, others)


def test_what_cannot_be_told_apart_is_said_so() -> None:
    even, faster = row(0, 0.9, 1.2), row(0, 1.1, 1.3)
    assert "within what can be measured (1.05× (0.90–1.20))" in bench.sentence(
        [row(1, 2, 3), even], 2
    )
    assert "1.20× as fast." in bench.sentence([row(1, 2, 3), faster], 2)


def test_the_page_has_the_terminals_caveat() -> None:
    rows = [row(1, 2, 3, others=40.0), row(0, 1.1, 1.2)]
    said = bench.caveat(rows)
    assert said.startswith("Other programs used up to 40 %")
    assert said in bench.page(rows, 2, {"cores": 2, "cpu": "x"})
    assert bench.caveat([row(1, 2, 3)]) == ""
