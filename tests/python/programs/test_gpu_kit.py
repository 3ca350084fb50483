"""The kit for a machine with a GPU: its parts are run here over the emulator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import verify_gpu

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "python" / "device"))

import emulated_gpu  # noqa: E402

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


def start(root: Path, part: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "gpu-kit/run", part],
        cwd=root,
        env={
            **os.environ,
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "OUT": str(root / "out"),
            "RINGCOMM_EMULATOR_BOX": str(root),
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(root: Path, part: str, **env: str) -> tuple[int, str]:
    process = start(root, part, **env)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said


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
