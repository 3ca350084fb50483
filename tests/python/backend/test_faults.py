"""Ranks that die, leave, are late, interrupted or forked: who learns of it, how soon, how."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import caught

# A peer's death is seen at once by the hub and looked for by a waiter every 20 ms; the rest is for
# busy machines.
SOON_S = 2.0


def timed(fn: Callable[[], Any]) -> dict[str, Any]:
    begin = time.monotonic()
    error = caught(fn)
    return {**error, "seconds": time.monotonic() - begin}


def large() -> Any:
    return dist.all_reduce(torch.ones(3_000_000))


def waits() -> dict[str, Callable[[], Any]]:
    """Blocking calls in which a rank may be when another dies; rank 1 is the one that will."""
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
        "all_reduce_large": large,
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(torch.ones(10), 1),
        "recv": lambda: dist.recv(torch.ones(10), 1),
        "recv_any": lambda: dist.recv(torch.ones(10), None),
        "send": lambda: dist.send(torch.ones(10_000_000), 1),
        "async": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
        "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
    }


def lose_rank_1(rank: int, name: str, how: str) -> list[dict[str, Any]]:
    dist.barrier()
    if rank == 1:
        time.sleep(0.15)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(0)
        else:
            dist.destroy_process_group()
            time.sleep(1.0)  # alive, but gone
            return []
    return [timed(waits()[name]), timed(lambda: dist.all_reduce(torch.ones(2)))]


def check_loss(results: list[Any], name: str) -> None:
    for rank, errors in enumerate(results):
        if rank == 1:
            continue
        first, later = errors
        assert first["type"] == "PeerDiedError", (rank, first)
        assert first["rank"] == 1
        assert first["pid"] > 0
        assert "rank 1" in first["text"]
        assert first["seconds"] < 0.3 + SOON_S
        if name in ("all_reduce", "all_reduce_large", "barrier", "broadcast"):
            assert first["op"] == name.removesuffix("_large")
            assert first["seq"] == 1
        assert later["type"] == "PeerDiedError"
        assert later["seconds"] < SOON_S
        assert later["text"] == first["text"] or name in ("future",)


# With 3 ranks a receive from any source may still be served.
KILLED = [(2, name) for name in sorted(waits())] + [
    (3, name) for name in sorted(waits()) if name != "recv_any"
]


@pytest.mark.parametrize(("world_size", "name"), KILLED)
def test_killed_rank(world_size: int, name: str) -> None:
    results = run_ranks(world_size, lose_rank_1, name, "kill", fresh=True, may_die=[1])
    check_loss(results, name)


@pytest.mark.parametrize("name", ["all_reduce", "recv", "async"])
def test_rank_that_exits(name: str) -> None:
    check_loss(run_ranks(3, lose_rank_1, name, "exit", fresh=True, may_die=[1]), name)


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_rank_that_destroys_the_group(name: str) -> None:
    check_loss(run_ranks(2, lose_rank_1, name, "destroy", fresh=True), name)


def die_after_the_last(rank: int) -> None:
    """What a rank sent or published before its end arrives all the same."""
    if rank == 1:
        dist.send(torch.arange(10), 0)
        dist.all_reduce(torch.ones(10))
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(10)
    time.sleep(0.5)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    received = torch.zeros(10, dtype=torch.int64)
    dist.recv(received, 1)
    assert received.tolist() == list(range(10))


def test_last_words_arrive() -> None:
    for _ in range(3):
        run_ranks(2, die_after_the_last, fresh=True, may_die=[1])


# ---- time-outs


def be_late(rank: int, name: str) -> dict[str, Any]:
    dist.barrier()
    if rank == 1:
        time.sleep(1.3)
        return {}
    return timed(waits()[name])


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "recv", "recv_any", "async"])
def test_late_rank(name: str) -> None:
    results = run_ranks(3, be_late, name, fresh=True, group_timeout_s=0.6)
    for rank in (0, 2):
        assert results[rank]["type"] == "CollectiveTimeoutError", results[rank]
        assert 0.5 < results[rank]["seconds"] < 0.6 + SOON_S
        assert "600 ms" in results[rank]["text"]
        if name == "recv_any":
            assert "waited for any rank" in results[rank]["text"]
        else:
            assert results[rank]["rank"] == 1
            assert "rank 1" in results[rank]["text"]


def wait_shortly(rank: int) -> None:
    """A wait that gives up leaves the work going; it may be waited for again."""
    tensor = torch.ones(4)
    if rank == 1:
        time.sleep(1.0)
    work: Any = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(TimeoutError, match="100 ms"):
            work.wait(datetime.timedelta(milliseconds=100))
        assert not work.is_completed()
    assert work.wait(datetime.timedelta(seconds=10))
    assert tensor.tolist() == [2, 2, 2, 2]
    if rank == 0:
        receive: Any = dist.irecv(tensor, 1)
        with pytest.raises(TimeoutError, match="100 ms"):
            receive.wait(datetime.timedelta(milliseconds=100))
        dist.barrier()
        receive.wait()
        assert tensor.tolist() == [5, 5, 5, 5]
    else:
        dist.barrier()
        dist.send(torch.full((4,), 5.0), 0)


def test_wait_with_a_limit() -> None:
    run_ranks(2, wait_shortly, fresh=True)


def miss_rendezvous(rank: int, folder: str) -> dict[str, Any]:
    if rank == 1:
        return {}
    return caught(
        lambda: dist.init_process_group(
            "ringcomm",
            store=dist.FileStore(folder + "/store", 2),
            rank=0,
            world_size=2,
            timeout=datetime.timedelta(seconds=1),
        )
    )


def test_rank_that_never_comes(tmp_path: Any) -> None:
    error, _ = run_ranks(2, miss_rendezvous, str(tmp_path), backend=None, fresh=True)
    assert error["type"] == "CollectiveTimeoutError", error
    assert error["rank"] == 1
    assert "rank 1 did not join" in error["text"]


# ---- ranks that end while a group is made


def end_process(how: str) -> None:
    if how == "exec":
        os.execv("/bin/sleep", ["sleep", "60"])
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def kill_named(error: dict[str, Any]) -> None:
    """Ends what the rank that an error names has become."""
    pid = error.get("pid", -1)
    if pid > 1:  # kill(-1) would end every process
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class CountingStore(dist.Store):
    """A FileStore that ends its process behind the n-th operation, counted from the first set()."""

    def __init__(
        self, store: Any, end_behind: int, how: str, whole: CountingStore | None = None
    ) -> None:
        super().__init__()
        self._store = store
        self._end_behind = end_behind
        self._how = how
        self._whole = whole or self
        self._clones: list[CountingStore] = []  # for C++, which holds no Python object
        self.num_operations = 0

    def _count(self) -> None:
        whole = self._whole
        whole.num_operations += 1
        if whole.num_operations == self._end_behind:
            end_process(self._how)

    def clone(self) -> Any:
        copy = CountingStore(self._store.clone(), self._end_behind, self._how, self._whole)
        self._whole._clones.append(copy)
        return copy

    def add(self, key: str, amount: int) -> int:
        value: int = self._store.add(key, amount)
        self._count()
        return value

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self._store.wait(keys, *timeout)
        self._count()

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)
        self._count()

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count()
        return value

    def check(self, keys: list[str]) -> bool:
        is_there = self._store.check(keys)
        if is_there:  # how often a rank asks in vain is a matter of time
            self._count()
        return is_there


def make_group_and_die(rank: int, path: str, victim: int, end_behind: int, how: str) -> Any:
    """What the first group and its first barrier come to, and this rank's operations."""
    store = CountingStore(dist.FileStore(path, 3), end_behind if rank == victim else 0, how)

    def make_and_use() -> None:
        dist.init_process_group("ringcomm", store=store, rank=rank, world_size=3)
        dist.barrier()

    error, num_operations = timed(make_and_use), store.num_operations
    if how == "exec":
        time.sleep(0.5)  # the others see the same
        kill_named(error)
    return error, num_operations


