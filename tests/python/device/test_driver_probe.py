"""benchmarks/gpu/probe over the emulator of CUDA's driver: every question is answered, in time."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from subprocess import PIPE
from typing import Any

import buildconfig
import emulated_gpu
import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "benchmarks" / "gpu" / "probe"
TIMEOUT_S = 120.0
QUESTIONS = re.findall(r'(?m)^    \{"([\w-]+)", \w+\},$', (SOURCES / "probe.cc").read_text())

# What the emulator does, and CUDA may not. It has no multiprocessors: its blocks say number 0.
READS_OLD = "reads the old content"
ANSWERS = {
    "open-twice": r"one address, mapped until the second close, which reads the old content",
    "by-descriptor": READS_OLD,
    "file-locks": "exclude other processes until the file is closed",
    "attribute-cost": r"own \d+, opened \d+ ns",
    "multiprocessors": "1 and 1 of 16, 1 in common, at the same time, longest pause 0 us",
    "clusters": "1 blocks: run, 2 blocks: run, 4 blocks: run, 8 blocks: run",
    "own-kernel": r"open does not wait \(\d+ us\), close waits \(\d+ us\)",
    "peer-kernel": r"open does not wait \(\d+ us\), close does not wait \(\d+ us\)",
    "address-again": r"(another address; )?with the old mapping open: "
    "the new content; after its close: the new content",
    "mapped-after-launch": "the kernel reads what is there",
    "freed-while-open": rf"{READS_OLD}; the free gives back 32 MiB of 32, the close 0",
}


def ask(box: Path, *arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
    """The status, and the lines by question."""
    options = emulated_gpu.program("probe", box, *arguments, **settings)
    done = subprocess.run(capture_output=True, timeout=TIMEOUT_S, check=False, **options)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, {line["question"]: line for line in lines}


@emulated_gpu.needs_emulated_gpu
def test_every_question_is_answered(tmp_path: Path) -> None:
    assert set(ANSWERS) == set(QUESTIONS)
    status, found = ask(tmp_path, "--limit-s", "30")
    assert list(found) == QUESTIONS
    assert {
        name: line["answer"]
        for name, line in found.items()
        if not re.fullmatch(ANSWERS[name], line["answer"])
    } == {}
    assert {line["mps"] for line in found.values()} == {True}
    assert status == 0


@emulated_gpu.needs_emulated_gpu
@pytest.mark.parametrize(
    ("question", "settings", "answer"),
    [
        ("multiprocessors", {"MPS": "0"}, "one after the other"),
        ("open-twice", {"IPC": "0"}, "CUDA_ERROR_NOT_SUPPORTED"),
        ("by-descriptor", {"VMM": "0"}, "CUDA_ERROR_NOT_SUPPORTED"),
        ("address-again", {"REFUSES_REUSED": "1"}, "with the old mapping open: CUDA_ERROR_"),
    ],
)
def test_another_driver_has_another_answer(
    tmp_path: Path, question: str, settings: dict[str, str], answer: str
) -> None:
    status, found = ask(tmp_path, "--only", question, "--limit-s", "30", **settings)
    assert status == 0
    assert answer in found[question]["answer"]
    assert found[question]["mps"] is (settings.get("MPS") != "0")


@emulated_gpu.needs_emulated_gpu
def test_a_process_that_dies_or_stops_has_no_answer(tmp_path: Path) -> None:
    """The question ends within its limit, and nothing is left running."""
    status, found = ask(tmp_path, "--only", "open-twice", DIE_AT="12")
    assert status == 1
    assert found["open-twice"]["answer"].startswith("none: ended by signal 9, the ")

    # It holds a kernel for 200 ms twice, so that there is time to stop it.
    options = emulated_gpu.program("probe", tmp_path, "--only", "own-kernel", "--limit-s", "1")
    with subprocess.Popen(stdout=PIPE, **options) as program:
        pids = emulated_gpu.children_of(program.pid, 2, TIMEOUT_S)
        os.kill(pids[0], signal.SIGSTOP)
        assert program.stdout is not None
        first = json.loads(program.stdout.readline())
        program.kill()
    assert first["answer"].startswith("none in time, the exporter at: ")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@emulated_gpu.needs_emulated_gpu
def test_a_question_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for arguments in (("--only", "why"), ("--speed", "2")):
        assert ask(tmp_path, *arguments) == (2, {})


def test_the_page_has_every_question() -> None:
    page = (ROOT / "docs" / "gpu-verification.md").read_text()
    table = page.partition("\n## What the driver answers\n")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| "]
    assert [row[0] for row in rows[1:]] == QUESTIONS
    for row in rows[1:]:
        assert len(row) == 4
        for path in re.findall(r"`(csrc/[\w/.]+)`", row[2]):
            assert (ROOT / path).exists(), path
    # --take finds a row by its name, in whichever table.
    names = re.findall(r"(?m)^\| ([a-z][\w-]+) \|", page.partition("\n## Aims\n")[0])
    assert not set(names) & set(QUESTIONS)


def test_the_kernels_are_ptx(tmp_path: Path) -> None:
    nvcc = buildconfig.find_nvcc()
    ptxas = shutil.which("ptxas", path=str(nvcc.resolve().parent)) if nvcc else None
    if ptxas is None:
        pytest.skip("no ptxas here")
    texts = re.findall(r'(?s)R"\((.*?)\)"', (SOURCES / "kernels.h").read_text())
    assert len(texts) == 2
    for text, arch in zip(texts, ("sm_80", "sm_90"), strict=True):
        (tmp_path / "kernels.ptx").write_text(text)
        run = [ptxas, f"-arch={arch}", "kernels.ptx", "-o", "kernels.cubin"]
        subprocess.run(run, cwd=tmp_path, check=True, timeout=TIMEOUT_S)
