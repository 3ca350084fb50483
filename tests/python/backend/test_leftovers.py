"""What ranks that are killed, and groups that are destroyed, leave behind: nothing.

In the engine alone: tests/cpp/test_group.cc. What the ranks of all tests leave: conftest.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from machines import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID
from ranks import in_ranks, init_group, run_ranks
from test_hard_machines import serve_store

import ringcomm

LIMIT_S = 50
REPEAT_S = 300
SHARED_BYTES = 64 << 20

# ---- ranks that are killed, in namespaces in which everything is theirs


def come_and_go(rank: int, turn: int) -> None:
    for number in itertools.count():
        init_group(rank, 2, f"/tmp/store-{turn}-{number}")
        dist.destroy_process_group()


def call(rank: int, turn: int) -> None:
    init_group(rank, 2, f"/tmp/store-{turn}")
    plain, shared = torch.ones(1 << 20), ringcomm.empty_shared(1 << 20).fill_(1)
    while True:
        for tensor in (plain, shared):
            dist.all_reduce(tensor.fill_(1))
        dist.all_reduce(plain, async_op=True).wait()
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, plain, 1 - rank), dist.P2POp(dist.irecv, shared, 1 - rank)]
        )[-1].wait()


def idle(rank: int, turn: int) -> None:
    init_group(rank, 2, f"/tmp/store-{turn}")
    shared = ringcomm.empty_shared(SHARED_BYTES, dtype=torch.uint8).fill_(1)
    dist.all_reduce(shared)
    Path(f"/tmp/store-{turn}-is-idle-{rank}").touch()
    signal.pause()


MOMENTS: dict[str, Callable[[int, int], None]] = {"init": come_and_go, "call": call, "idle": idle}


def shared_memory_bytes() -> int:
    """Of the whole system, with that of processes outside of the namespaces."""
    found = re.search(r"^Shmem: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert found
    return int(found[1]) << 10


def left_behind() -> list[str]:
    """All files, sockets and processes but this process, which is the first, and the stores."""
    folders = [Path(name) for name in ("/tmp", "/dev/shm", "/var/tmp")]
    files = [str(path) for folder in folders for path in folder.iterdir()]
    sockets = Path("/proc/net/unix").read_text().splitlines()[1:]
    pids = [f"pid {name}" for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return [*(file for file in files if not file.startswith("/tmp/store-")), *sockets, *pids]


def is_gone() -> bool:
    """The kernel frees what is in a closed socket a moment later."""
    return machines.comes_true(lambda: not left_behind(), 5)


def is_freed(most_bytes: int) -> bool:
    """Whether there is soon less shared memory than there was, by that of two ranks."""
    left_bytes = most_bytes - 3 * SHARED_BYTES // 2
    return machines.comes_true(lambda: shared_memory_bytes() <= left_bytes, 2)


def kill_again_and_again(moment: str, num_turns: int, seed: int) -> None:
    machines.make_mounts_private()
    machines.mount("proc", "/proc")
    for folder in ("/tmp", "/dev/shm", "/var/tmp"):
        machines.mount("tmpfs", folder)
    assert is_gone(), left_behind()
    wait_s = random.Random(seed)
    are_freed = []
    for turn in range(num_turns):
        pids = [machines.run_in_child(LIMIT_S, MOMENTS[moment], rank, turn) for rank in range(2)]
        if moment == "idle":
            while len(list(Path("/tmp").glob(f"store-{turn}-is-idle-*"))) < 2:
                time.sleep(0.01)
        time.sleep(wait_s.uniform(0, 0.2))
        are_seen = [any("ringcomm" in line for line in left_behind())]
        most_bytes = shared_memory_bytes()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [signal.SIGKILL] * 2
        assert is_gone(), left_behind()
        if moment == "idle":
            assert are_seen == [True]
            are_freed.append(is_freed(most_bytes))
    if are_freed:  # at some turns other programs may take as much
        assert sum(are_freed) > num_turns / 2, are_freed


def in_namespaces(_: int, moment: str, num_turns: int, seed: int) -> str:
    """What went wrong; "skip: ..." if no namespaces can be made, "fine" if all is well."""
    answers = machines.Answers()

    def told(body: Callable[..., Any], *args: Any) -> None:
        try:
            body(*args)
            said = "fine"
        except machines.Unavailable as reason:
            said = f"skip: {reason}"
        except BaseException as error:
            said = repr(error)
        answers.say(said)

    def enter() -> None:
        machines.enter_namespaces(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET)
        first = (told, kill_again_and_again, moment, num_turns, seed)
        os.waitpid(machines.run_in_child(LIMIT_S, *first), 0)

    os.waitpid(machines.run_in_child(LIMIT_S, told, enter), 0)
    return str(answers.read(1, LIMIT_S)[0])


@pytest.mark.parametrize("moment", quick(MOMENTS, "init", "call"))
def test_killed_ranks_leave_nothing(moment: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    options: dict[str, Any] = {"backend": None, "fresh": True, "timeout_s": LIMIT_S + 10}
    (said,) = run_ranks(1, in_namespaces, moment, 10, seed, **options)
    if said.startswith("skip: "):
        pytest.skip(said[6:])
    assert said == "fine"


# ---- groups that come and go in the same processes


def resources() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings of shared memory": sum("memfd:" in line for line in maps),
        "mappings": len(maps),
        "resident bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def grown(before: dict[str, int], num_turns: int) -> dict[str, tuple[int, int]]:
    """What there is more of than before. A joined thread may still be listed for a moment."""
    # Allocators may take more meanwhile, and torch keeps 170 bytes of each group. After ten seconds
    # a process begins the thread that returns memory of idle groups.
    slack = {"threads": 1, "mappings": 8, "resident bytes": (2 << 20) + 400 * num_turns}

    def more() -> dict[str, tuple[int, int]]:
        now = {name: (before[name], number) for name, number in resources().items()}
        return {name: n for name, n in now.items() if n[1] > n[0] + slack.get(name, 0)}

    machines.comes_true(lambda: not more(), 10)
    return more()


def use(group: Any, rank: int) -> None:
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert (tensor == 2).all()
    receive = dist.P2POp(dist.irecv, torch.empty(10), 1 - rank, group)
    # One work of each call, or one of all of them, as torch likes.
    sends = [dist.P2POp(dist.isend, tensor, 1 - rank, group), receive]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


def make_default_group(rank: int, folder: Path, turn: int) -> None:
    init_group(rank, 2, folder / f"store{turn}")
    use(None, rank)
    # All at once, in one of the first turns.
    for group in [dist.new_group() for _ in range(64 if turn == 1 else 1)]:
        dist.barrier(group)
    dist.destroy_process_group()


def make_subgroup(rank: int, folder: Path, turn: int) -> None:
    group = dist.new_group()
    use(group, rank)
    dist.destroy_process_group(group)


@contextlib.contextmanager
def store_of_its_own_process(rank: int, folder: Path) -> Iterator[dist.Store]:
    """A store keeps each group's keys: a FileStore in every rank, a TCPStore in its server."""
    ends = dist.FileStore(str(folder / "port"), 2)
    if rank == 0:
        port = os.pipe()
        pid = machines.run_in_child(REPEAT_S, serve_store, port[1])
        ends.set("port", os.read(port[0], 6).decode())
    yield dist.TCPStore("127.0.0.1", int(ends.get("port")), is_master=False)
    if rank == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@in_ranks(2, backend=None, fresh=True, timeout_s=REPEAT_S)
@pytest.mark.parametrize(
    ("name", "num_turns"),
    [
        *(("init_process_group", 200), ("new_group", 200)),
        *(slow("init_process_group", 1000), slow("new_group", 10_000)),
    ],
)
def test_nothing_grows(rank: int, name: str, num_turns: int, tmp_path: Path) -> None:
    """Memory did: https://github.com/pytorch/pytorch/issues/40400, and 107298."""
    make = {"init_process_group": make_default_group, "new_group": make_subgroup}[name]
    num_first = min(50, num_turns // 3)  # in which allocators and tables find their size
    with contextlib.ExitStack() as stack:
        if name == "new_group":
            store = stack.enter_context(store_of_its_own_process(rank, tmp_path))
            dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
        for turn in range(num_turns):
            if turn == num_first:
                before = resources()
            make(rank, tmp_path, turn)
        assert grown(before, num_turns) == {}
        if name == "new_group":
            dist.destroy_process_group()
