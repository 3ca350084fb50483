"""`ringcomm doctor --job` on jobs that hang: the verdict names the rank and the reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ringcomm.measure import job
from ringcomm.trace import flight

LIMIT_S = 60
# Each rank writes a file before it does what makes the job hang.
PROGRAM = """
import ctypes, datetime, os, sys, time
import torch, torch.distributed as dist
store, case, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=rank, world_size=world,
                        timeout=datetime.timedelta(seconds=50))
groups = [dist.new_group() for _ in range(2)]
x = torch.ones(1024)
dist.all_reduce(x)
last = rank == world - 1
open(f"{store}.{rank}", "w").close()

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        time.sleep(40)
        return i

def wait_in_a_function():
    time.sleep(40)

if case == "sleeps" and last: wait_in_a_function()
if case == "stopped" and last: time.sleep(1000)
if case == "computes" and last:
    end = time.monotonic() + 40
    while time.monotonic() < end: pass
if case == "loader" and last:
    next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
if case == "holds the GIL" and last: ctypes.PyDLL(None).sleep(40)
if case == "two groups": dist.all_reduce(x, group=groups[rank % 2])
if case == "recv" and rank == 0: dist.recv(x, 1, tag=7)
if case == "recv": wait_in_a_function()
if case == "no hang":
    end = time.monotonic() + 40
    while time.monotonic() < end: dist.all_reduce(x)
dist.all_reduce(x)
"""


@contextmanager
def hanging(folder: Path, case: str, world_size: int = 3) -> Iterator[list[int]]:
    """The pids of the ranks of a job that is in this case, by rank."""
    program, store = folder / "program.py", folder / "store"
    program.write_text(PROGRAM)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(store), case]
    log = (folder / "output").open("w")
    ranks = [
        subprocess.Popen([*command, str(rank), str(world_size)], env=env, stdout=log, stderr=log)
        for rank in range(world_size)
    ]
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((folder / f"store.{rank}").exists() for rank in range(world_size)):
            assert time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.05)
        time.sleep(0.5)
        if case == "stopped":
            os.kill(ranks[-1].pid, signal.SIGSTOP)
            time.sleep(0.2)
        yield [process.pid for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
        log.close()


@pytest.mark.parametrize(
    ("case", "cause", "words"),
    [
        ("sleeps", 2, ["is in no call", "wait_in_a_function", "since all_reduce #0 ended"]),
        ("stopped", 2, ["is stopped", "kill -CONT"]),
        ("computes", 2, ["computes", "program.py"]),
        ("loader", 2, ["in the data loader"]),
        ("holds the GIL", 2, ["program.py"]),
        ("recv", 1, ["rank 1 is the cause", "wait_in_a_function"]),
        ("no hang", None, ["no hang"]),
    ],
)
def test_the_cause_is_named(tmp_path: Path, case: str, cause: int | None, words: list[str]) -> None:
    with hanging(tmp_path, case) as pids:
        report = job.examine(pids[0])
        assert [row["pid"] for row in report["ranks"]] == pids
        assert report["cause"] == cause, report
        for word in words:
            assert word in report["verdict"], report
        # Nothing was stopped, and nobody died of the question.
        if case != "stopped":
            assert all(job._stat(pid)[0] not in "TtZ" for pid in pids)


def test_groups_that_wait_for_each_other(tmp_path: Path) -> None:
    with hanging(tmp_path, "two groups", world_size=2) as pids:
        report = job.examine(pids[1])
        assert report["cause"] is None
        assert "ranks wait for each other" in report["verdict"]
        assert "one order on all ranks" in report["verdict"]


def test_the_command_reads_the_job_of_a_launcher(tmp_path: Path) -> None:
    with hanging(tmp_path, "sleeps", world_size=2):
        command = [sys.executable, "-m", "ringcomm", "doctor", "--job", str(os.getpid())]
        run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        found = run(command)
        assert "rank 1 is the cause" in found.stdout
        found = run([*command, "--json"])
        assert json.loads(found.stdout)["cause"] == 1


def test_what_is_no_job_is_refused_in_one_line(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        with pytest.raises(job.JobError, match=r"neither process \d+ nor one that it has started"):
            job.examine(other.pid)
        other.kill()
        other.wait()
        with pytest.raises(job.JobError, match="there is no process"):
            job.examine(other.pid)


def test_a_recorder_of_another_version_is_refused() -> None:
    header = flight._HEADER.pack(flight._MAGIC, flight.NUM_BYTES, 7, 1, 0, 0, b"0.0.9", 0)
    data = header.ljust(flight.NUM_BYTES, b"\0")
    with pytest.raises(ValueError, match=r"process 7 runs ringcomm 0\.0\.9"):
        flight.parse(data)
    with pytest.raises(ValueError, match="no flight recorder"):
        flight.parse(b"something else")


WAITS = """
import sys, time, torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("ringcomm", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
x = torch.ones(1 << 20)
dist.broadcast(x, 0)
if rank == 2: time.sleep(14)
dist.all_reduce(x)
"""


def test_a_long_wait_is_said_once_by_who_wants_it(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WAITS, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**env, "RINGCOMM_SAYS_WAITS": "0" if rank == 1 else "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = [[line for line in text.splitlines() if "waits for" in line] for text in said]
    assert [len(found) for found in lines] == [1, 0, 0], said
    for words in (
        "ringcomm rank 0/3: all_reduce #1 (4 MiB) waits for rank ",
        "running, ",
        " for 1",
        "ringcomm doctor --job",
    ):
        assert words in lines[0][0], lines[0]
