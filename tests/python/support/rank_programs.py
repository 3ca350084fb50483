"""run_program(): the text of a program as each rank, in processes of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import ranks


class Ended(NamedTuple):
    """What a rank's process left."""

    returncode: int
    out: str
    err: str


class _Program:
    """A new interpreter, for programs whose environment is read before they begin."""

    def __init__(
        self, text: str, argv: list[str], env: Mapping[str, str], files: list[int]
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", text, *argv],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
        )

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Fork:
    """A fork of the ranks' server, which has imported ringcomm."""

    def __init__(self, text: str, argv: list[str], files: list[int]) -> None:
        self._pid = ranks.server().fork_program(text, argv, files)

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (status := ranks.server().status(self._pid, 1.0)) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self._pid}", timeout_s)
        code = status.removeprefix("exit status ")
        return int(code) if code != status else -signal.Signals[status]

    def kill(self) -> None:
        if ranks.server().status(self._pid, 0.0) is None:
            os.kill(self._pid, signal.SIGKILL)
            ranks.server().status(self._pid, 5.0)


def run_program(
    text: str,
    *arguments: object,
    num_ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180,
) -> list[Ended]:
    """Runs `text` once for each rank, whose sys.argv[1] is its rank and the rest `arguments`.

    A rank's standard input ends when all ranks before it have ended. With `env`, which is added to
    this process's, ranks are new interpreters, otherwise forks of one that has imported ringcomm.
    Raises subprocess.TimeoutExpired, and leaves no process behind.
    """
    with contextlib.ExitStack() as stack:
        inputs: list[Any] = []
        outputs: list[list[Any]] = []
        processes: list[_Fork | _Program] = []
        for rank in range(num_ranks):
            argv = [str(rank), *map(str, arguments)]
            reader, writer = os.pipe()
            inputs.append(stack.enter_context(os.fdopen(writer, "w")))
            outputs.append([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)])
            files = [reader, *(file.fileno() for file in outputs[-1])]
            process = _Fork(text, argv, files) if env is None else _Program(text, argv, env, files)
            stack.callback(process.kill)
            processes.append(process)
            os.close(reader)
        codes = []
        for process, its_input in zip(processes, inputs, strict=True):
            its_input.close()
            codes.append(process.wait(timeout_s))
        for file in itertools.chain(*outputs):
            file.seek(0)
        return [
            Ended(code, *(file.read() for file in files))
            for code, files in zip(codes, outputs, strict=True)
        ]
