"""Starts the jobs of hang_cases.py.

A launcher imports torch once and forks the ranks of one job after another. A job on two hosts is
in two PID namespaces, and the doctor runs in the first.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import machines  # noqa: E402

LIMIT_S = 120


# ---- the launcher


def run_rank(name: str, folder: Path, rank: int, world_size: int) -> None:
    """A rank of a job, until its case ends."""
    import torch
    import torch.distributed as dist
    from hang_cases import CASES, Job

    dist.init_process_group(
        "ringcomm",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    job = Job(rank, world_size, torch.ones(1 << 20), [dist.new_group() for _ in range(2)])
    job.call()
    (folder / f"ready-{rank}").touch()
    CASES[name].body(job)
    job.call()


def fork(folder: Path, body: Callable[..., None], *args: Any) -> int:
    """Forks a process that ends with the launcher; its output goes to a file."""
    from hang_cases import die_with_parent

    pid = os.fork()
    if pid == 0:
        die_with_parent()
        signal.alarm(LIMIT_S)
        log = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            body(*args)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    return pid


def fork_ranks(name: str, folder: Path, ranks: list[int], world_size: int) -> list[int]:
    return [fork(folder, run_rank, name, folder, rank, world_size) for rank in ranks]


def run_host(name: str, folder: Path, ranks: list[int], world_size: int) -> None:
    """The first process of a host: its ranks, and a doctor whenever it is asked for."""
    from ringcomm.measure import job

    machines.make_mounts_private()
    machines.mount("proc", "/proc")
    os.environ["RINGCOMM_HOST_ID"] = "a"
    pids = fork_ranks(name, folder, ranks, world_size)
    while True:
        for ask in folder.glob("ask-*"):
            report = job.examine(pids[0])
            ask.unlink()
            part = folder / "part"
            part.write_text(json.dumps(report))
            part.rename(folder / ask.name.replace("ask", "answer"))
        time.sleep(0.02)


def enter_host(name: str, folder: Path, ranks: list[int], world_size: int) -> None:
    machines.enter_namespaces(machines.CLONE_NEWPID | machines.CLONE_NEWNS)
    os.waitpid(fork(folder, run_host, name, folder, ranks, world_size), 0)


def start(name: str, path: str, world_size: int, env: Any, are_hosts: bool) -> list[int]:
    folder, ranks, pids = Path(path), list(range(world_size)), []
    kept = dict(os.environ)
    if are_hosts:
        half = world_size // 2
        pids.append(fork(folder, enter_host, name, folder, ranks[:half], world_size))
        ranks, env = ranks[half:], {**env, "RINGCOMM_HOST_ID": "b"}
    for rank in ranks:
        os.environ.update(env[rank] if isinstance(env, list) else env)
        pids += fork_ranks(name, folder, [rank], world_size)
        os.environ.clear()
        os.environ.update(kept)
    return pids


def serve() -> NoReturn:
    """Takes jobs from standard input, a line each; an empty line ends all of them."""
    import torch
    from hang_cases import CASES

    assert CASES
    torch.set_num_threads(1)
    pids: list[int] = []
    for line in sys.stdin:
        started: list[int] = []
        if line.strip():
            started = start(*json.loads(line))
            pids += started
        else:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pids = []
        print(json.dumps(started), flush=True)
    os._exit(0)


class Launcher:
    """The launcher's other end."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Its ranks end with it."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def begin(self, name: str, folder: Path, world_size: int, env: Any) -> list[int]:
        """Starts the ranks of a job, and does not wait for them; their pids."""
        return self._tell(json.dumps([name, str(folder), world_size, env or {}, False]))

    @contextmanager
    def job(
        self,
        name: str,
        folder: Path,
        world_size: int = 8,
        env: Any = None,
        are_hosts: bool = False,
        settle_s: float = 1.0,
    ) -> Iterator[list[int]]:
        """The pids of a job's ranks, once it is in this case; at the end all jobs end.

        Args:
            env: of all ranks, or of each.
            are_hosts: the second half of the ranks is on another host; the first pid is then that
                of the process around the first half.
        """
        pids = self._tell(json.dumps([name, str(folder), world_size, env or {}, are_hosts]))
        try:
            deadline = time.monotonic() + LIMIT_S
            while not all((folder / f"ready-{rank}").exists() for rank in range(world_size)):
                said = folder / "output"
                assert time.monotonic() < deadline, said.read_text() if said.exists() else ""
                if are_hosts and said.exists() and "Unavailable" in said.read_text():
                    raise machines.Unavailable(said.read_text())
                time.sleep(0.02)
            time.sleep(settle_s)
            yield pids
        finally:
            self._tell("")


def ask_on_host(folder: Path, number: int = 0) -> dict[str, Any]:
    """The report of the doctor on the first of two hosts."""
    (folder / f"ask-{number}").touch()
    answer = folder / f"answer-{number}"
    assert machines.comes_true(answer.exists, LIMIT_S), (folder / "output").read_text()
    return dict(json.loads(answer.read_text()))


if __name__ == "__main__":
    serve()
