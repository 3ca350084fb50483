"""Whole runs of the main job: the files it leaves, resuming, Ctrl-C, and ranks that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from training import cli, launch, learn

EXAMPLES = Path(__file__).parents[2] / "examples"
# Until ringcomm is built, Gloo stands on both sides.
FIRST = "ringcomm" if "ringcomm" in dist.Backend.backend_list else "gloo"
TINY = ["--backend", f"{FIRST},gloo", "--size", "tiny", "--race-size", "tiny"]
# Of a command that takes some 10 s on a free machine.
RUN_TIMEOUT_S = 120.0


def log_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "train.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def run(out: Path, *argv: str) -> Path:
    """One run in this process's ranks; the folder that it made."""
    before = set(out.glob("*")) if out.exists() else set()
    assert cli.main([*TINY, "--out", str(out), *argv]) == 0
    (made,) = set(out.glob("*")) - before
    return made


def children(parent: int) -> set[int]:
    """Processes whose parent is ``parent``."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = children(os.getpid())
    yield
    assert not children(os.getpid()) - before


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Of ``pids``, those that still run after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        alive = []
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX":
                alive.append(pid)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.02)


def test_everything_in_small(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = run(tmp_path / "runs", "--steps", "5", "--race-seconds", "0.5", "--tokens", "small")
    said = capfd.readouterr().out
    assert "all losses equal to the last bit" in said
    assert "in one process: losses equal within" in said
    assert "gzip -9 needs" in said
    for name in ("checkpoint.pt", "train.png", "train.jsonl"):
        assert (run_dir / name).stat().st_size > 0
    assert len(log_of(run_dir, "step")) == 5
    raced = [json.loads(line) for line in (run_dir / "race.jsonl").read_text().splitlines()]
    names = [f"{name}{on}" for name in ("ddp", "zero-1", "lomo") for on in ("", " on gloo")]
    assert [record["system"] for record in raced] == names  # of a model that is too small to split
    assert all(record["verified"] for record in raced)
    assert not log_of(run_dir, "failure")


@pytest.mark.parametrize("parallel", ["ddp", "tp", "zero1", "zero2", "zero3"])
def test_resumed_run_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    monkeypatch.setattr(cli, "run_phases", learn.learn)  # nothing else matters here
    whole = run(tmp_path, "--no-race", "--steps", "6", "--parallel", parallel)
    decide = learn._Clock.decide

    def stop_at_three(clock: learn._Clock, step: int) -> list[float]:
        progress, end, save = decide(clock, step)
        return [progress, learn.ENOUGH if step == 3 else end, save]

    with monkeypatch.context() as patched:
        patched.setattr(learn._Clock, "decide", stop_at_three)
        broken = run(tmp_path, "--no-race", "--steps", "6", "--parallel", parallel)
    rest = run(
        tmp_path, "--no-race", "--steps", "6", "--parallel", parallel, "--resume", str(broken)
    )
    losses = [[entry["loss"] for entry in log_of(d, "step")] for d in (whole, broken, rest)]
    assert losses[1] + losses[2] == losses[0]
    ends = [torch.load(d / "checkpoint.pt", weights_only=True)["state"] for d in (whole, rest)]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        "--zero-stage 0 --offload nvme --partition-activations",
        "--zero-stage 1 --offload cpu",
        "--zero-stage 2 --offload nvme --partition-activations",
        "--zero-stage 3 --partition-activations",
        "--zero-stage 3 --offload cpu --clip-grad-norm 0.5",
        "--zero-stage 3 --offload nvme --partition-activations",
        "--parallel tp --offload cpu --partition-activations",
    ],
)
def test_memory_options_change_no_loss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: str
) -> None:
    is_alone = "--zero-stage 3 --offload" in options
    backends = ["--backend", "ringcomm"] if is_alone else []
    run_dir = run(tmp_path / "runs", "--no-race", "--steps", "4", *options.split(), *backends)
    said = capfd.readouterr().out
    assert "in one process: losses equal within" in said
    if not is_alone:
        assert "all losses equal to the last bit" in said
    assert not log_of(run_dir, "failure")  # such as bytes that are not the formula's
    assert not list(run_dir.glob("offload-*"))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, "--pp 2 --schedule gpipe --micro-batches 4"),
        (2, "--ep 2 --optimizer adamw"),
        (4, "--tp 2 --pp 2 --sp --schedule zero-bubble"),
    ],
)
def test_meshes_change_no_loss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], world_size: int, options: str
) -> None:
    run_dir = run(
        tmp_path / "runs",
        *("--no-race", "--steps", "4", "--world", str(world_size)),
        *options.split(),
    )
    said = capfd.readouterr().out
    assert "in one process: losses equal within" in said
    assert "all losses equal to the last bit" in said or world_size > 2
    assert not log_of(run_dir, "failure")


def test_another_mesh_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a pipeline's checkpoint with AdamW's state, as tensor parallelism."""
    monkeypatch.setattr(cli, "run_phases", learn.learn)
    whole = run(tmp_path, "--no-race", "--steps", "6", "--optimizer", "adamw")
    begun = run(tmp_path, "--no-race", "--steps", "3", "--pp", "2", "--optimizer", "adamw")
    more = ["--tp", "2", "--sp", "--resume", str(begun), "--optimizer", "adamw"]
    rest = run(tmp_path, "--no-race", "--steps", "6", *more)
    assert len(log_of(rest, "step")) == 3
    ends = [torch.load(d / "checkpoint.pt", weights_only=True)["state"] for d in (whole, rest)]
    assert ends[0]["num_updates"] == ends[1]["num_updates"] == 6
    assert ends[0]["moments"].keys() == ends[1]["moments"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, "--zero-stage 3 --offload nvme --partition-activations --backend ringcomm"),
        (4, "--tp 2 --pp 2 --sp --schedule 1f1b --micro-batches 4"),
        (4, "--ep 2 --tp 2"),
    ],
)
def test_torchrun_starts_it_too(tmp_path: Path, num_ranks: int, options: str) -> None:
    argv = [*TINY, "--no-race", "--steps", "2", "--out", str(tmp_path), *options.split()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*torchrun, "--standalone", str(EXAMPLES / "train.py"), *argv],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "in one process: losses equal within" in done.stdout
    assert len(list(tmp_path.glob("*/checkpoint.pt"))) == 1


