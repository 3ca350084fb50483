"""A browser for tests of pages: Chromium, where it and playwright are installed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PHONE, SCREEN = {"width": 360, "height": 740}, {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


def data_of(path: Path, name: str = "data") -> dict[str, Any]:
    """What a page has in its element of JSON `name`."""
    text = path.read_text(encoding="utf-8")
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def assert_alone(text: str) -> None:
    """A page needs no other file: what it names besides is no address."""
    links = re.findall(r'(?:https?:|src=|href=|@import)[^"\s]*', text)
    assert {*links} <= {"http://www.w3.org/2000/svg"}


@contextmanager
def opened(browser: Any, path: Path, size: dict[str, int] | None = None) -> Iterator[Any]:
    """A page of a file; at the end it has had no error and is not wider than the screen."""
    size = size or SCREEN
    page = browser.new_page(viewport=size)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert errors == []
    page.close()
