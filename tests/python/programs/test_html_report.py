"""The page of measurements: one file that needs no network, looked at in Chromium where it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import html_report
import pytest
from browsers import PHONE, SCREEN, opened
from html_report import read_records
from report import RESULTS

from ringcomm import cli
from ringcomm.screen import EXIT_OK

FILES = ("2026-11-20-all_reduce-w4.jsonl", "2026-11-21-systems.jsonl")


def records() -> list[dict[str, Any]]:
    return read_records([RESULTS / name for name in FILES])


def data_of(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="records">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_needs_no_other_file(tmp_path: Path) -> None:
    given = records()
    given[0]["environment"] = {"RINGCOMM_X": "</script><b>"}
    path = tmp_path / "folder" / "page.html"
    html_report.write_html(given, path)
    assert data_of(path) == {"records": given, "isPartial": False}
    links = re.findall(r'(?:https?:|src=|href=|@import)[^"\s]*', path.read_text(encoding="utf-8"))
    assert links == ["http://www.w3.org/2000/svg"]  # a name, not an address
    with pytest.raises(ValueError, match="nothing to show"):
        html_report.write_html([{"kind": "floor"}], path)


def test_a_sweep_writes_its_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    quick = ["--sizes", "1024", "--seconds", "0.02", "--repeats", "0", "--html", str(path)]
    assert cli.run(["bench", "all_reduce", *quick]) == EXIT_OK
    data = data_of(path)
    assert [record["backend"] for record in data["records"]] == ["ringcomm", "gloo"]
    assert not data["isPartial"]
    assert f"page: {path}" in capfd.readouterr().out.replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
def test_a_browser_draws_filters_and_hovers(browser: Any, size: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    html_report.write_html(records(), path)
    with opened(browser, path, size) as page:
        points = page.locator("#collective circle.point")
        num_points = points.count()
        assert num_points >= 10
        assert page.locator("#systems g.point").count() >= 10
        points.first.hover()
        assert "p50" in page.locator("#tip").inner_text()
        assert page.locator("#tip").is_visible()
        page.locator("#collective input[name=gloo]").uncheck()
        assert 0 < points.count() < num_points
        for option in page.locator("#collective select[name=operation] option").all_inner_texts():
            page.locator("#collective select[name=operation]").select_option(option)
            assert page.locator("#collective tbody tr").count() > 0
        assert "have verified results" in page.locator("main").inner_text()


@pytest.mark.slow
def test_wrong_and_missing_points_are_marked(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    given = records()
    given[0] |= {"verified": False, "wrong_elems": 7}
    html_report.write_html(given, path, is_partial=True)
    with opened(browser, path) as page:
        marked = " ".join(page.locator(".wrong").all_inner_texts())
        assert f"1 of {len(given)} points have wrong results" in marked
        assert "interrupted" in marked
