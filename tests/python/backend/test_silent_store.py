"""A store that does not answer, is slow, or has ended: what every step of a group does.

The last rank serves the store and is not of the group. SIGSTOP makes it what a host without power
or network is: connections stay, and nothing is answered.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick
from failures import caught, timed
from ranks import hosts, in_ranks, run_ranks
from stores import WatchedStore, make_group

import ringcomm
from ringcomm import Options
from ringcomm.torch_names import backend_of

TIMEOUT_S = 3.0
# What a question to the store may cost, and a busy machine.
SOON_S = 25.0
# Of the stores' own calls: a wait that has no other limit is seen.
STORE_TIMEOUT = datetime.timedelta(seconds=60)
Spoil = Callable[[], None]


class Server:
    """The process that serves the store, as the ranks of the group see it."""

    def __init__(self, folder: str) -> None:
        place = Path(folder) / "server"
        while not place.exists():
            time.sleep(0.01)
        port, pid = place.read_text().split()
        self._pid = int(pid)
        self.store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=STORE_TIMEOUT)

    def spoil(self, how: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # another rank has done it
            os.kill(self._pid, signal.SIGKILL if how == "dead" else signal.SIGSTOP)


def serve(folder: str) -> None:
    """Until this process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Path(folder) / "server.new"
    place.write_text(f"{store.port} {os.getpid()}")
    place.rename(place.with_suffix(""))
    time.sleep(600)


class Delay:
    """A watcher that takes its time for each operation."""

    seconds = 0.0

    def __call__(self, name: str, keys: list[str], result: Any) -> None:
        time.sleep(self.seconds)


def meet(folder: str, name: str, num_ranks: int) -> None:
    """Returns when all ranks are here, without the store."""
    (Path(folder) / f"{name}.{os.getpid()}").touch()
    while len(list(Path(folder).glob(f"{name}.*"))) < num_ranks:
        time.sleep(0.01)


def call() -> None:
    dist.all_reduce(torch.ones(4))


def late(rank: int, spoil: Spoil) -> Any:
    spoil()
    return {} if rank == 1 else timed(call)


def in_wait(rank: int, spoil: Spoil) -> Any:
    if rank != 1:
        return timed(call)
    time.sleep(0.5)
    return spoil()


def between_calls(rank: int, spoil: Spoil) -> Any:
    spoil()
    for _ in range(20):
        call()
    return timed(dist.destroy_process_group)


def aborted(rank: int, spoil: Spoil) -> Any:
    """In a thread, while another one holds the GIL and asks about the group."""
    spoil()
    if rank == 1:
        return timed(call)
    world: Any = dist.group.WORLD
    thread = threading.Thread(target=backend_of(world, torch.device("cpu")).abort)
    begin = time.monotonic()
    thread.start()
    while thread.is_alive():
        ringcomm.health()
        ringcomm.stats()
    return {"seconds": time.monotonic() - begin}


def new_group(rank: int, spoil: Spoil) -> Any:
    """Over messages and in shared memory; the groups that were there go on."""
    ranks = [0, 1]
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    shm = Options(transport="shm")
    shared = dist.new_group(ranks, timeout, pg_options=shm)
    spoil()
    errors = [
        timed(lambda: dist.new_group(ranks, timeout)),
        timed(lambda: dist.new_group(ranks, timeout, pg_options=shm)),
    ]
    call()
    dist.all_reduce(torch.ones(4), group=shared)
    return errors


def shrunk(rank: int, spoil: Spoil) -> Any:
    """Rank 1 is killed, and rank 0 goes on alone if it may."""
    spoil()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = [timed(call), timed(ringcomm.shrink)]
    return *errors, dist.get_world_size()


STEPS = {step.__name__: step for step in (late, in_wait, between_calls, aborted, new_group, shrunk)}


def run_step(rank: int, folder: str, num_ranks: int, how: str, step: str) -> Any:
    if rank == num_ranks:
        return serve(folder)
    server = Server(folder)
    delay = Delay()
    store: Any = WatchedStore(server.store, delay) if how == "slow" else server.store

    def spoil() -> None:
        if how == "slow":
            delay.seconds = 0.7
        else:
            server.spoil(how)

    if step == "init":
        meet(folder, "ready", num_ranks)
        spoil()
        results = timed(make_group, store, rank, num_ranks, TIMEOUT_S)
    else:
        make_group(store, rank, num_ranks, TIMEOUT_S)
        call()
        meet(folder, "ready", num_ranks)
        results = STEPS[step](rank, spoil)
    if step != "shrunk":
        meet(folder, "end", num_ranks)  # no rank sees another one end
    server.spoil("dead")
    return results


