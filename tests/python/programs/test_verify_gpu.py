"""The program for a machine with a GPU: its file fits what it starts; and its kit, whose first part
is run here over the emulator.
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
    env.pop("NCCL", None)
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
TIMEOUT_S = 240.0
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
    "build": ("false", 20),
    "probe": (PROBE, 200),
    "kernel-sweep": (SWEEP, 200),
    "collectives": ("sleep 300 & echo $! > $OUT/pid; wait", 1),
    "cross-entropy-clusters": ("kill -SEGV $$", 20),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the parts use, with checks of their own and a GPU that is none."""
    root = tmp_path / "checkout"
    for name in ("tools", "benchmarks", "ringcomm"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "Makefile", root)
    with (root / FILE).open("w") as file:
        for name, (command, limit_s) in CHECKS.items():
            file.write(f"[[check]]\nname = \"{name}\"\ncommand = '''{command}'''\n")
            file.write(f'limit_s = {limit_s}\nlast_run = "not run"\n')
        for name in QUESTIONS:
            file.write(f'[[question]]\nname = "{name}"\nanswer = "not asked"\n')
    kit = root / "gpu-kit"
    kit.mkdir()
    shutil.copy2(root / "tools" / "gpu_kit_run", kit / "run")
    (kit / "_C.cpython-312-x86_64-linux-gnu.so").write_text("not loaded here")
    for name in ("kernel_sweep", "probe"):
        (kit / name).write_text("")
    (root / "bin").mkdir()
    (root / "bin" / "nvidia-smi").write_text(SMI)
    (root / "bin" / "nvidia-smi").chmod(0o755)
    return root


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
def test_the_first_part_runs_over_the_emulator(checkout: Path) -> None:
    driver = emulated_gpu.build_driver()
    sweep = emulated_gpu.build_program("kernel_sweep")
    old = time.time() - 1e6
    for program in (sweep, sweep.with_name("probe")):
        shutil.copy2(program, checkout / "gpu-kit")
        os.utime(checkout / "gpu-kit" / program.name, (old, old))  # older than any source
    env = {"RINGCOMM_CUDA_DRIVER": str(driver), **emulated_gpu.with_kernels()}
    status, said = run(checkout, "1", **env)
    assert status == 1, said
    assert "kernel-sweep: passed" in said, (checkout / "out/verify.log").read_text()
    assert said.endswith("then: gpu-kit/run 2\n")
    points = (checkout / "out" / "kernel_sweep.jsonl").read_text().splitlines()
    assert {json.loads(point).get("num_wrong", 0) for point in points} == {0}
    assert last_runs(checkout) == {
        **dict.fromkeys(CHECKS, "not run"),
        "probe": "passed",
        "kernel-sweep": "passed",
        "collectives": "stopped",
        "cross-entropy-clusters": "failed",
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


def parts_of_the_kit() -> list[tuple[str, float]]:
    """The checks of each part, and the seconds that it takes at most."""
    text = (ROOT / "tools" / "gpu_kit_run").read_text()
    (usual,) = re.findall(r"(?m)^budget=(\d+)$", text)
    cases = re.findall(r"(?m)^  \d\) checks=(\S+)(?: budget=(\d+))?(?: next=(\d))? ;;$", text)
    assert [following for _, _, following in cases] == ["2", "3", "4", "5", ""]
    return [(checks, float(budget or usual)) for checks, budget, _ in cases]


def test_parts_are_named(checkout: Path) -> None:
    for wrong in ("6", "", "-x"):
        status, said = run(checkout, wrong)
        assert status == 2
        assert "usage: gpu-kit/run 1|2|3|4|5" in said
    parts = parts_of_the_kit()
    checks = {check.name: check for check in verify_gpu.load(verify_gpu.CHECKS)[0]}
    for names, budget_s in parts:
        assert budget_s <= 540
        for name in names.split(","):
            assert "make" not in checks[name].command
