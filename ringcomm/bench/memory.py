"""What ringcomm's groups hold of this process's memory, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path

KIB = 1024
MEMFD = "/memfd:ringcomm"


def mapped_memory() -> dict[str, int]:
    """Bytes of ringcomm's shared memory in this process: mapped, resident, and its share of those.

    A page that n processes have counts 1/n in the share.
    """
    found = {"mapped_bytes": 0, "resident_bytes": 0, "share_bytes": 0}
    fields = {"Size": "mapped_bytes", "Rss": "resident_bytes", "Pss": "share_bytes"}
    is_ours = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = MEMFD in line
        elif is_ours and line.partition(":")[0] in fields:
            name, _, value = line.partition(":")
            found[fields[name]] += int(value.split()[0]) * KIB
    return found