def die_behind_operations(tmp_path: Any, victim: int, how: str, sample: int, env: Any) -> None:
    """Behind every `sample`-th operation, or every one where RINGCOMM_ALL_DEATHS asks for it."""
    kind: dict[str, Any] = {"backend": None, "fresh": True, "env": env}
    results = run_ranks(3, make_group_and_die, str(tmp_path / "0"), victim, 0, how, **kind)
    num_operations = results[victim][1]
    assert num_operations >= 5
    stride = 1 if "RINGCOMM_ALL_DEATHS" in os.environ else sample
    for end_behind in range(1, num_operations + 1, stride):
        args = (victim, end_behind, how)
        path = str(tmp_path / str(end_behind))
        results = run_ranks(3, make_group_and_die, path, *args, may_die=[victim], **kind)
        if results[victim] is not None:  # this time it came to its end with fewer operations
            assert end_behind > num_operations // 2
            continue
        for rank in {0, 1, 2} - {victim}:
            error, _ = results[rank]
            assert error.get("type") == "PeerDiedError", (end_behind, rank, error)
            assert error["rank"] == victim, (end_behind, rank, error)
            # From its own start on: also the waits for the others' imports.
            assert error["seconds"] < 1 + SOON_S, (end_behind, rank, error)


@pytest.mark.parametrize("victim", [0, 2])
def test_death_behind_each_operation_of_the_store(tmp_path: Any, victim: int) -> None:
    die_behind_operations(tmp_path, victim, "kill", 1, None)


def make_group_after_death(rank: int) -> Any:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(lambda: dist.new_group([1, 0, 2], sort_ranks=False))


