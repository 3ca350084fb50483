"""Broadcasts between hosts over Gloo whose root does not wait: it goes on, ends, or is mistaken.

Without torch and Gloo, with all roots and calls that differ: tests/cpp/test_hosts_roots.cc.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import hosts, in_ranks
from test_errors import caught
from test_faults import end_process
from test_message_sizes import EAGER, MESSAGES, content

ENVS: dict[str, Any] = {"messages": MESSAGES, "hosts": hosts("ab")}


def broadcast(rank: int, num_bytes: int, call: int) -> None:
    """One from rank 0, whose bytes are checked."""
    given = content(0, call, num_bytes)
    taken = given.clone() if rank == 0 else torch.zeros(num_bytes, dtype=torch.uint8)
    dist.broadcast(taken, 0)
    assert taken.equal(given)


@in_ranks(2, ENVS, fresh=True, may_die="may_die")
@pytest.mark.parametrize("num_bytes", [1000, EAGER])
@pytest.mark.parametrize(
    ("how", "may_die"), [("exit", [0]), ("kill", [0]), ("destroy", [])], ids=str
)
def test_a_root_that_ends(rank: int, how: str, num_bytes: int) -> None:
    """The reader comes when the root has gone, and has its data.

    A process that ended after isend() took its message with it:
    https://github.com/pytorch/pytorch/issues/75512
    """
    for call in range(3):
        broadcast(rank, num_bytes, call)
    if rank == 0:
        broadcast(rank, num_bytes, 3)
        if how != "destroy":
            end_process(how)
        dist.destroy_process_group()
        return
    time.sleep(0.5)
    broadcast(rank, num_bytes, 3)
    error = caught(broadcast, rank, num_bytes, 4)
    assert (error["type"], error["rank"]) == ("PeerDiedError", 0), error


@in_ranks(2, ENVS)
def test_a_root_ahead_keeps_nothing(rank: int) -> None:
    """The memory of calls that the reader has not begun is that of one envelope."""
    broadcast(rank, EAGER, 0)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if rank == 1:
        time.sleep(0.3)
    taken = torch.zeros(EAGER, dtype=torch.uint8)
    for call in range(1000):
        if rank == 0:
            taken.fill_(call % 251)
        dist.broadcast(taken, 0)
        assert taken[0] == taken[-1] == call % 251
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib
    assert grown_kib < 1000 * EAGER // 1024 // 4, grown_kib


@in_ranks(2, ENVS, fresh=True)
@pytest.mark.parametrize("mistake", ["each the other", "each itself", "another size"])
def test_broadcasts_that_differ(rank: int, mistake: str) -> None:
    """Two calls of NCCL with the sizes and types of a report hang.

    https://github.com/NVIDIA/nccl/issues/147
    """
    root = {"each the other": 1 - rank, "each itself": rank}.get(mistake, 0)
    own = torch.zeros(53, dtype=torch.int64)
    if mistake == "another size" and rank == 1:
        own = torch.zeros(25_503_912, dtype=torch.float16)
    error = caught(lambda: (dist.broadcast(own, root), dist.barrier()))
    assert error["type"] == "MismatchError", error
    assert error["text"].count("broadcast") > 1, error
