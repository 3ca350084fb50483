"""A separate NVIDIA Multi-Process Service for the duration of a measurement.

python benchmarks/mps.py COMMAND... runs a command with it and returns its status.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs

CONTROL = "nvidia-cuda-mps-control"
# Where drivers put their programs, besides PATH.
FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/nvidia/bin")
# Hardware queues of a client. The default under MPS is 2, and a group has a stream of its own and
# one per peer: a kernel that waits for a peer would block what is behind it in its queue.
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "8")
START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 10.0
# Seconds to wait for clients before they are killed.
QUIT_TIMEOUT_S = 20.0


def find_program(name: str) -> str | None:
    """The path of a program of the driver, or None."""
    return programs.find_program(name, FOLDERS)


def find_control() -> str | None:
    """The path of MPS's control program, or None."""
    return find_program(CONTROL)


class Mps:
    """A daemon in its own folder, used by this process and its children while the context lasts.

    It ends with the context; if this process is killed, a guard process ends it. Meanwhile its
    folder is on PATH, where the daemon looks for its server, and clients have 8 hardware queues
    unless CUDA_DEVICE_MAX_CONNECTIONS says another number.

    Raises:
        ValueError: there is no control program.
        RuntimeError: it does not start; the message has its output.
    """

    def __init__(self) -> None:
        found = find_control()
        if found is None:
            raise ValueError(
                f"MPS was not found: {CONTROL} is neither on PATH nor in {', '.join(FOLDERS)}. It"
                " is part of NVIDIA's driver. Without it, ranks that share a GPU are time-sliced"
            )
        self._control = found
        self._folder = Path()
        self._guard: subprocess.Popen[bytes] | None = None
        self._replaced: dict[str, str | None] = {}

    def __enter__(self) -> Mps:
        # Short: sockets go there.
        self._folder = Path(tempfile.mkdtemp(prefix="ringcomm-mps-", dir="/tmp"))
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        queues, number = QUEUES
        path = os.pathsep.join([str(Path(self._control).parent), os.environ.get("PATH", "")])
        variables = {
            **dict.fromkeys(names, str(self._folder)),
            "PATH": path.rstrip(os.pathsep),
            queues: os.environ.get(queues, number),
        }
        self._replaced = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        try:
            # Its output goes to a file: the daemon would keep a pipe open.
            with (self._folder / "start.txt").open("wb") as said:
                subprocess.run(
                    [self._control, "-d"],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    timeout=START_TIMEOUT_S,
                    check=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            text = (self._folder / "start.txt").read_text(errors="replace").strip()
            raise RuntimeError(f"{CONTROL} -d: {error}. {text}") from None
        # `read` ends when the last process that has the other end of its input is gone.
        script = 'read -r line; echo quit | "$0"'
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", script, self._control],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _ask(self, command: str, timeout_s: float) -> str:
        """The daemon's answer; empty if it has ended or is busy."""
        try:
            return subprocess.run(
                [self._control],
                input=command + "\n",
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return ""

    def _pids(self) -> list[int]:
        """Of the daemon, and of its servers."""
        said = self._ask("get_server_list", ANSWER_TIMEOUT_S)
        with contextlib.suppress(OSError):
            said += " " + (self._folder / f"{CONTROL}.pid").read_text()
        return [int(word) for word in said.split() if word.isdigit()]

    def _end(self) -> None:
        if self._guard is not None:
            pids = self._pids()
            self._ask("quit", QUIT_TIMEOUT_S)
            _kill_after(pids, ANSWER_TIMEOUT_S)
            assert self._guard.stdin is not None
            self._guard.kill()
            self._guard.wait()
            self._guard.stdin.close()
            self._guard = None
        for name, value in self._replaced.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _kill_after(pids: list[int], timeout_s: float) -> None:
    """Waits for processes to end, and kills those that do not."""
    deadline = time.monotonic() + timeout_s
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in filter(_is_alive, pids):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Runs a command under MPS; returns its status."""
    if not command:
        sys.exit((__doc__ or "").splitlines()[-1])
    with Mps():
        return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