def test_death_before_a_new_group() -> None:
    """Known from the group of all ranks: nothing of rank 1 is in the store."""
    for result in run_ranks(3, make_group_after_death, fresh=True, may_die=[1])[::2]:
        assert result["type"] == "PeerDiedError", result
        assert result["rank"] == 0  # of the new group, where global rank 1 is the first
        assert result["seconds"] < SOON_S


def become_another_program(rank: int) -> Any:
    dist.barrier()
    if rank == 1:
        end_process("exec")
    return timed(dist.barrier)


def test_rank_that_execs() -> None:
    results = run_ranks(3, become_another_program, fresh=True, may_die=[1])[::2]
    kill_named(results[0])
    for result in results:
        assert result["type"] == "PeerDiedError", result
        assert result["rank"] == 1
        assert result["seconds"] < SOON_S


def interrupt_rendezvous(rank: int, path: str) -> tuple[str, float]:
    """Rank 1 never comes."""
    store = dist.FileStore(path, 2)
    if rank == 1:
        time.sleep(1.5)
        return "", 0.0
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    kind = "nothing"
    try:
        dist.init_process_group("ringcomm", store=store, rank=0, world_size=2)
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    return kind, time.monotonic() - begin


def test_ctrl_c_while_a_group_is_made(tmp_path: Any) -> None:
    (kind, seconds), _ = run_ranks(
        2, interrupt_rendezvous, str(tmp_path / "store"), backend=None, fresh=True
    )
    assert kind == "KeyboardInterrupt"
    assert seconds < 0.3 + SOON_S


# ---- Ctrl-C


def interrupt(rank: int, name: str) -> tuple[str, float, str]:
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        same = waits()["all_reduce" if name == "recv" else name]
        # Rank 0 may have published its part before it gave up: then the first call still succeeds.
        return ("", 0.0, (caught(same) or caught(same))["type"])
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    kind = "nothing"
    try:
        waits()[name]()
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    seconds = time.monotonic() - begin
    return (kind, seconds, caught(lambda: dist.all_reduce(torch.ones(3)))["type"])


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "recv", "async"])
def test_ctrl_c(name: str) -> None:
    check_interrupt(run_ranks(2, interrupt, name, fresh=True))


def check_interrupt(results: list[Any]) -> None:
    (kind, seconds, later), (_, _, of_other) = results
    assert kind == "KeyboardInterrupt"
    assert seconds < 0.3 + SOON_S
    # The group is no more, on both ranks.
    assert later == "RingcommError"
    assert of_other == "RingcommError"


# ---- use after the end, and in the wrong process


def use_destroyed(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    work: Any = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    dist.destroy_process_group()
    assert work.is_completed()
    assert work.wait()
    with pytest.raises(ValueError, match="destroyed"):
        backend.allreduce([torch.ones(2)], dist.AllreduceOptions())
    with pytest.raises(ValueError, match="destroyed"):
        backend.send([torch.ones(2)], 1 - rank, 0)


def test_use_after_destroy() -> None:
    run_ranks(2, use_destroyed, fresh=True)


def destroy_in_flight(rank: int) -> None:
    """destroy_process_group lets what is under way come to its end."""
    tensors = [torch.ones(200_000) for _ in range(5)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    for tensor in tensors:
        assert (tensor == 2).all()


def test_destroy_with_work_in_flight() -> None:
    run_ranks(2, destroy_in_flight, fresh=True)


def use_in_child(rank: int) -> str:
    """The child's error; the parent's group must not have noticed."""
    dist.all_reduce(torch.ones(2))
    dist.isend(torch.ones(2), 1 - rank)
    dist.recv(torch.ones(2), 1 - rank)
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        errors = [
            caught(lambda: dist.all_reduce(torch.ones(2))),
            caught(lambda: dist.all_reduce(torch.ones(2), async_op=True).wait()),
            caught(lambda: dist.send(torch.ones(2), 1 - rank)),
            caught(dist.destroy_process_group),
        ]
        lines = [error.get("text", "no error") for error in errors]
        os.write(write_fd, "\n".join(lines).encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd) as pipe:
        texts = pipe.read()
    os.waitpid(pid, 0)
    for _ in range(3):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2]
    return texts


def test_group_in_a_forked_child() -> None:
    for texts in run_ranks(2, use_in_child, fresh=True):
        lines = texts.splitlines()
        assert len(lines) == 4, lines
        assert all("fork" in line for line in lines[:3]), lines
        assert lines[3] == "no error"


def make_in_child(rank: int, folder: str) -> None:
    """A forked child may make groups of its own, and the parent goes on."""
    dist.all_reduce(torch.ones(2))
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            dist.destroy_process_group()
            store = dist.FileStore(folder + "/store", 2)
            dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            code = 0 if tensor.tolist() == [4, 4] else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]


def test_groups_of_a_forked_child(tmp_path: Any) -> None:
    run_ranks(2, make_in_child, str(tmp_path), fresh=True)
