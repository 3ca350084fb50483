#!/usr/bin/env python3
"""Measures how long after a rank's death the last of the others knows, and has a new group.

    python benchmarks/deaths.py --worlds 2,4,8 --deaths 100 --peer-deaths 10

Each death has ranks of its own: one is killed by SIGKILL at a random moment, in a call or while the
ranks compute between calls. In ringcomm's shared memory the others then shrink the group. Between
two hosts of ringcomm they catch the error and stay. Over Gloo they stay, or end; under MPI mpiexec
ends them. Strangers, one for each core, keep the machine busy. docs/reliability.md shows the newest
records.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import harness  # before torch: it sets the number of threads
import numpy as np
import torch
import torch.distributed as dist
from deaths_mpi import CALL, PID, RAISED
from harness import Options, Report, flag
from layouts import AFTER_DEATH, DEATH_COLUMNS, HOSTS, SHRINK, STAY
from race import weather
from run_all import find_mpiexec

import ringcomm
from _ringcomm.values import several, whole, words
from ringcomm.measure.machine import OthersWatch
from ringcomm.measure.timing import percentiles
from ringcomm.torch_names import die_with_parent

# What a rank writes of itself: seconds of the monotonic clock but for the first, and whether the
# error names the dead rank and the new group adds up. 0 is "not yet".
IS_NAMED, SHRUNK, IS_RIGHT, NUM_COLUMNS = 3, 4, 5, 6
# Beyond it a rank counts as one that does not know. Gloo's timeout is shorter than that.
LIMIT_S = 15.0
START_LIMIT_S = 120.0
GLOO_TIMEOUT_S = 5.0
COMPUTE_S = 0.02
OURS = ("ringcomm", HOSTS)
MOMENTS = ("call", "computation")


class Death(NamedTuple):
    """What one death was like, in seconds from the kill."""

    aware_s: float  # until the last rank that noticed has raised; with MPI, until all have ended
    call_s: float  # the same from the beginning of the rank's call, if that is later
    group_s: float | None  # from the last error to the last rank's new group; None without shrink()
    num_raised: int  # ranks that got an exception
    is_right: bool  # all ranks of ringcomm named the dead one, and the new group is right


# ---- the load

# From the start of a stranger's interpreter until it computes, with room to spare.
STRANGER_START_S = 0.3
# Ends by itself when its parent is gone; looks at it once in some 20 ms.
STRANGER = "import os\np = os.getppid()\nwhile os.getppid() == p:\n  for _ in range(10**6): pass"


@contextlib.contextmanager
def strangers(count: int) -> Iterator[None]:
    """CPU-bound processes of the usual priority, while the context lasts."""
    command = [sys.executable, "-I", "-S", "-c", STRANGER]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(STRANGER_START_S if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()  # from then on its time counts as this run's own


# ---- a rank


def calls_of(source: random.Random, world_size: int) -> Callable[[], object]:
    """A random collective, the same on all ranks."""
    tensor = torch.zeros(source.choice([256, 65_536, 1 << 20]))
    many = [torch.empty_like(tensor) for _ in range(world_size)]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather(many, tensor),
        dist.barrier,
    ]
    return source.choice(calls)


def compute() -> None:
    """Keeps the processor for COMPUTE_S of its time."""
    matrix = torch.ones(64, 64)
    end = time.thread_time() + COMPUTE_S
    while time.thread_time() < end:
        torch.mm(matrix, matrix)


def work(row: Any, moment: str, source: random.Random, world_size: int) -> None:
    """Calls until one raises."""
    calls = [calls_of(source, world_size) for _ in range(20)]
    while True:
        for call in calls:
            if moment == "computation":
                compute()
            row[CALL] = time.monotonic()
            call()


def be_rank(rank: int, board: Any, backend: str, moment: str, seed: int, victim: int) -> None:
    """A forked rank, from the making of the group to its end."""
    world_size, row = len(board), board[rank]
    torch.set_num_threads(1)
    is_ours = backend in OURS
    if backend == HOSTS:
        os.environ["RINGCOMM_HOST_ID"] = "ab"[2 * rank // world_size]
    dist.init_process_group(
        "ringcomm" if is_ours else "gloo",
        store=dist.FileStore(f"{os.path.dirname(board.filename)}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=2 * LIMIT_S if is_ours else GLOO_TIMEOUT_S),
    )
    dist.barrier()
    row[PID] = os.getpid()
    try:
        work(row, moment, random.Random(seed), world_size)
    except RuntimeError as error:  # Gloo's, and DistBackendError
        row[RAISED] = time.monotonic()
        row[IS_NAMED] = isinstance(error, ringcomm.PeerDiedError) and error.rank == victim
    if AFTER_DEATH[backend] == SHRINK:
        new = ringcomm.shrink()
        row[SHRUNK] = time.monotonic()
        total = torch.ones(3)
        dist.all_reduce(total, group=new)
        row[IS_RIGHT] = total.tolist() == [world_size - 1.0] * 3
        dist.destroy_process_group()
    elif AFTER_DEATH[backend] == STAY:
        time.sleep(2 * LIMIT_S)


# ---- the parent of one death


def wait_for(is_done: Callable[[], bool], limit_s: float) -> bool:
    """Looks every 2 ms; whether it came in time."""
    deadline = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@contextlib.contextmanager
def forked(board: Any, *arguments: Any) -> Iterator[list[int]]:
    """The ranks, which are killed and waited for at the end."""
    pids = []
    try:
        for rank in range(len(board)):
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(signal.SIGKILL)
                    be_rank(rank, board, *arguments)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def kill_one(board: Any, victim: int, source: random.Random) -> float:
    """Kills a rank at a random moment after all have begun; when."""
    if not wait_for(lambda: bool(board[:, PID].all()), START_LIMIT_S):
        raise ValueError(f"ranks did not start in {START_LIMIT_S:.0f} s")
    time.sleep(source.uniform(0.005, 0.1))
    now = time.monotonic()
    os.kill(int(board[victim, PID]), signal.SIGKILL)
    return now


def die_once(board: Any, backend: str, moment: str, source: random.Random) -> Death:
    """One death over a backend of torch."""
    world_size = len(board)
    victim, seed = source.randrange(world_size), source.randrange(1 << 30)
    others = [rank for rank in range(world_size) if rank != victim]
    has_shrink = AFTER_DEATH[backend] == SHRINK
    with forked(board, backend, moment, seed, victim):
        killed = kill_one(board, victim, source)
        wait_for(lambda: bool(board[others, RAISED].all()), LIMIT_S)
        if has_shrink:
            wait_for(lambda: bool(board[others, IS_RIGHT].all()), LIMIT_S)
        rows = np.array(board[others])
    raised = rows[rows[:, RAISED] > 0]
    begun = np.maximum(raised[:, CALL], killed)
    promised = [IS_NAMED] * (backend in OURS) + [IS_RIGHT] * has_shrink
    return Death(
        max(raised[:, RAISED] - killed, default=LIMIT_S),
        max(raised[:, RAISED] - begun, default=LIMIT_S),
        max(rows[:, SHRUNK]) - max(rows[:, RAISED]) if has_shrink else None,
        len(raised),
        bool(rows[:, promised].all()),
    )


def die_under_mpi(board: Any, _backend: str, _moment: str, source: random.Random) -> Death:
    """One death of a rank of mpiexec, which ends the others."""
    world_size, mpiexec = len(board), find_mpiexec()
    assert mpiexec is not None
    script = str(Path(__file__).with_name("deaths_mpi.py"))
    command = [mpiexec, "-n", str(world_size), sys.executable, script, board.filename]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "I_MPI_PIN": "off", "I_MPI_FABRICS": "shm"}
    with subprocess.Popen(command, env=environment, **quiet) as job:
        pidfds: list[int] = []
        try:
            victim = source.randrange(world_size)
            if not wait_for(lambda: bool(board[:, PID].all()), START_LIMIT_S):
                raise ValueError(f"mpiexec did not start ranks in {START_LIMIT_S:.0f} s")
            pidfds = [os.pidfd_open(int(pid)) for pid in board[:, PID]]
            killed = kill_one(board, victim, source)
            left = set(pidfds) - {pidfds[victim]}
            while left and time.monotonic() < killed + LIMIT_S:
                left -= set(select.select(list(left), [], [], 0.1)[0])
            ended_s = time.monotonic() - killed
            wait_for(lambda: job.poll() is not None, LIMIT_S)
        finally:
            for pidfd in pidfds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            job.kill()
    num_raised = int((board[:, RAISED] > 0).sum())
    return Death(ended_s, ended_s, None, num_raised, True)


# ---- points and their records


def measure_point(backend: str, world_size: int, moment: str, options: Options) -> dict[str, Any]:
    """The record of one point."""
    num_deaths = options.deaths if backend in OURS else options.peer_deaths
    source = random.Random(f"{options.seed} {backend} {world_size} {moment}")
    die = die_under_mpi if backend == "mpi" else die_once
    watch = OthersWatch([os.getpid()])
    deaths = []
    with strangers(options.strangers):
        for _ in range(num_deaths):
            with tempfile.TemporaryDirectory(prefix="ringcomm-deaths-") as folder:
                shape = (world_size, NUM_COLUMNS)
                board = np.memmap(f"{folder}/board", np.float64, "w+", shape=shape)
                deaths.append(die(board, backend, moment, source))
    groups_s = [death.group_s for death in deaths if death.group_s is not None]
    return {
        "backend": backend,
        "world_size": world_size,
        "moment": moment,
        "num_deaths": num_deaths,
        "aware": summary([death.aware_s for death in deaths]),
        "after_call": summary([death.call_s for death in deaths]),
        "new_group": summary(groups_s) if groups_s else None,
        "raised_share": sum(d.num_raised for d in deaths) / (num_deaths * (world_size - 1)),
        **weather(watch.percent()),
        "verified": all(death.is_right for death in deaths),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the most, in ms."""
    found = percentiles((1000 * s for s in seconds), "ms")
    return {"p50": found["p50_ms"], "p99": found["p99_ms"], "max": 1000 * max(seconds)}


