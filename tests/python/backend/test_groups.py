"""Process groups of ringcomm: subgroups, meshes, many at once, again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from test_errors import TRANSPORTS


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
