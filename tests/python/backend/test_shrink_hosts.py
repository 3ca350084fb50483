"""ringcomm.shrink() of groups over messages: over several hosts, or with transport="p2p".

What the ranks do is that of test_shrink.py, whose groups share memory. Two hosts are two identities
on this machine (RINGCOMM_HOST_ID).
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import ENVS, caught
from test_shrink import (
    SOON_S,
    die,
    die_in_shrink,
    fail,
    groups_after_a_death,
    interrupt_one,
    leave,
    lose,
    lose_one_by_one,
    raise_in_one,
    shrunk,
)

import ringcomm
from ringcomm import _C
from ringcomm.survivors import agreement
from ringcomm.torch_names import backend_of


def hosts(places: str) -> list[dict[str, str]]:
    """Of each rank, the letter of its host."""
    return [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in places]


@pytest.mark.parametrize(
    ("places", "victims"),
    [
        ("aabb", [0]),
        ("abab", [3]),
        ("aabb", [2, 3]),  # a whole host, without the lowest rank
        ("aabb", [0, 1]),  # and with it
        ("aaaabbbb", [0, 5]),
        ("abc", [0, 1]),
    ],
)
def test_a_death(places: str, victims: list[int]) -> None:
    results = run_ranks(
        len(places), lose, victims, fresh=True, may_die=victims, env=hosts(places)
    )
    left = [rank for rank in range(len(places)) if rank not in victims]
    for idx, rank in enumerate(left):
        result = results[rank]
        assert (result["ranks"], result["rank"], result["size"]) == (left, idx, len(left))
        assert result["is_default"]
        assert result["seconds"] < SOON_S


def test_a_death_over_messages_on_one_host() -> None:
    results = run_ranks(4, lose, [0], fresh=True, may_die=[0], env=ENVS["p2p"])
    assert [result["ranks"] for result in results[1:]] == [[1, 2, 3]] * 3


def test_one_death_after_another() -> None:
    kind: dict[str, Any] = {"fresh": True, "may_die": [3, 0, 2], "env": hosts("ababa")}
    results = run_ranks(5, lose_one_by_one, **kind)
    for rank in (1, 4):
        assert results[rank] == [[0, 1, 2, 4], [1, 2, 4], [1, 4]]
