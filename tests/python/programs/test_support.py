"""The table of calls in docs/reference/backend.md, cell by cell, over each transport and dtype.

The calls and their model are those of the random sequences, tests/python/backend.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sequence_side import MOVED, REDUCED, Call
from sequences import POOLS, WAIT_S, WORLD, Case, run_case

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "backend.md"
DTYPES = {"numbers": REDUCED, "any": MOVED, "–": ("float32",)}
# Kinds of calls that have another name, or several names, in the table.
KINDS = {
    "all_reduce_coalesced": "coalesced",
    "send": "send_and_receive",
    "recv": "send_and_receive",
    "isend": "messages",
    "irecv": "messages",
    "batch_isend_irecv": "messages",
    "monitored_barrier": "barrier",
}


def claims() -> list[tuple[list[str], list[str], str]]:
    """Of each row: the calls, the transports that have them, the name of the dtypes."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("<!-- support: begin -->")[1].split("<!-- support: end -->")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line
    ]
    transports = header[1:-1]
    return [
        (
            re.findall(r"`(\w+)`", row[0]),
            [name for name, cell in zip(transports, row[1:-1], strict=True) if cell == "yes"],
            row[-1],
        )
        for row in rows
    ]


@pytest.mark.parametrize("transport", ["shm", "messages"])
def test_what_the_table_claims(transport: str, tmp_path: Path) -> None:
    calls = []
    for names, transports, dtypes in claims():
        for name, dtype in product(names if transport in transports else [], DTYPES[dtypes]):
            is_batch, is_monitored = name == "batch_isend_irecv", name == "monitored_barrier"
            kind = KINDS.get(name, name)
            options: dict[str, Any] = {"dtype": dtype, "size": 6, "root": 1}
            calls.append(Call(kind, **options, variety=int(is_batch), uneven=int(is_monitored)))
    assert len(calls) > 200
    np.zeros(WORLD, np.int64).tofile(tmp_path / "marks")
    args = Case(tuple(dict.fromkeys(calls)), pool=transport), 1, str(tmp_path / "marks")
    env = POOLS[transport]
    assert run_ranks(WORLD, run_case, *args, env=env, group_timeout_s=WAIT_S) == [[]] * WORLD
