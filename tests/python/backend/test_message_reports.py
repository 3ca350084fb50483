"""What users of c10d and Gloo reported, over messages and several hosts."""

from __future__ import annotations

import datetime
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_programs import run_program
from ranks import run_ranks
from test_errors import ENVS, caught
from test_faults import timed

import ringcomm

SOON_S = 10.0
MESSAGES = ("messages", "hosts")


def first_call_of_a_subgroup(rank: int) -> Any:
    group = dist.new_group([0, 1, 2])
    dist.barrier()
    if rank == 0:
        os._exit(86)
    return timed(lambda: dist.all_reduce(torch.ones(1), group=group))


@pytest.mark.parametrize("env", MESSAGES)
def test_a_rank_ends_before_the_first_call_of_a_subgroup(env: str) -> None:
    """https://github.com/pytorch/gloo/issues/520"""
    options: dict[str, Any] = {"fresh": True, "may_die": [0], "env": ENVS[env]}
    for error in run_ranks(3, first_call_of_a_subgroup, **options)[1:]:
        assert (error["type"], error["rank"]) == ("PeerDiedError", 0), error
        assert error["seconds"] < SOON_S


def shapes(rank: int) -> Any:
    x = torch.ones(3, 3 if rank == 2 else 4)
    return caught(dist.all_to_all_single, torch.empty_like(x), x)


@pytest.mark.parametrize("env", MESSAGES)
def test_all_to_all_single_of_different_shapes(env: str) -> None:
    """https://github.com/pytorch/pytorch/issues/158016"""
    for error in run_ranks(3, shapes, fresh=True, env=ENVS[env]):
        assert error["type"] == "MismatchError", error


def destroyed_while_one_computes(rank: int) -> Any:
    """And while another thread of Python goes on."""
    group = dist.new_group([0, 1, 2])
    dist.barrier()
    if rank == 2:
        time.sleep(2.0)
        return {}
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    ticks = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    begin = time.monotonic()
    backend = group._get_backend(torch.device("cpu"))
    backend.abort()
    dist.destroy_process_group(group)
    del work, backend
    seconds = time.monotonic() - begin
    ended.set()
    ticking.join()
    return {
        "seconds": seconds,
        "pause": max([b - a for a, b in itertools.pairwise(ticks)], default=0.0),
    }


@pytest.mark.parametrize("env", MESSAGES)
def test_a_group_is_given_up_while_a_rank_computes(env: str) -> None:
    """https://github.com/pytorch/pytorch/issues/132696 and 154976."""
    for result in run_ranks(3, destroyed_while_one_computes, fresh=True, env=ENVS[env])[:2]:
        assert result["seconds"] < SOON_S
        assert result["pause"] < SOON_S


def monitored(rank: int) -> Any:
    if rank != 0:
        return {}
    timeout = datetime.timedelta(seconds=1)
    return timed(lambda: ringcomm.monitored_barrier(None, timeout, wait_all_ranks=True))


@pytest.mark.parametrize("env", MESSAGES)
def test_a_monitored_barrier_has_one_timeout_for_all_ranks(env: str) -> None:
    """https://github.com/pytorch/pytorch/pull/55010"""
    error = run_ranks(3, monitored, fresh=True, env=ENVS[env])[0]
    assert error["seconds"] < 1 + SOON_S
    assert "1" in error["text"]
    assert "2" in error["text"]


PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, ringcomm
rank, folder = int(sys.argv[1]), sys.argv[2]
how = sys.argv[3]
if how == "served":
    port = folder + "/port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        open(port + ".new", "w").write(str(store.port)); os.rename(port + ".new", port)
    else:
        while not os.path.exists(port): time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(open(port).read()), 2, False)
else:
    store = dist.FileStore(folder + "/store", 2)
options = ringcomm.Options(transport="messages")
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2, pg_options=options)
dist.barrier()
if how == "served":
    if rank == 1: time.sleep(2)  # rank 0, and with it the store, has ended
    dist.destroy_process_group()
elif how == "unwaited":
    kept = [dist.irecv(torch.ones(4), 1 - rank, tag=tag) for tag in range(3)]
print("end", rank, flush=True)
"""


@pytest.mark.parametrize("how", ["served", "unwaited"])
def test_the_end_of_a_program(how: str, tmp_path: Path) -> None:
    """The store's server ends first; receives that nobody waits for are left.

    https://github.com/sgl-project/sglang/issues/20859, https://github.com/pytorch/pytorch/pull/179291
    """
    for rank, ended in enumerate(run_program(PROGRAM, tmp_path, how)):
        assert ended.returncode == 0, ended
        assert f"end {rank}" in ended.out, ended
