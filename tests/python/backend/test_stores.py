"""Groups over one store again and again, and over stores that are written in Python.

Reported for torch's own at https://github.com/pytorch/pytorch/issues/55967 and 135712: the next
generation finds what the one before it has left. In the engine: tests/cpp/test_group.cc.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from failures import ENVS
from ranks import in_ranks, run_ranks
from stores import LIMIT, FolderStore, OfANewObject, OfItself, WatchedStore, make_group

# Longer than a new record of a rank is doubted.
LATE_S = 1.5
NEW_RANKS: dict[str, Any] = {"backend": None, "fresh": True}


def open_store(place: str) -> dist.Store:
    """A file that no store removes, or the port of a server."""
    if place.isdecimal():
        return dist.TCPStore("127.0.0.1", int(place), is_master=False, timeout=LIMIT)
    return dist.FileStore(place, -1)


@pytest.fixture(params=["file", slow("tcp")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of the store; the process of the test serves it."""
    if request.param == "file":
        yield str(tmp_path / "store")
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield str(server.port)


def sum_in_group(store: dist.Store, rank: int, size: int) -> None:
    make_group(store, rank, size)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 3
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [size * (size + 1.0)] * 3
    dist.destroy_process_group()


def run_generations(rank: int, place: str, sizes: list[int], late: int) -> None:
    """Every process is in each generation that has its rank; one comes late to each.

    No rank begins a generation before the one before it has ended.
    """
    store = open_store(place)
    for generation, size in enumerate(sizes):
        if rank < size:
            time.sleep(LATE_S * (generation > 0 and rank == late))
            sum_in_group(store, rank, size)
            store.set(f"ended/{generation}/{rank}", "")
        store.wait([f"ended/{generation}/{other}" for other in range(size)])


def run_one(rank: int, place: str, size: int, late: int) -> None:
    time.sleep(LATE_S * (rank == late))
    sum_in_group(open_store(place), rank, size)


@pytest.mark.parametrize("env", quick(ENVS, "shm"))
@pytest.mark.parametrize(
    ("sizes", "late"), [([3, 2, 3], 1), slow([2, 3, 2], 0), slow([2, 2, 2], 1), slow([3, 3], 2)]
)
def test_processes_that_live_on(env: str, sizes: list[int], late: int, place: str) -> None:
    run_ranks(3, run_generations, place, sizes, late, env=ENVS[env], **NEW_RANKS)


@pytest.mark.parametrize(
    ("sizes", "late"), [((3, 2), 1), slow((2, 3), 0), slow((2, 2), 0), slow((3, 2), 0)]
)
def test_new_processes(sizes: tuple[int, int], late: int, place: str) -> None:
    for generation, size in enumerate(sizes):
        run_ranks(size, run_one, place, size, late if generation else -1, **NEW_RANKS)


# ---- written in Python


@in_ranks(3, ENVS, **NEW_RANKS)
@pytest.mark.parametrize("kind", quick([FolderStore, OfANewObject, OfItself], FolderStore))
def test_a_store_with_what_gloo_asks_for_only(
    rank: int, kind: type[FolderStore], tmp_path: Path
) -> None:
    sum_in_group(kind(str(tmp_path)), rank, 3)


@in_ranks(4, env=ENVS["messages"], **NEW_RANKS)
def test_rank_0_alone_asks_the_store_about_every_end(rank: int, tmp_path: Path) -> None:
    """N ranks that ask about N others each made the start of large jobs slow over Gloo.

    https://github.com/pytorch/gloo/issues/419
    """
    asked: set[str] = set()

    def record(name: str, keys: list[str], result: Any) -> None:
        if name in ("get", "check"):
            asked.update(key for key in keys if "ringcomm/message_backend" in key)

    make_group(WatchedStore(dist.FileStore(str(tmp_path / "store"), 4), record), rank, 4)
    dist.barrier()
    ends = {int(key.rpartition("/")[2]) for key in asked if "/made/" in key}
    assert ends == ({0, 1, 2, 3} if rank == 0 else set()), asked
