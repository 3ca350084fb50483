"""The program for a machine with a GPU: its file fits what it starts; and its kit, whose rows run
here on an emulated GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

import device_systems
import emulated_gpu
import front_door
import placement
import pytest
import verify_gpu
from rank_programs import run_command
from verify_gpu import Check

ROOT = Path(__file__).parents[3]


# In place of the programs of a check: each adds its words to a file, as a line.
STUBS = """
note() { (IFS=$'\\x1f'; printf '%s\\n' "$*" >>"$CALLS"); }
for name in python nvidia-smi compute-sanitizer ncu build/gpu/probe; do
  eval "$name() { note $name \\"\\$@\\"; }"
done
"""
# Collects the tests of several command lines, and prints a status for each: 5 where none is left.
# Where none is, it tries again as if there were a GPU, for which conftest.py has cases of its own.
COLLECT = """
import contextlib, json, os, sys, pytest, torch
is_available = torch.cuda.is_available

def collect(words):
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        return int(pytest.main([*words, "--collect-only", "-p", "no:cacheprovider"]))

found = []
for words in json.loads(sys.argv[1]):
    torch.cuda.is_available = is_available
    found.append(collect(words))
    if found[-1] == 5:
        torch.cuda.is_available = lambda: True
        found[-1] = collect(words)
print(json.dumps(found))
"""


def calls_of(check: Check, folder: Path) -> list[list[str]]:
    """The programs and their words that a check's command starts, each part of it."""
    calls = folder / "calls"
    calls.write_text("")
    env = {**os.environ, "OUT": str(folder), "GPUS": "2", "CALLS": str(calls)}
    env |= {"DEVICE": "cuda", "LIMIT_S": "9"}
    env.pop("NCCL", None)
    env.pop("SMALL", None)
    command = ["bash", "-c", f"{STUBS}\n{check.command}"]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=60)
    found = [line.split("\x1f") for line in calls.read_text().splitlines()]
    for number, (program, *words) in enumerate(found):
        if program in ("compute-sanitizer", "ncu"):
            assert program in check.needs
            found[number] = words[words.index("python") :]
    return found