def test_a_failed_promise_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One weight differs a little in the replay over the other backend."""
    from training import replay

    build = replay.build_system

    def build_with_a_wrong_weight(parallel: str, *args: Any, **options: Any) -> Any:
        system = build(parallel, *args, **options)
        if parallel == "ddp":
            with torch.no_grad():
                next(system.model.head.parameters())[0, 0] += 1e-3
        return system

    monkeypatch.setattr(replay, "build_system", build_with_a_wrong_weight)
    argv = [*TINY, "--no-race", "--steps", "4", "--out", str(tmp_path)]
    assert cli.main(argv) == launch.EXIT_CHECK_FAILED
    assert "losses differ at" in capfd.readouterr().err


def test_ctrl_c_stops_all_within_two_seconds(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train.py"), *TINY, "--out", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--seconds", "300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        limit = threading.Timer(RUN_TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()  # ends what is read below as well
        try:
            assert process.stdout is not None
            assert any("tokens/s" in line for line in process.stdout)
            ranks = list(children(process.pid))
            began = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone
            code = process.wait(timeout=30)
            seconds = time.monotonic() - began
            said = process.stdout.read()
        finally:
            limit.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 130, said
    assert seconds < 2, said
    assert len(ranks) == 2
    assert not wait_until_gone(ranks, 0)
    (run_dir,) = tmp_path.glob("*")
    saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert saved["step"] == len(log_of(run_dir, "step")) > 0
    assert "--resume" in said
    assert not list(run_dir.glob("*.tmp"))


def test_a_rank_that_dies_is_named_and_stops_the_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def main(rank: int) -> int:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    began = time.monotonic()
    assert launch.run_ranks(3, main) == launch.EXIT_FAILED
    assert time.monotonic() - began < 2
    assert "was killed by SIGKILL; stopping the other 2" in (said := capfd.readouterr().err)
    assert "rank 1" in said


def test_a_rank_that_raises_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def main(rank: int) -> int:
        if rank == 0:
            raise RuntimeError("the reason")
        time.sleep(60)
        return 0

    assert launch.run_ranks(2, main) == launch.EXIT_FAILED
    said = capfd.readouterr().err
    assert "RuntimeError: the reason" in said
    assert "rank 0" in said


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    def main(rank: int) -> int:
        (tmp_path / f"{rank}.tmp").write_text(str(os.getpid()))
        (tmp_path / f"{rank}.tmp").rename(tmp_path / f"{rank}.pid")
        time.sleep(60)
        return 0

    parent = os.fork()
    if parent == 0:
        os._exit(launch.run_ranks(2, main))
    deadline = time.monotonic() + 20
    while len(files := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks = [int(file.read_text()) for file in files]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert len(ranks) == 2
    assert not wait_until_gone(ranks, 2)
