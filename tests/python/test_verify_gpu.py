"""The tools for a machine with a GPU: their table beside the docs', and what a cut run keeps."""

from __future__ import annotations

import json
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[2] / name) for name in ("tools", "benchmarks")]

import gpu_layouts
import verify_gpu
from gpu_entries import ENTRIES, Entry

from ringcomm.bench import sweep
from ringcomm.cli import make_parser

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "gpu-verification.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][1:]
# Of a command, what says where its results go.
PLACES = re.compile(r" \{nccl\}| --(json|plot) \{out\}\S+")


def test_every_row_has_its_entry_and_the_reverse() -> None:
    assert [row[0] for row in ROWS] == [entry.name for entry in ENTRIES]
    for entry, (_, what, how, _) in zip(ENTRIES, ROWS, strict=True):
        assert what
        if entry.not_scripted:
            assert how == f"not scripted: {entry.not_scripted}"
            assert not entry.command
        else:
            command = PLACES.sub("", entry.command)
            assert how == f"`{'' if command.startswith('make ') else 'python '}{command}`"
            assert 0 < entry.limit_s <= 900


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.command], ids=lambda e: e.name)
def test_commands_are_as_their_programs_have_them(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts parse their options, as if there were a GPU; tests are there."""

    words = verify_gpu.command_of(entry, tmp_path, None, 2)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    script, *arguments = words[1:]
    if script == "-m" and arguments[0] == "ringcomm":
        make_parser().parse_args(arguments[1:])
    elif script == "-m" or script == "tools/gpu_layouts.py":
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        if script == "tools/gpu_layouts.py":
            gpu_layouts.parse(arguments)
    elif script.startswith("examples/"):
        assert (ROOT / script).exists()
    else:
        module = import_module(Path(script).stem)
        for holder in (module, sweep):
            for name in ("count_devices", "find_control"):
                if hasattr(holder, name):
                    monkeypatch.setattr(holder, name, lambda *_: 2)
        if "llama" in script:
            pytest.importorskip("transformers")
        module.parse(arguments)


def options_of(out: Path, **more: Any) -> Any:
    options = verify_gpu.parse(["--out", str(out)])
    for name, value in more.items():
        setattr(options, name, value)
    return options


def test_a_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_gpu, "machine", lambda: {"gpus": ["one"]})
    monkeypatch.setattr(verify_gpu, "MIN_S", 0.0)
    entries = [
        Entry("good", "-c 'print(1234)'"),
        Entry("bad", "-c 'raise SystemExit(3)'"),
        Entry("hangs", "-c 'import time; time.sleep(60)'", 1.0),
        Entry("two", "-c pass", needs=("gpus",)),
        Entry("module", "-c pass", needs=("no_such_module",)),
        Entry("none", not_scripted="no reason"),
    ]
    with (tmp_path / "verify.log").open("w", encoding="utf-8") as log:
        begin = time.monotonic()
        summary = verify_gpu.verify(entries, options_of(tmp_path), log)
        assert time.monotonic() - begin < 45
    statuses = {name: found["status"] for name, found in summary["entries"].items()}
    assert statuses == {
        "good": "passed",
        "bad": "failed",
        "hangs": "stopped",
        "two": "not run",
        "module": "not run",
        "none": "not scripted",
    }
    assert summary["entries"]["good"]["tail"] == "1234"
    assert summary["entries"]["bad"]["code"] == 3
    assert "no_such_module is not installed" in summary["entries"]["module"]["why"]
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary
    assert "1234" in (tmp_path / "verify.log").read_text(encoding="utf-8")


def test_the_budget_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_gpu, "machine", lambda: {"gpus": ["one"]})
    with (tmp_path / "verify.log").open("w", encoding="utf-8") as log:
        summary = verify_gpu.verify([Entry("x", "-c pass")], options_of(tmp_path, budget_s=1), log)
    assert summary["entries"]["x"] == {"status": "not run", "why": "the budget is spent"}


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_gpu, "machine", lambda: {"gpus": []})
    monkeypatch.setattr(gpu_layouts, "count_devices", lambda kind: 0)
    assert verify_gpu.main(["--out", str(tmp_path)]) == 0
    assert "no GPU here: nothing ran" in capsys.readouterr().out
    assert gpu_layouts.main(["--json", str(tmp_path / "layouts.json")]) == 0
    said = capsys.readouterr().out
    assert "no GPU here: nothing ran" in said
    outcomes = json.loads((tmp_path / "layouts.json").read_text(encoding="utf-8"))
    assert {outcome["status"] for outcome in outcomes} == {"not run"}
    assert all(outcome["layout"] in said for outcome in outcomes)


def test_layouts_that_run_fail_and_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pytest proper, on tests that tell where they were told to be."""
    path = tmp_path / "test_where.py"
    path.write_text(
        "import os, time, pytest\npytestmark = pytest.mark.gpu\ndef test_where():\n"
        "    ranks, where = (os.environ['GPU_TEST_' + n] for n in ('RANKS', 'LAYOUT'))\n"
        "    assert (ranks, where) != ('4', 'one')\n"
        "    if (ranks, where) == ('3', 'all'):\n        time.sleep(60)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(gpu_layouts, "count_devices", lambda kind: 3)
    monkeypatch.setattr(gpu_layouts, "find_control", lambda: None)
    asked = ["--only", "one-2-mps,one-2,one-4,all", "--limit-s", "12"]
    with (tmp_path / "pytest.ini").open("w", encoding="utf-8") as file:
        file.write("[pytest]\nmarkers = gpu\n")
    status = gpu_layouts.main([*asked, "--", "--rootdir", str(tmp_path), str(path)])
    assert status == 1
    table = capsys.readouterr().out.rpartition("layouts, with 3 GPU(s):")[2]
    found = {line.split()[0]: line for line in table.strip().splitlines()}
    assert "MPS is missing" in found["one-2-mps"]
    assert "passed" in found["one-2"]
    assert "1 passed" in found["one-2"]
    assert "failed" in found["one-4"]
    assert "stopped after 12 s" in found["all"]
    assert "not asked for" in found["one-8-mps"] or "MPS is missing" in found["one-8-mps"]
