"""run_program(): the text of a program as each rank. run_command(): a process, to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """What a rank's process left."""

    returncode: int
    out: str
    err: str


def run_program(
    text: str,
    *arguments: object,
    num_ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180,
) -> list[Ended]:
    """Runs `text` once for each rank, whose sys.argv[1] is its rank and the rest `arguments`.

    A rank's standard input ends when all ranks before it have ended. `env` is added to this
    process's. Raises subprocess.TimeoutExpired, and leaves no process behind.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", text, str(rank), *map(str, arguments)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [Ended(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def run_command(
    *command: object, timeout_s: float = 120, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs one to its end, whatever that is; `env` is added to this process's.

    `options`: of subprocess.run(), such as another `stdout` than a pipe.
    """
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    options = {**pipes, "env": {**os.environ, **(env or {})}, "timeout": timeout_s, **options}
    return subprocess.run([*map(str, command)], text=True, check=False, **options)
