"""The program for a machine with a GPU: its table, what a cut run keeps, and its layouts."""

from __future__ import annotations

import os
import subprocess
from importlib import import_module
from pathlib import Path
from subprocess import PIPE
from typing import Any

import front_door
import pytest
import verify_gpu
from verify_gpu import Row

ROOT = Path(__file__).parents[3]


def test_commands_are_as_their_programs_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts parse their options, as if there were a GPU; tests are there."""
    monkeypatch.setenv("OUT", "/tmp")
    monkeypatch.setenv("GPUS", "2")
    for row in verify_gpu.read_rows():
        if not row.command or "&&" in row.command:
            assert row.command or row.how.startswith("not scripted: ")
            continue
        assert 0 < row.limit_s <= verify_gpu.BUDGET_S
        command = os.path.expandvars(row.command).replace("${NCCL:+--nccl-library $NCCL}", "")
        words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {command}"], text=True)
        program, *arguments = words.splitlines()
        if program == "compute-sanitizer":
            program, *arguments = arguments[arguments.index("python") :]
        assert all((ROOT / word).exists() for word in arguments if word.endswith(".py"))
        if program == "make":
            assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        elif arguments[:2] == ["-m", "ringcomm"]:
            assert arguments[2] == "bench"
            front_door.make_parser(arguments[3]).parse_args(arguments[4:])
        elif arguments[0].startswith("benchmarks/"):
            if "llama" in arguments[0]:
                pytest.importorskip("transformers")
            module: Any = import_module(Path(arguments[0]).stem)
            for name in ("count_devices", "find_control"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda *_: 2)
            module.parse(arguments[1:])
        elif arguments[0] == "tools/verify_gpu.py":
            verify_gpu.parse(arguments[1:])


@pytest.mark.slow
def test_a_run_keeps_what_it_has_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_gpu, "gpu_archs", lambda: ["90"])
    page = tmp_path / "page.md"

    def run(rows: list[Row], budget_s: float) -> tuple[list[str], dict[str, str]]:
        page.write_text("".join(f"| {row.name} | what | how | 1 | | not run |\n" for row in rows))
        found, left = verify_gpu.verify(rows, tmp_path, budget_s, page)
        return left, {name: status.removeprefix("not run: ") for name, status in found.items()}

    rows = [
        Row("build", "`echo $GPUS GPU; echo 12''34`", 4, ()),
        Row("bad", "`exit 3`", 4, ()),
        Row("empty", "`exit 5`", 4, ()),  # as pytest without a test
        Row("two", "`true`", 4, ("2 GPUs",)),
        Row("module", "`true`", 4, ("no_such_module",)),
        Row("program", "`env PATH= python -c pass`", 4, ("env",)),
        Row("none", "not scripted: no reason", 0, ()),
        Row("hangs", "`sleep 300 & echo $! > $OUT/pid; wait`", 0.5, ()),
    ]
    assert run(rows, 60) == (
        [],
        {
            "build": "passed",
            "bad": "failed",
            "empty": "not run",
            "two": "one GPU here",
            "module": "no_such_module is not installed",
            "program": "passed",
            "none": "not scripted: no reason",
            "hangs": "stopped",
        },
    )
    look = ["ps", "-o", "stat=", (tmp_path / "pid").read_text()]
    ended = subprocess.run(look, check=False, stdout=PIPE)
    assert ended.stdout[:1] in (b"", b"Z")  # nothing is left running
    written = page.read_text().splitlines()
    assert written[0].startswith("| build | what | how | 1 | | passed, 20")
    assert written[2].endswith("| not run |")
    assert written[3].endswith("| not run |")
    assert "1 GPU\n1234" in (tmp_path / "verify.log").read_text(encoding="utf-8")
    # The budget ends a run. What is stopped before its own limit is left for the next one.
    late = "the budget is spent"
    names = {"one": ("`true`", 4), "cut": ("`sleep 60`", 5), "short": ("`true`", 9)}
    rows = [rows[0], *(Row(name, *what, ()) for name, what in names.items())]
    left, found = run(rows, 4)
    assert left == ["cut", "short"]
    assert found == {"build": "passed", "one": "passed", "cut": "stopped", "short": late}


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_gpu, "gpu_archs", list)
    monkeypatch.setattr(verify_gpu, "count_devices", lambda kind: 0)
    assert verify_gpu.main(["--out", str(tmp_path)]) == 0
    assert verify_gpu.main(["--layout", "every"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in verify_gpu.LAYOUTS)
    assert "passed" not in said
