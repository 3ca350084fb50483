"""benchmarks/gpu over the emulator of CUDA's driver: kernel_sweep's results, output and ends; and
every question of probe is answered, in time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import buildconfig
import emulated_gpu
import pytest
import verify_gpu
from cases import slow

pytestmark = emulated_gpu.needs_emulated_gpu

# Nothing depends on it but how long a hang lasts: a busy machine may take minutes.
TIMEOUT_S = 900.0
ROOT = Path(__file__).resolve().parents[3]
SHARES = ("reduce_scatter", "all_gather")
PATHS = {"copy", "one_round", "two_rounds", "in_place", "staged", "ring"}


def run(name: str, box: Path, *arguments: str, **settings: str) -> Any:
    """Runs a program to its end."""
    options = emulated_gpu.program(name, box, *arguments, **settings)
    return subprocess.run(capture_output=True, timeout=TIMEOUT_S, check=False, **options)


sweep = partial(run, "kernel_sweep")


def points(done: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_path_is_right_and_printed(tmp_path: Path, ranks: int) -> None:
    sizes = [240, 120_000]
    asked = ["--rounds", "2", "--sizes", "240,120000"]
    done = sweep(tmp_path, "--ranks", str(ranks), *asked)
    assert done.returncode == 0, done.stderr
    timed = points(done)
    assert {(p["path"], p["op"]) for p in timed} >= {
        *((path, "all_reduce") for path in PATHS - {"copy"}),
        *((path, op) for path in ("one_round", "in_place") for op in SHARES),
    }
    assert {p["dtype"] for p in timed} == {"bfloat16", "float32"}
    for size in sizes:
        of_size = [p for p in timed if p["bytes"] == size]
        assert {p["path"] for p in of_size} == PATHS
    for point in timed:
        assert point["num_wrong"] == 0
        assert point["held_vectors"] == 4
        assert point["samples"] == 10
        assert 0 < point["p50_us"] <= point["p99_us"]
        assert point["gb_per_s"] > 0
        assert 0 < point["predicted_us"] < 1000
        assert point["copy_share"] == 1 if point["path"] == "copy" else point["copy_share"] >= 0


@pytest.mark.slow
def test_blocks_are_swept(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--rounds", "1", "--sizes", str(1 << 20))
    assert done.returncode == 0, done.stderr
    short = [p for p in points(done) if p["op"] == "all_reduce" and p["path"] == "one_round"]
    assert len({p["blocks"] for p in short}) == 3
    assert {p["is_plan"] for p in short} == {True, False}


USAGE = "usage: kernel_sweep"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "settings", "status", "said"),
    [
        ("kernel_sweep --ranks 1", {}, 2, ("--ranks is 2 to 32", USAGE)),
        ("kernel_sweep --sizes 10", {}, 2, ("multiples of 4 bytes for each rank", USAGE)),
        ("kernel_sweep --speed 2", {}, 2, ("there is no option --speed", USAGE)),
        ("kernel_sweep --sizes 1024", {"MPS": "0"}, 1, ("need MPS",)),
        # It takes too long.
        ("kernel_sweep --sizes 1024 --limit-s 1", {"DELAY_US": "200000"}, 1, ("after 1 s",)),
        ("probe --only why", {}, 2, ()),
        ("probe --speed 2", {}, 2, ()),
    ],
)
def test_what_cannot_run_says_why(
    tmp_path: Path, words: str, settings: dict[str, str], status: int, said: tuple[str, ...]
) -> None:
    name, *arguments = words.split()
    done = run(name, tmp_path, *arguments, **settings)
    assert (done.returncode, done.stdout) == (status, "")
    assert all(text in done.stderr for text in said), done.stderr


@pytest.mark.slow
def test_a_wrong_element_is_seen(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--rounds", "1", "--sizes", "1024", "--spoil", "1")
    assert done.returncode == 1
    # Before the times are taken and after, on one rank.
    assert {point.get("num_wrong", 2) for point in points(done)} == {2}


def sweep_until(
    signal_number: int, rank: int, box: Path, *arguments: str, after_s: float = 0.5
) -> tuple[str, str]:
    """What is printed where a rank gets a signal in the middle; nothing is left of it."""
    asked = ("--rounds", "1000000", "--sizes", "1024", *arguments)
    options = emulated_gpu.program("kernel_sweep", box, *asked)
    with subprocess.Popen(stdout=PIPE, stderr=PIPE, **options) as program:
        ranks = emulated_gpu.children_of(program.pid, 2, TIMEOUT_S)
        time.sleep(after_s)
        os.kill(ranks[rank], signal_number)
        out, error = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    return out, error


@pytest.mark.slow
def test_a_rank_that_stops_is_killed_after_the_others_kernels_have_ended(tmp_path: Path) -> None:
    for after_s, limit_s in ((0.5, 8), (8, 16), (32, 40)):  # until kernels run
        options = ("--limit-s", str(limit_s))
        _, error = sweep_until(signal.SIGSTOP, 1, tmp_path, *options, after_s=after_s)
        assert f"stopped after {limit_s} s" in error
        if "rank 0: " in error:
            break
    # By itself: in a kernel, or where ranks meet.
    assert "rank 0: a kernel gave up: " in error or "rank 0: another rank has failed" in error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all(tmp_path: Path, rank: int) -> None:
    found: list[dict[str, Any]] = []
    for after_s in (0.5, 2, 8, 32):  # until kernels run and, of rank 0, some points are measured
        out, error = sweep_until(signal.SIGKILL, rank, tmp_path, after_s=after_s)
        assert f"rank {1 - rank}: " in error
        found = [json.loads(line) for line in out.splitlines()]
        if found or (rank == 0 and " of 1024 bytes, " in error):
            break
    assert " of 1024 bytes, " in error
    # Rank 0 prints what it has measured.
    assert bool(found) is (rank == 1)
    assert all(point["num_wrong"] == 0 for point in found)


@pytest.mark.slow
def test_a_limit_ends_the_rounds(tmp_path: Path) -> None:
    limited = ["--rounds", "1000000", "--calls", "1", "--sizes", "1024", "--limit-s", "12"]
    done = sweep(tmp_path, *limited)  # a round is short, also on a busy machine
    assert done.returncode == 0, done.stderr
    assert {point.get("num_wrong", 0) for point in points(done)} == {0}


# ---- probe

SOURCES = ROOT / "benchmarks" / "gpu" / "probe"
QUESTIONS = re.findall(r'(?m)^    \{"([\w-]+)", \w+\},$', (SOURCES / "probe.cc").read_text())

# What the emulator does, and CUDA may not. It has no multiprocessors: its blocks say number 0.
READS_OLD = "reads the old content"
ANSWERS = {
    "open-twice": r"one address, mapped until the second close, which reads the old content",
    "by-descriptor": READS_OLD,
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
    done = run("probe", box, *arguments, **settings)
    return done.returncode, {line["question"]: line for line in points(done)}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "settings", "answer"),
    [
        ("multiprocessors", {"MPS": "0"}, "one after the other"),
        ("open-twice", {"IPC": "0"}, "CUDA_ERROR_NOT_SUPPORTED"),
        slow("by-descriptor", {"VMM": "0"}, "CUDA_ERROR_NOT_SUPPORTED"),
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


@pytest.mark.slow
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


def test_the_checks_have_every_question() -> None:
    questions = verify_gpu.tables_of(verify_gpu.CHECKS)["question"]
    assert [question["name"] for question in questions] == QUESTIONS
    for question in questions:
        assert question["asked"]
        assert question["answer"]
        for path in re.findall(r"`((?:csrc|kernels)/[\w/.]+)`", question["why"]):
            assert (ROOT / path).exists(), path


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
