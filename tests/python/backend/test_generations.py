"""Groups that are made one after another over one store, without a prefix.

Reported for torch's own at https://github.com/pytorch/pytorch/issues/55967 and 135712: the next
generation finds what the one before it has left.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from failures import ENVS, caught
from ranks import run_ranks

# Longer than a new record of a rank is doubted.
LATE_S = 1.5
TIMEOUT_S = 30.0


def open_store(place: str) -> dist.Store:
    """A file that no store removes, or the port of a server."""
    if place.isdecimal():
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        return dist.TCPStore("127.0.0.1", int(place), is_master=False, timeout=timeout)
    return dist.FileStore(place, -1)


@pytest.fixture(params=["file", slow("tcp")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of the store; the process of the test serves it."""
    if request.param == "file":
        yield str(tmp_path / "store")
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield str(server.port)


def make_group(store: dist.Store, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=size, timeout=timeout)


def sum_in_group(store: dist.Store, rank: int, size: int) -> None:
    make_group(store, rank, size)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 3
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


@pytest.mark.parametrize("env", ["shm", slow("messages"), slow("hosts")])
@pytest.mark.parametrize(
    ("sizes", "late"), [([3, 2, 3], 1), slow([2, 3, 2], 0), slow([2, 2, 2], 1), slow([3, 3], 2)]
)
def test_processes_that_live_on(env: str, sizes: list[int], late: int, place: str) -> None:
    args = (place, sizes, late)
    run_ranks(3, run_generations, *args, backend=None, fresh=True, env=ENVS[env])


@pytest.mark.parametrize(
    ("sizes", "late"), [((3, 2), 1), slow((2, 3), 0), slow((2, 2), 0), slow((3, 2), 0)]
)
def test_new_processes(sizes: tuple[int, int], late: int, place: str) -> None:
    for generation, size in enumerate(sizes):
        args = (place, size, late if generation else -1)
        run_ranks(size, run_one, *args, backend=None, fresh=True)


def end_in(seconds: float) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def fail_to_make_a_group(rank: int, place: str, how: str) -> None:
    """Rank 2 never comes. The others wait for it too long, or are killed while they wait."""
    store = open_store(place)
    if how == "kill":
        end_in(1.0)
        make_group(store, rank, 3)
    assert caught(make_group, store, rank, 3, 1.0)["type"] == "CollectiveTimeoutError"


@pytest.mark.parametrize("how", ["late", slow("kill")])
def test_after_ranks_that_failed_to_make_a_group(how: str, place: str) -> None:
    """The rank that had not come is the first of the new processes."""
    options: dict[str, Any] = {"backend": None, "fresh": True}
    may_die = [0, 1] if how == "kill" else []
    run_ranks(2, fail_to_make_a_group, place, how, may_die=may_die, **options)
    run_ranks(3, run_one, place, 3, 0, **options)


def die_while_a_group_is_made(rank: int, place: str) -> dict[str, Any]:
    """Rank 1 comes and dies; the others look when it is dead."""
    store = open_store(place)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        end_in(1.0)
        make_group(store, rank, 3)
    pid = int(store.get("pid"))
    while Path(f"/proc/{pid}/exe").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    error = caught(make_group, store, rank, 3)
    return {**error, "seconds": time.monotonic() - begin}


@pytest.mark.parametrize("env", ["shm", slow("messages")])
def test_a_death_before_a_rank_looked_is_named(env: str, tmp_path: Path) -> None:
    args = (str(tmp_path / "store"),)
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [1], "env": ENVS[env]}
    for error in run_ranks(3, die_while_a_group_is_made, *args, **options)[::2]:
        assert error["type"] == "PeerDiedError", error
        assert error["rank"] == 1, error
        assert error["seconds"] < TIMEOUT_S - 10, error
