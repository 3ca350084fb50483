"""A receive into a larger tensor than the message.

https://github.com/pytorch/pytorch/issues/113376, https://github.com/NVIDIA/nccl/issues/1938: Gloo
and MPI write the beginning, NCCL hangs. Here it is an error that names both sizes, and with
RINGCOMM_AS_GLOO=1 what Gloo does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import TRANSPORTS, caught

# In an envelope of a message or a slot of a link, and in several.
SIZES = (0, 3, 5000, 400_000)


def receive(rank: int, room: int) -> Any:
    """Rank 0 sends all sizes; rank 1 has room for more, but for the last one."""
    if rank == 0:
        for size in SIZES:
            for value in range(4):
                dist.send(torch.full((size,), float(value)), 1, tag=value)
        return caught(lambda: (dist.send(torch.ones(room + 1), 1), dist.barrier()))
    for size in SIZES:
        found = []
        for value in range(4):
            x = torch.full((room,), -1.0)
            columns = torch.full((room, 2), -1.0)
            y = columns[:, 0] if value == 1 else x
            if value == 2:
                assert dist.recv(y, None, tag=value) == 0
            elif value == 3:
                work = dist.irecv(y, 0, tag=value)
                assert work is not None
                work.wait()
            else:
                dist.recv(y, 0, tag=value)
            found.append(bool((y[:size] == value).all()) and bool((y[size:] == -1).all()))
            found.append(bool((columns[:, 1] == -1).all()))
        assert all(found), (size, found)
    return caught(dist.recv, torch.zeros(room), 0)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_as_gloo_the_beginning_is_written(name: str) -> None:
    env = {**(TRANSPORTS[name] or {}), "RINGCOMM_AS_GLOO": "1"}
    room = max(SIZES)
    for error in run_ranks(2, receive, room, fresh=True, env=env):
        assert error["type"] == "MismatchError"
        assert f"{4 * room + 4} bytes" in error["text"]


def receive_once(rank: int) -> Any:
    if rank == 0:
        dist.send(torch.ones(3), 1)
        return caught(dist.recv, torch.ones(1), 1)
    return caught(dist.recv, torch.zeros(8), 0)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_otherwise_it_is_an_error_with_both_sizes(name: str) -> None:
    for error in run_ranks(2, receive_once, fresh=True, env=TRANSPORTS[name]):
        assert error["type"] == "MismatchError"
        assert "12 bytes" in error["text"]
        assert "receives 32" in error["text"]
