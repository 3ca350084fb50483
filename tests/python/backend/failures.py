"""What tests of failures share: errors that travel, ends of processes, ways to reach a rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from machines import comes_true
from ranks import hosts

TRANSPORTS: dict[str, Any] = {"shm": None, "messages": {"RINGCOMM_TRANSPORT": "messages"}}
# Of three ranks.
ENVS: dict[str, Any] = {**TRANSPORTS, "hosts": hosts("aba")}
# A death is seen at once or looked for every 20 ms; the rest, of time-outs of 30 s and more, is for
# busy machines.
SOON_S = 14.0  # twice that is less than the group's time-out of 30 s


def caught(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The error of a call, in a form that travels; {} if there was none."""
    try:
        fn(*args)
    except Exception as error:
        names = ("rank", "pid", "op", "seq", "host")
        return {
            "type": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in names},
        }
    return {}


def timed(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    begin = time.monotonic()
    error = caught(fn, *args)
    return {**error, "seconds": time.monotonic() - begin}


def interrupted(call: Callable[[], Any], begun: Callable[[], object]) -> tuple[str, float]:
    """What a call raises when the process is interrupted once it has begun, and how soon."""
    sent_s: list[float] = []

    def interrupt() -> None:
        comes_true(begun, 60)
        time.sleep(0.2)
        sent_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    kind = "nothing"
    try:
        call()
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    return kind, time.monotonic() - max(sent_s, default=0.0)


def in_threads(call: Callable[[Any], Any], names: Iterable[Any]) -> None:
    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)


def end_process(how: str) -> None:
    if how == "exec":
        os.execv("/bin/sleep", ["sleep", "60"])
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_named(error: dict[str, Any], path: str, rank: int, victim: int) -> None:
    """Ends what the rank that an error names has become, when the other two have seen it so.

    Args:
        path: of a file that the ranks share.
    """
    seen = dist.FileStore(path, -1)
    seen.set(str(rank), "")
    seen.wait([str(r) for r in {0, 1, 2} - {victim}], datetime.timedelta(seconds=20))
    pid = error.get("pid", -1)
    if pid > 1:  # kill(-1) would end every process
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
