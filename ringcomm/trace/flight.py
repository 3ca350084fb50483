"""The flight recorders of processes of this machine: their last calls, always on."""

import contextlib
import faulthandler
import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

from ringcomm.descriptors import above_standard
from ringcomm.trace.layout import NUM_BYTES, Record, parse

# The signal on which a process with a group writes its threads' Python stacks to a memfd.
STACK_SIGNAL = signal.SIGRTMAX - 3
MEMFD, STACKS_MEMFD = "ringcomm-flight", "ringcomm-stacks"


def mapped_records(pid: int | str = "self") -> tuple[Record | None, list[Record]]:
    """The records that a process maps: its own, and those of its peers, also of ended ones.

    Its own is the one of which it has the descriptor: pids of other PID namespaces may be equal. A
    forked child has its parent's. Raises OSError where its memory may not be read.
    """
    found: dict[str, int] = {}  # address by inode
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = re.fullmatch(rf"(\w+)-\S+ \S+ 0+ \S+ (\d+)\s+/memfd:{MEMFD} .*", line)
        if fields is not None:
            found[fields[2]] = int(fields[1], 16)
    opened = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # just closed
            opened.add(str(entry.stat().st_ino))
    own, peers = None, []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for inode, address in found.items():
            # Another version's, or one that another thread has just unmapped.
            with contextlib.suppress(OSError, ValueError):
                record = parse(functools.partial(os.pread, memory.fileno(), NUM_BYTES, address))
                if inode in opened:
                    own = record
                else:
                    peers.append(record)
    return own, peers


@functools.cache
def offer_stacks() -> None:
    """Lets `ringcomm doctor --job` ask this process for its Python stacks, unless it cannot."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            file: Any = above_standard(os.memfd_create(STACKS_MEMFD))
            faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