def test_commands_fit_their_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part of a check; scripts parse options as if there were a GPU; files are there."""
    for check in verify_gpu.load(verify_gpu.CHECKS)[0]:
        assert bool(check.command) != bool(check.not_scripted)
        assert not re.search(r"\bmake\b", check.command)  # not on every machine with a GPU
        if not check.command:
            continue
        assert 0 < check.limit_s <= verify_gpu.BUDGET_S
        calls = calls_of(check, tmp_path)
        assert calls
        for program, *arguments in calls:
            for word in (program, *arguments):
                assert not word.endswith(".py") or (ROOT / word).exists()
                assert not word.startswith("build/") or word in check.needs
            if program != "python":
                continue
            if arguments[0] == "-m":
                assert find_spec(arguments[1])
            if arguments[:2] == ["-m", "ringcomm"]:
                assert arguments[2] == "bench"
                front_door.make_parser(arguments[3]).parse_args(arguments[4:])
            elif arguments[0].startswith("benchmarks/"):
                if "llama" in arguments[0]:
                    pytest.importorskip("transformers")
                module: Any = import_module(Path(arguments[0]).stem)
                if hasattr(module, "PROGRAM"):  # not of mps.py, whose words are a command
                    for name in ("count_devices", "find_control"):
                        monkeypatch.setattr(placement, name, lambda *_: 2)
                    module.PROGRAM.parse(arguments[1:])
            elif arguments[0] == "tools/verify_gpu.py":
                verify_gpu.parse(arguments[1:])


def test_aims_are_of_checks_that_write_such_records() -> None:
    checks, aims = verify_gpu.load(verify_gpu.CHECKS)
    commands = {check.name: check.command for check in checks}
    assert aims
    for aim in aims:
        assert verify_gpu.number_of(verify_gpu.condition_of(f"figure {aim.limit}")[2]) is not None
        for name in aim.checks:
            assert ".jsonl" in commands[name], name
            for key, _, value in map(verify_gpu.condition_of, aim.records.split(", ")):
                if key == "op":  # that the check measures
                    assert value in commands[name] or name.startswith("kernel-sweep"), name


@pytest.mark.slow
def test_checks_select_tests(tmp_path: Path) -> None:
    """Each command line of pytest, those in a layout with its -m, leaves a test."""
    lines = {}
    for check in verify_gpu.load(verify_gpu.CHECKS)[0]:
        for _, *words in calls_of(check, tmp_path) if check.command else ():
            if words[:2] == ["-m", "pytest"]:
                lines[check.name] = [*words[2:], *(["-n0"] if "-n" in words else [])]
            elif words[:1] == ["tools/verify_gpu.py"] and "--" in words:
                lines[check.name] = ["-m", "gpu", *words[words.index("--") + 1 :]]
    command = [sys.executable, "-c", COLLECT, json.dumps(list(lines.values()))]
    done = subprocess.run(command, cwd=ROOT, stdout=PIPE, text=True, check=True, timeout=600)
    found = dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert {name: status for name, status in found.items() if status != 0} == {}


# ---- the kit

FILE = "benchmarks/gpu/checks.toml"
TIMEOUT_S = 900.0
SMI = """#!/bin/sh
case "$*" in
*compute_cap) echo 9.0 ;;
*memory.free) echo "0, 590.48, Default, Disabled, 140000" ;;
*) exit 6 ;;
esac
"""
QUESTIONS = ("open-twice", "freed-while-open")
PROBE = f"for name in {' '.join(QUESTIONS)}; do build/gpu/probe --only $name --limit-s 30; done"
PROBE += " > $OUT/probe.jsonl"
SWEEP = "build/gpu/kernel_sweep --ranks 2 --rounds 1 --sizes 1024 > $OUT/kernel_sweep.jsonl"
CHECKS = {
    "probe": (PROBE, 200),
    "kernel-sweep": (SWEEP, 200),
    "stops": ("sleep 300 & echo $! > $OUT/pid; wait", 1),
    "fails": ("kill -SEGV $$", 20),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the rows use, and a GPU that is none, with an MPS that is none."""
    root = tmp_path / "checkout"
    for name in ("tools", "benchmarks", "ringcomm", "_ringcomm", "kernels", "examples", "csrc"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests/python", root / "tests/python")
    kit = root / "gpu-kit"
    kit.mkdir()
    shutil.copy2(root / "tools" / "gpu_kit_run", kit / "run")
    (kit / "_C.cpython-312-x86_64-linux-gnu.so").write_text("not loaded here")
    for name in ("kernel_sweep", "probe"):
        (kit / name).write_text("")
    (root / "bin").mkdir()
    for name, text in (("nvidia-smi", SMI), ("nvidia-cuda-mps-control", "#!/bin/sh\nexit 0\n")):
        (root / "bin" / name).write_text(text)
        (root / "bin" / name).chmod(0o755)
    return root


def take_programs(root: Path) -> dict[str, str]:
    """Into the kit; and the environment in which they find the emulated GPU."""
    old = time.time() - 1e6
    for program in map(emulated_gpu.build_program, ("kernel_sweep", "probe")):
        shutil.copy2(program, root / "gpu-kit")
        os.utime(root / "gpu-kit" / program.name, (old, old))  # older than any source
    driver = str(emulated_gpu.build_driver())
    return {"RINGCOMM_CUDA_DRIVER": driver, **emulated_gpu.with_kernels()}


def run(root: Path, part: str, **env: str) -> tuple[int, str]:
    own = {"PATH": f"{root / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    own |= {"OUT": str(root / "out"), "RINGCOMM_EMULATOR_BOX": str(root), **env}
    options: dict[str, Any] = {"cwd": root, "stderr": subprocess.STDOUT, "start_new_session": True}
    done = run_command("bash", "gpu-kit/run", part, env=own, timeout_s=TIMEOUT_S, **options)
    return done.returncode, done.stdout


def last_runs(root: Path) -> dict[str, str]:
    """Of the checks, without dates."""
    checks = verify_gpu.tables_of(root / FILE)["check"]
    return {table["name"]: re.sub(r", 20\d\d-\d\d-\d\d", "", table["last_run"]) for table in checks}


def answers_of(root: Path) -> dict[str, str]:
    """The driver's answers in the file."""
    return {
        table["name"]: table["answer"] for table in verify_gpu.tables_of(root / FILE)["question"]
    }


def take_elsewhere(root: Path) -> int:
    """Takes the results into a file without any, as that of another checkout."""
    path = root / FILE
    path.write_text(re.sub(r"(?m)^(last_run|answer) = .*$", r'\1 = "not run"', path.read_text()))
    take = [sys.executable, str(root / "tools" / "verify_gpu.py"), "--take", str(root / "out")]
    return subprocess.call(take, timeout=TIMEOUT_S, cwd=root)


@pytest.mark.slow
@emulated_gpu.needs_emulated_gpu
def test_results_of_checks_that_pass_stop_or_fail(checkout: Path) -> None:
    with (checkout / FILE).open("w") as file:
        for row, (name, (command, limit_s)) in enumerate(CHECKS.items(), 1):
            file.write(f"[[check]]\nname = \"{name}\"\nrow = {row}\ncommand = '''{command}'''\n")
            file.write(f'limit_s = {limit_s}\nlast_run = "not run"\n')
        for name in QUESTIONS:
            file.write(f'[[question]]\nname = "{name}"\nanswer = "not asked"\n')
    status, said = run(checkout, "1,2,3,4", **take_programs(checkout))
    assert status == 1, said
    assert "kernel-sweep: passed" in said, (checkout / "out/verify.log").read_text()
    points = (checkout / "out" / "kernel_sweep.jsonl").read_text().splitlines()
    assert {json.loads(point).get("num_wrong", 0) for point in points} == {0}
    assert last_runs(checkout) == {
        "probe": "passed",
        "kernel-sweep": "passed",
        "stops": "stopped",
        "fails": "failed",
    }
    look = ["ps", "-o", "stat=", (checkout / "out" / "pid").read_text()]
    ended = subprocess.run(look, check=False, stdout=subprocess.PIPE)
    assert ended.stdout[:1] in (b"", b"Z")  # nothing is left running
    answers = answers_of(checkout)
    assert all(answer.startswith("MPS: ") for answer in answers.values()), answers
    assert take_elsewhere(checkout) == 0  # gets the same answers from the folder
    assert answers_of(checkout) == answers
    log = (checkout / "out" / "verify.log").read_text()
    assert "compiling" not in log
    assert not list((checkout / "build").rglob("*.o"))


@pytest.mark.slow
@emulated_gpu.needs_emulated_gpu
def test_all_rows_run_on_an_emulated_gpu(checkout: Path) -> None:
    """The file's own commands, of small sizes; limits are of a machine that does nothing else."""
    pytest.importorskip("transformers")
    pytest.importorskip("triton")
    path = checkout / FILE
    path.write_text(re.sub(r"(?m)^(limit_s = \d+)$", r"\g<1>0", path.read_text()))
    box = checkout / "box"
    box.mkdir()
    env = {**take_programs(checkout), **emulated_gpu.loaded_at_start(box), "SMALL": "1"}
    env |= {"DEVICE": "emugpu", "RINGCOMM_EMULATOR_SMS": "32", "BUDGET_S": "5600"}
    before = path.read_text()
    status, said = run(checkout, "all", **env)
    checks = [check for check in verify_gpu.load(path)[0] if check.row]
    wanted = {check.name: "passed" for check in checks}
    found = dict(re.findall(r"(?m)^([\w-]+): (.*)$", said))
    log = (checkout / "out" / "verify.log").read_text()
    assert {name: found.get(name) for name in wanted} == wanted, log[-20000:]
    assert status == 0
    assert path.read_text() == before  # small sizes tell nothing of a GPU
    records = verify_gpu.records_in(checkout / "out", {})[0]
    assert all(record.get("verified", True) for record in records)
    assert {record.get("num_wrong", 0) for record in records} == {0}
    systems = [record for record in records if record.get("kind") == "device_systems"]
    assert {record["system"] for record in systems} == {*device_systems.SYSTEMS}
    assert all(record["right"] for record in systems)


def test_rows_fit_ten_minutes_and_the_page() -> None:
    rows: dict[int, list[Check]] = {}
    for check in verify_gpu.load(verify_gpu.CHECKS)[0]:
        if check.row:
            rows.setdefault(check.row, []).append(check)
    assert list(rows) == [*range(1, 12)]
    limits = {row: sum(check.limit_s for check in checks) for row, checks in rows.items()}
    assert sum(limits.values()) <= 570
    page = (ROOT / "docs" / "gpu-verification.md").read_text(encoding="utf-8")
    text = page.partition("seconds are ")[2].partition(".\n")[0]
    told = re.findall(r"(?s)(\d+) (`.*?`) (\d+)(?:,|$)", text)
    assert [(int(row), float(limit_s)) for row, _, limit_s in told] == [*limits.items()]
    for row, names, _ in told:
        assert re.findall("`([^`]+)`", names) == [check.name for check in rows[int(row)]]


def test_rows_are_named(checkout: Path) -> None:
    for wrong in ("-x", "+1"):
        status, said = run(checkout, wrong)
        assert status == 2
        assert "usage: gpu-kit/run [ROW,... | CHECK,...]" in said
    status, said = run(checkout, "1,12")
    assert status == 2
    assert "unknown rows 12" in said
