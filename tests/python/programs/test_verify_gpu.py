"""The program for a machine with a GPU: its file fits what it starts. A run: test_gpu_kit.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

import front_door
import placement
import pytest
import verify_gpu
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
