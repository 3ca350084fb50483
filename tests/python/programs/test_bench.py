"""`ringcomm bench` without an operation: Gloo beside ringcomm in a short run."""

from __future__ import annotations

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
    assert cli.run([*QUICK, "--html", str(path)]) == EXIT_OK
    out, err = capfd.readouterr()
    assert err == ""
    for name in ("1 KiB", "64 KiB"):
        assert re.search(rf"^all_reduce, {name} .*×$", out, re.M)
    assert re.search(rf"^{bench.STEP_TITLE} .*×$", out, re.M)
    said = re.search(r"^With 2 ranks on this machine, ringcomm's all_reduce is .*$", out, re.M)
    assert said is not None
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
