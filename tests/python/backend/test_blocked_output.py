"""A rank whose standard error is a pipe that nobody reads, and full.

The worker of https://github.com/aiidateam/aiida-core/issues/1006 hung so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import caught

# The first line about a wait comes after 10 s, at the next look.
SAID_S = 13.0
SOON_S = 8.0


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"x" * size)
    os.set_blocking(pipe, True)


def wait_for_a_death(rank: int, path: str) -> dict[str, Any]:
    group = dist.new_group()
    if rank == 1:
        time.sleep(SAID_S)
        Path(path).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    reader, writer = os.pipe()
    fill(writer)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    error = caught(lambda: dist.all_reduce(torch.ones(4), group=group))
    dist.destroy_process_group(group)
    took_s = time.monotonic() - float(Path(path).read_text())
    os.dup2(stderr, 2)
    lines = b""
    while not lines.endswith(b"\n"):  # now the line that was blocked gets through
        lines += os.read(reader, 1 << 16)
    return {**error, "took_s": took_s, "lines": lines.decode().lstrip("x")}


def test_a_death_is_seen_while_a_line_is_blocked(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fresh": True, "may_die": [1], "group_timeout_s": 60.0}
    error, _ = run_ranks(2, wait_for_a_death, str(tmp_path / "died"), **options)
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    assert error["took_s"] < SOON_S, error
    assert error["lines"].startswith("ringcomm rank 0/2: idle for 1"), error
