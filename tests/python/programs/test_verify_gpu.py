"""The tools for a machine with a GPU: their table beside the docs', and what a cut run keeps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import emulated_gpu
import front_door
import gpu_layouts
import pytest
import verify_gpu
from gpu_entries import ENTRIES, Entry

ROOT = Path(__file__).parents[3]
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
            assert 0 < entry.limit_s <= verify_gpu.BUDGET_S


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.command], ids=lambda e: e.name)
def test_commands_are_as_their_programs_have_them(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts parse their options, as if there were a GPU; tests are there."""

    words = verify_gpu.command_of(entry, tmp_path, None, 2, entry.limit_s)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    script, *arguments = words[1:]
    if script == "-m" and arguments[0] == "ringcomm":
        assert arguments[1] == "bench"
        front_door.make_parser(arguments[2]).parse_args(arguments[3:])
    elif script == "-m" or script == "tools/gpu_layouts.py":
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        if script == "tools/gpu_layouts.py":
            options = gpu_layouts.parse(arguments)
            assert len(options.only) * options.limit_s + verify_gpu.END_S <= entry.limit_s
    elif script.startswith("examples/") or script == "tools/gpu_facts.py":
        assert (ROOT / script).exists()
    else:
        module = import_module(Path(script).stem)
        for name in ("count_devices", "find_control"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: 2)
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


def test_the_budget_ends_the_run_and_the_next_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_gpu, "machine", lambda: {"gpus": ["one"]})
    sleep = "-c 'import time; time.sleep(60)'"
    entries = [
        Entry("build", "-c pass", 4),
        Entry("one", "-c pass", 4),
        Entry("none", not_scripted="no reason"),
        Entry("cut", sleep, 6.0),
        Entry("short", "-c pass", 0.1),
    ]

    def run(chosen: list[Entry], budget_s: float) -> tuple[str | None, dict[str, str]]:
        options = options_of(tmp_path, budget_s=budget_s)
        with (tmp_path / "verify.log").open("w", encoding="utf-8") as log:
            summary = verify_gpu.verify(chosen, options, log)
        found = summary["entries"]
        return summary["next"], {
            name: found[name].get("why", found[name]["status"]) for name in found
        }

    late = "the budget is spent"
    next_name, found = run(entries, 5.5)
    assert next_name == "cut"
    assert found == {
        "build": "passed",
        "one": "passed",
        "none": "no reason",
        "cut": "stopped",
        "short": late,
    }
    # One at least is begun.
    assert run(entries, 1.0)[0] == "cut"
    # What has had all of a command does not get another.
    assert run([entries[0], entries[3], entries[4]], 5.5)[0] == "short"
    assert run(entries[:3], 20) == (None, {"build": "passed", "one": "passed", "none": "no reason"})


def test_which_entries_are_chosen() -> None:
    def names(*argv: str) -> list[str]:
        return [entry.name for entry in verify_gpu.chosen_of(verify_gpu.parse([*argv]))]

    everything = [entry.name for entry in ENTRIES]
    assert names() == everything
    begin = everything.index("models")
    assert names("--from", "models") == ["build", *everything[begin:]]
    assert names("--only", "models,faults") == ["faults", "models"]
    for wrong in (["--only", "no_such"], ["--from", "no_such"], ["--from", "a", "--only", "b"]):
        with pytest.raises(SystemExit):
            verify_gpu.parse(wrong)


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


FACTS = ["MPS: 1 (attribute 133)", "8192 of 8192 MiB free", "CUDA 13.0 of the driver"]
IMPORTED = "a process imports another's memory by {}: yes"


@emulated_gpu.needs_emulated_gpu
@pytest.mark.parametrize(
    ("lacks", "status", "says"),
    [
        ("", 0, [*FACTS, IMPORTED.format("file descriptor"), IMPORTED.format("IPC handle")]),
        ("VMM", 1, ["cuMemGetAllocationGranularity: CUDA_ERROR", IMPORTED.format("IPC handle")]),
        ("IPC", 1, ["cuIpcGetMemHandle: CUDA_ERROR", IMPORTED.format("file descriptor")]),
    ],
)
def test_facts_are_told(lacks: str, status: int, says: list[str]) -> None:
    driver, _ = emulated_gpu.build()
    env = {**os.environ, "RINGCOMM_CUDA_DRIVER": str(driver)}
    if lacks:
        env[f"RINGCOMM_EMULATOR_{lacks}"] = "0"
    command = [sys.executable, str(ROOT / "tools" / "gpu_facts.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert all(text in done.stdout for text in says), done.stdout


def test_layouts_that_run_fail_and_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pytest proper, on tests that tell where they were told to be."""
    path = tmp_path / "test_where.py"
    path.write_text(
        "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_before():\n    assert os.environ['GPU_TEST_RANKS'] != '3'\n"
        "def test_where():\n"
        "    ranks, where = (os.environ['GPU_TEST_' + n] for n in ('RANKS', 'LAYOUT'))\n"
        "    assert (ranks, where) != ('4', 'one')\n"
        "    if (ranks, where) == ('3', 'all'):\n        time.sleep(60)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(gpu_layouts, "count_devices", lambda kind: 3)
    monkeypatch.setattr(gpu_layouts, "find_control", lambda: None)
    asked = ["--only", "one-2-mps,one-2,one-4,all", "--limit-s", "8"]
    with (tmp_path / "pytest.ini").open("w", encoding="utf-8") as file:
        file.write("[pytest]\nmarkers = gpu\n")
    status = gpu_layouts.main([*asked, "--", "--rootdir", str(tmp_path), str(path)])
    assert status == 1
    table = capsys.readouterr().out.rpartition("layouts, with 3 GPU(s):")[2]
    found = {line.split()[0]: line for line in table.strip().splitlines()}
    assert "MPS is missing" in found["one-2-mps"]
    assert "passed" in found["one-2"]
    assert "2 passed" in found["one-2"]
    assert "failed" in found["one-4"]
    assert "stopped after 8 s: 1 failed" in found["all"]
    assert "not asked for" in found["one-8-mps"] or "MPS is missing" in found["one-8-mps"]


def test_layouts_that_are_stopped_leave_nothing_running(tmp_path: Path) -> None:
    path, pids = tmp_path / "test_hangs.py", tmp_path / "pids"
    path.write_text(
        "import os, pathlib, subprocess, time, pytest\n@pytest.mark.gpu\ndef test_hangs():\n"
        "    child = subprocess.Popen(['sleep', '300'])\n"
        f"    pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "    time.sleep(300)\n",
        encoding="utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n", encoding="utf-8")
    code = (
        "import signal, sys, gpu_layouts as layouts\nlayouts.count_devices = lambda kind: 1\n"
        "signal.signal(signal.SIGTERM, layouts.exit_on_term)\nsys.exit(layouts.main(sys.argv[1:]))"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            "--only",
            "one-2",
            "--",
            "--rootdir",
            str(tmp_path),
            str(path),
        ],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    for pid in map(int, pids.read_text().split()):
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether it is there, and not as a zombie that nobody waits for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
