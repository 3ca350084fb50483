"""A command with a limit, after which none of its processes is left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NICE = ("nice", "-n", "5")
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
# Namespaces of its own: every process ends with the first, and /dev/shm is that of this run.
_ALONE = (
    *("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && "$@"; exit $?', "sh"),  # sh reaps orphans
)


@dataclasses.dataclass(frozen=True)
class Done:
    """How the command ended."""

    status: int | None  # None: it was killed after limit_s
    output: str  # both of its outputs together
    seconds: float


@functools.cache
def _alone() -> tuple[str, ...]:
    """What runs a command alone, () where this account may not make namespaces."""
    if os.getuid() != 0 or not shutil.which("unshare"):
        return ()
    return _ALONE if subprocess.run([*_ALONE, "true"], check=False).returncode == 0 else ()


def run_bounded(
    command: Sequence[str], cwd: Path, limit_s: float, env: Mapping[str, str] | None = None
) -> Done:
    """Runs the command with a low priority and ends it, and what it started, after limit_s."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [*ENDS_WITH_US, *_alone(), *NICE, *command],
        cwd=cwd,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    status: int | None = None
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
    finally:
        _end(process)
    return Done(status, output, time.monotonic() - begin)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
