"""A store that does not answer, is slow, or has ended: what every step of a group does.

The last rank serves the store and is not of the group. SIGSTOP makes it what a host without power
or network is: connections stay, and nothing is answered.
"""

from __future__ import annotations

import contextlib
import datetime
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
from cases import quick, slow
from failures import timed
from ranks import hosts, run_ranks
from test_message_deaths import CountingStore

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


class SlowStore(CountingStore):
    """Takes `delay_s` for each operation."""

    delay_s = 0.0

    def __init__(self, store: Any) -> None:
        super().__init__(store, 0, "")

    def clone(self) -> Any:
        self._clones.append(type(self)(self._store.clone()))
        return self._clones[-1]

    def _count(self) -> None:
        time.sleep(SlowStore.delay_s)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return bool(self._store.check(keys))


class StuckStore(SlowStore):
    """Does not answer when the backend for messages is made."""

    def add(self, key: str, amount: int) -> int:
        if "message_backend" in key:
            time.sleep(600)
        return super().add(key, amount)


def meet(folder: str, name: str, num_ranks: int) -> None:
    """Returns when all ranks are here, without the store."""
    (Path(folder) / f"{name}.{os.getpid()}").touch()
    while len(list(Path(folder).glob(f"{name}.*"))) < num_ranks:
        time.sleep(0.01)


def init(
    store: Any,
    rank: int,
    num_ranks: int,
    options: Options | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "ringcomm",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        pg_options=options,
    )


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
    store: Any = SlowStore(server.store) if how == "slow" else server.store

    def spoil() -> None:
        if how == "slow":
            SlowStore.delay_s = 0.7
        else:
            server.spoil(how)

    if step == "init":
        meet(folder, "ready", num_ranks)
        spoil()
        results = timed(init, store, rank, num_ranks)
    else:
        init(store, rank, num_ranks)
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


@pytest.mark.parametrize(
    ("step", "env", "how"),
    quick(
        [
            (step, *each)
            for step in ("late", "in_wait")
            for each in [*product(["--"], ["stopped", "dead", "slow"]), ("aba", "stopped")]
        ],
        ("late", "--", "dead"),
        ("in_wait", "aba", "stopped"),
    ),
)
def test_a_late_rank_is_named_at_the_timeout(env: str, how: str, step: str, tmp_path: Path) -> None:
    results = results_of(tmp_path, env, how, step)
    for error in [results[0], *results[2:]]:
        assert error["seconds"] < TIMEOUT_S + SOON_S
        if how == "dead":
            assert "store can no longer be reached" in error["text"]
        else:
            assert error["type"] == "CollectiveTimeoutError", error
            assert error["rank"] == 1 or env == "aba"  # one rank of a host may blame another


@pytest.mark.parametrize(
    ("env", "how"), [("--", "stopped"), slow("--", "slow"), ("aba", "stopped")]
)
def test_calls_and_the_end_of_a_group(env: str, how: str, tmp_path: Path) -> None:
    for result in results_of(tmp_path, env, how, "between_calls"):
        assert "type" not in result
        assert result["seconds"] < SOON_S


@pytest.mark.parametrize("how", [slow("stopped"), "dead", "slow"])
def test_an_abort(how: str, tmp_path: Path) -> None:
    first, second = results_of(tmp_path, "--", how, "aborted")
    assert first["seconds"] < SOON_S
    # Whoever waits hears of it by the store alone, or sees that its messages have ended.
    assert second["type"] in ("PeerDiedError", "RingcommError", "CollectiveTimeoutError"), second
    assert second["rank"] in (0, -1, None)
    assert second["seconds"] < TIMEOUT_S + SOON_S


@pytest.mark.parametrize("how", ["dead", slow("stopped")])
def test_a_new_group(how: str, tmp_path: Path) -> None:
    for errors in results_of(tmp_path, "--", how, "new_group"):
        for error in errors:
            assert error["seconds"] < TIMEOUT_S + SOON_S
            if how == "stopped":
                assert error["type"] == "CollectiveTimeoutError", error
                assert "store does not answer" in error["text"]
            else:
                assert error["type"] == "DistNetworkError", error


def sum_over_a_slow_store(rank: int, folder: str) -> float:
    SlowStore.delay_s = 0.08
    store = SlowStore(dist.FileStore(f"{folder}/slow", 2))
    init(store, rank, 2, Options(transport="messages"), timeout_s=60.0)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    return float(x)


def test_a_slow_store_is_waited_for(tmp_path: Path) -> None:
    sums = run_ranks(2, sum_over_a_slow_store, str(tmp_path), backend=None, fresh=True)
    assert sums == [3.0, 3.0]


def error_of_a_stuck_store(rank: int, folder: str) -> Any:
    store = StuckStore(dist.FileStore(f"{folder}/stuck", 2))
    return timed(init, store, rank, 2, Options(transport="messages"))


def test_a_store_that_is_silent_when_messages_begin(tmp_path: Path) -> None:
    for error in run_ranks(2, error_of_a_stuck_store, str(tmp_path), backend=None, fresh=True):
        assert error["type"] == "CollectiveTimeoutError", error
        assert "did not connect to the others in 3000 ms" in error["text"]


@pytest.mark.parametrize("env", ["aa", slow("--")])
def test_the_first_group(env: str, tmp_path: Path) -> None:
    for error in results_of(tmp_path, env, "stopped", "init"):
        assert error["type"] == "CollectiveTimeoutError", error
        assert "store does not answer" in error["text"]
        assert error["seconds"] < TIMEOUT_S + SOON_S


@pytest.mark.parametrize(
    ("env", "how"),
    quick(product(["--", "aa"], ["stopped", "dead", "slow"]), ("--", "stopped"), ("aa", "stopped")),
)
def test_a_death_and_shrink(env: str, how: str, tmp_path: Path) -> None:
    (error, refusal, size), _ = results_of(tmp_path, env, how, "shrunk")
    assert (error["type"], error["rank"]) == ("PeerDiedError", 1), error
    is_shm = env == "aa"
    assert (refusal.get("type"), size) == ((None, 1) if is_shm else ("NotImplementedError", 2))
    assert max(error["seconds"], refusal["seconds"]) < SOON_S