def results_of(tmp_path: Path, env: str, how: str, step: str) -> list[Any]:
    """Of the ranks, whose hosts are `env`'s letters."""
    num_ranks = len(env)
    args = (str(tmp_path), num_ranks, how, step)
    options: Any = {"may_die": [num_ranks, *([1] if step == "shrunk" else [])], "fresh": True}
    places = [*hosts(env), {}]
    return run_ranks(num_ranks + 1, run_step, *args, backend=None, env=places, **options)[:-1]


def check_late(results: list[Any], env: str, how: str) -> None:
    for error in [results[0], *results[2:]]:
        assert error["seconds"] < TIMEOUT_S + SOON_S
        if how == "dead":
            assert "store can no longer be reached" in error["text"]
        else:
            assert error["type"] == "CollectiveTimeoutError", error
            assert error["rank"] == 1 or env == "aba"  # one rank of a host may blame another


def check_calls(results: list[Any], env: str, how: str) -> None:
    for result in results:
        assert "type" not in result
        assert result["seconds"] < SOON_S


def check_abort(results: list[Any], env: str, how: str) -> None:
    first, second = results
    assert first["seconds"] < SOON_S
    # Whoever waits hears of it by the store alone, or sees that its messages have ended.
    assert second["type"] in ("PeerDiedError", "RingcommError", "CollectiveTimeoutError"), second
    assert second["rank"] in (0, -1, None)
    assert second["seconds"] < TIMEOUT_S + SOON_S


def check_new_group(results: list[Any], env: str, how: str) -> None:
    for error in itertools.chain.from_iterable(results):
        assert error["seconds"] < TIMEOUT_S + SOON_S
        kind = "CollectiveTimeoutError" if how == "stopped" else "DistNetworkError"
        assert error["type"] == kind, error
        assert how == "dead" or "store does not answer" in error["text"]


def check_init(results: list[Any], env: str, how: str) -> None:
    check_new_group([results], env, how)


def check_shrunk(results: list[Any], env: str, how: str) -> None:
    (error, refusal, size), _ = results
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    expected = (None, 1) if env == "aa" else ("NotImplementedError", 2)
    assert (refusal.get("type"), size) == expected
    assert max(error["seconds"], refusal["seconds"]) < SOON_S


CHECKS = {
    "late": check_late,
    "in_wait": check_late,
    "between_calls": check_calls,
    "aborted": check_abort,
    "new_group": check_new_group,
    "init": check_init,
    "shrunk": check_shrunk,
}
WAITS = [*product(["--"], ["stopped", "dead", "slow"]), ("aba", "stopped")]
ROWS = [
    *((step, *each) for step in ("late", "in_wait") for each in WAITS),
    *(("between_calls", *each) for each in WAITS if each != ("--", "dead")),
    *(("aborted", "--", how) for how in ("stopped", "dead", "slow")),
    *(("new_group", "--", how) for how in ("stopped", "dead")),
    *(("init", env, "stopped") for env in ("aa", "--")),
    *product(["shrunk"], ["--", "aa"], ["stopped", "dead", "slow"]),
]


@pytest.mark.parametrize(
    ("step", "env", "how"),
    quick(
        ROWS,
        *(("late", "--", "dead"), ("in_wait", "aba", "stopped"), ("new_group", "--", "dead")),
        *(("between_calls", "--", "stopped"), ("between_calls", "aba", "stopped")),
        *(("aborted", "--", "dead"), ("aborted", "--", "slow"), ("init", "aa", "stopped")),
        *(("shrunk", "--", "stopped"), ("shrunk", "aa", "stopped")),
    ),
)
def test_what_each_step_of_a_group_does(step: str, env: str, how: str, tmp_path: Path) -> None:
    """`env`: the hosts of the ranks."""
    CHECKS[step](results_of(tmp_path, env, how, step), env, how)


@in_ranks(2, backend=None, fresh=True)
def test_a_slow_store_is_waited_for(rank: int, tmp_path: Path) -> None:
    delay = Delay()
    delay.seconds = 0.08
    store = WatchedStore(dist.FileStore(str(tmp_path / "slow"), 2), delay)
    make_group(store, rank, 2, 60.0, Options(transport="messages"))
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3


def never_answer(name: str, keys: list[str], result: Any) -> None:
    if name == "add" and "message_backend" in keys[0]:
        time.sleep(600)


@in_ranks(2, backend=None, fresh=True)
def test_a_store_that_is_silent_when_messages_begin(rank: int, tmp_path: Path) -> None:
    store = WatchedStore(dist.FileStore(str(tmp_path / "stuck"), 2), never_answer)
    error = caught(make_group, store, rank, 2, TIMEOUT_S, Options(transport="messages"))
    assert error["type"] == "CollectiveTimeoutError", error
    assert "did not connect to the others in 3000 ms" in error["text"]
