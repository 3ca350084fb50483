"""README is short and has the figures of the tables; all environment variables are listed."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from ranks import run_ranks

from ringcomm import Options
from ringcomm.options import known_variables, unknown_variables

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
READS = re.compile(r'(?:environ(?:\.get\(|\.pop\(|\[)|getenv\()\s*"(RINGCOMM_\w+)"')
VARIABLES = ROOT / "docs" / "reference" / "environment.md"


def test_it_is_short_and_its_links_exist() -> None:
    assert len(README.splitlines()) <= 200
    assert len(re.sub(r"```.*?```", "", README, flags=re.S).split()) <= 1400  # two to four minutes
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


def test_its_numbers_are_those_of_the_tables() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    sections = {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-"): text
        for title, text in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", page, re.M | re.S)
    }
    rows = re.findall(r"^\| \[.*?\]\(docs/benchmarks\.md#([a-z-]+)\).*? \| (.*) \|$", README, re.M)
    assert len(rows) == 7
    for section, cells in rows:
        figures = re.findall(r"\d[\d,.]*", cells)
        assert figures
        known = set(re.findall(r"\d[\d,.]*", sections[section]))
        assert set(figures) <= known, section
    two_ranks = sections["collectives"].split("\n4 ranks")[0]
    ratios = [float(r) for r in re.findall(r"^\| `all_reduce` .*?([\d.]+)× ", two_ranks, re.M)]
    told = re.findall(r"all_reduce is (\d+)× to (\d+)× as fast as Gloo", README)
    assert told == [(f"{min(ratios):.0f}", f"{max(ratios):.0f}")]


def run_all_blocks(rank: int) -> None:
    blocks = re.findall(r'^```python(?: title="[^"]*")?\n(.*?)^```', README, re.M | re.S)
    assert len(blocks) == 3
    script = "\n".join(blocks).replace('dist.init_process_group("ringcomm")', "")
    exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})


def test_its_python_blocks_are_one_script_in_their_order() -> None:
    run_ranks(2, run_all_blocks)


def test_its_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)", README, re.M)
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:.*##", makefile, re.M)


def test_the_page_lists_the_environment_variables_that_are_read() -> None:
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", VARIABLES.read_text(encoding="utf-8"), re.M))
    read: set[str] = set()
    read_by_build: set[str] = set()
    for folder in ("csrc", "ringcomm"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cc", ".h"):
                text = path.read_text(encoding="utf-8")
                read |= set(re.findall(r'getenv\("(RINGCOMM_\w+)"', text))
    for path in (*(ROOT / "ringcomm").rglob("*.py"), ROOT / "_ringcomm_autoload.py"):
        read |= set(READS.findall(path.read_text(encoding="utf-8")))
    read |= {f"RINGCOMM_{field.name.upper()}" for field in fields(Options)}
    for path in (ROOT / "setup.py", *(ROOT / "tools").glob("*.py")):
        read_by_build |= set(re.findall(r'"(RINGCOMM_\w+)"', path.read_text(encoding="utf-8")))
    assert read
    assert read_by_build
    assert listed == read | read_by_build == known_variables()


def test_groups_give_no_warning_of_variables_that_tests_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor of known ones."""
    paths = [p for top in ("tests", "benchmarks", "tools") for p in (ROOT / top).rglob("*")]
    texts = [p.read_text(encoding="utf-8") for p in paths if p.suffix in (".py", ".cc", ".h")]
    read = {name for text in texts for name in READS.findall(text)}
    assert read - known_variables()
    for name in read | known_variables():
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == {}
    monkeypatch.setenv("RINGCOMM_ALGO", "ring")
    assert unknown_variables() == {"RINGCOMM_ALGO": "RINGCOMM_ALGORITHM"}