def check(options: Options) -> None:
    """Leaves MPI out where it is not installed."""
    if "mpi" in options.backends and find_mpiexec() is None:
        options.backends.remove("mpi")
        print("without MPI; for Intel's: pip install impi-rt mpi4py")


def measure(options: Options, report: Report) -> None:
    """Every point in turn."""
    for backend, world_size, moment in product(options.backends, options.worlds, MOMENTS):
        if backend == "mpi" and moment != MOMENTS[0]:
            continue
        record = measure_point(backend, world_size, moment, options)
        report.add([record])
        print(" | ".join(cell(record) for _, cell in DEATH_COLUMNS), flush=True)


CORES = len(os.sched_getaffinity(0))
PROGRAM = harness.Program(
    doc=__doc__,
    kind="deaths",
    measure=measure,
    flags=[
        flag("--backends", words, ",".join(AFTER_DEATH), known=AFTER_DEATH),
        flag("--worlds", several(whole(2)), "2,4,8", "numbers of ranks"),
        flag("--deaths", whole(1), 100, "of each point over ringcomm"),
        flag("--peer-deaths", whole(1), 10, "of each point over others"),
        flag("--strangers", int, CORES, "CPU-bound processes beside the ranks"),
        flag("--seed", int, 1, "of calls, victims and moments"),
    ],
    check=check,
    named=("strangers", "seed"),
)

if __name__ == "__main__":
    PROGRAM.run_script()
