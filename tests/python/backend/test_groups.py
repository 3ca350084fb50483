"""Process groups of ringcomm: subgroups, meshes, many at once, again and again."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, init_group
from test_errors import TRANSPORTS, caught


def sum_of(group: Any, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# ---- one backend for each device


@in_ranks(2, backend=None, fresh=True)
@pytest.mark.parametrize("backend", ["cpu:ringcomm,cuda:ringcomm", "cpu:ringcomm,cuda:gloo"])
def test_form_with_devices(rank: int, backend: str, tmp_path: Path) -> None:
    """One object serves several devices; beside another backend it serves its own."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).name() == "ringcomm"
    assert sum_of(None, rank) == 1
    assert sum_of(dist.new_group([0, 1]), 2) == 4


# ---- processes that have two default groups, as trainers and engines of RLHF have


@in_ranks(3, backend=None, fresh=True, may_die=[2])
def test_errors_number_ranks_as_their_group_does(rank: int, tmp_path: Path) -> None:
    """Ranks 1 and 2 of all are 0 and 1 elsewhere: https://github.com/vllm-project/vllm/issues/5477"""
    if rank == 0:
        init_group(0, 1, str(tmp_path / "trainer"), 60)
    else:
        init_group(rank - 1, 2, str(tmp_path / "engine"), 60)
    c10d: Any = dist.distributed_c10d
    place = {"group_name": "all", "timeout": timedelta(seconds=60)}
    store = dist.PrefixStore("all", dist.FileStore(str(tmp_path / "all"), 3))
    everyone, _ = c10d._new_process_group_helper(
        3, rank, [], dist.Backend("ringcomm"), store, **place
    )
    c10d._world.pg_group_ranks[everyone] = {number: number for number in range(3)}
    assert sum_of(everyone, 1) == 3
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    of_all = caught(sum_of, everyone, 1)
    assert (of_all["type"], of_all["rank"]) == ("PeerDiedError", 2), of_all
    assert "rank 2 (pid" in of_all["text"], of_all
    if rank == 1:
        of_engine = caught(sum_of, None, 1)
        assert (of_engine["type"], of_engine["rank"]) == ("PeerDiedError", 1), of_engine
        assert "rank 1 (pid" in of_engine["text"], of_engine


# ---- subgroups; in use all at once: test_random_sequences.py


@in_ranks(4, TRANSPORTS)
def test_ways_to_make_groups(rank: int) -> None:
    pair, _ = dist.new_subgroups(2)
    assert sum_of(pair, rank) == (1 if rank < 2 else 5)
    crossed, _ = dist.new_subgroups_by_enumeration([[3, 0], [1, 2]])
    assert sum_of(crossed, 10**rank) == (1001 if rank in (0, 3) else 110)
    if rank in (1, 3):  # the other ranks do not even call
        local = dist.new_group([1, 3], use_local_synchronization=True)
        assert sum_of(local, rank) == 4
        dist.destroy_process_group(local)
    assert sum_of(None, rank) == 6
