"""A rank that cannot make a group, or does not come to it: the others hear why, and of which."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import machines
import pytest
import torch
import torch.distributed as dist
from cases import slow
from failures import ENVS, TRANSPORTS, caught, end_process, kill_named, timed
from machines import limit_of_descriptors, limited, used_bytes
from ranks import in_ranks, init_group, run_ranks
from stores import EndsBehind, WatchedStore
from stores import make_group as make_watched_group

import ringcomm
from ringcomm import message_backend
from ringcomm.options import known_variables
from ringcomm.parallel.offload.file_store import open_scratch
from ringcomm.torch_names import TORCH_VERSION

# Of groups, by default 30 s. Nothing here may take as long.
TIMEOUT_S = 60.0
SOON_S = 20.0


def make_group(
    rank: int,
    world_size: int,
    folder: Path,
    transport: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    options = ringcomm.Options(transport="messages" if transport else None)
    init_group(rank, world_size, folder / "store", timeout_s, options, keeps_file=True)


# ---- a rank that fails while the group is made

CAUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "no memory": (
        lambda: limited(resource.RLIMIT_AS, used_bytes() + (9 << 20)),
        "shared memory failed|thread ringcomm-|std::bad_alloc",
    ),
    "no descriptors": (
        lambda: limited(resource.RLIMIT_NOFILE, limit_of_descriptors(2)),
        "ulimit -n",
    ),
    "a wrong option": (
        lambda: mock.patch.dict(os.environ, RINGCOMM_ALGORITHM="no such one"),
        "no such one",
    ),
}


@in_ranks(3, backend=None, fresh=True)
@pytest.mark.parametrize(
    ("cause", "failing", "transport"),
    [
        ("no memory", 1, None),  # a group over messages needs none of its own
        *(("no descriptors", 0, transport) for transport in (None, "messages")),
        *(("a wrong option", 2, transport) for transport in (None, "messages")),
    ],
)
def test_the_others_hear_why_a_rank_failed(
    rank: int, cause: str, failing: int, transport: str | None, tmp_path: Path
) -> None:
    """Its process lives on, as in a notebook: https://github.com/rwth-i6/returnn/issues/1484."""
    torch.ones(1000).sum()
    fails, words = CAUSES[cause]
    with fails() if rank == failing else contextlib.nullcontext():
        error = timed(make_group, rank, 3, tmp_path, transport)
    assert error["type"] != "CollectiveTimeoutError", error
    assert error["seconds"] < SOON_S, error
    assert any(word in error["text"] for word in words.split("|")), error
    assert rank == failing or f"rank {failing}" in error["text"], error
    time.sleep(0.3 * rank)  # who tries again at once reads the records of who does not yet
    make_group(rank, 3, tmp_path, transport)
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0] == 3


# ---- a variable with a wrong value on one rank

# The first one is read once in a process.
WRONG_VALUES = {
    "RINGCOMM_SIMD": "AVX512",
    "RINGCOMM_ALGORITHM": "tree",
    "RINGCOMM_CHECK_TARGETS": "yes",
    "RINGCOMM_DETERMINISTIC": "1",
    "RINGCOMM_LOG_WAITS": "no",
    "RINGCOMM_MAP_TENSORS": "no",
    "RINGCOMM_MAX_THREADS": "all",
    "RINGCOMM_MESSAGE_BACKEND": "glo",
    "RINGCOMM_TIMEOUT": "1 min",
    "RINGCOMM_TRACE_EVENTS": "many",
    "RINGCOMM_TRANSPORT": "tcp",
    "RINGCOMM_TUNING": "/no/such/file",
}
# Not read by a group on CPUs: where they are, or why any value is right.
ELSEWHERE = {
    "RINGCOMM_AS_GLOO": "the first group that asks for Gloo, before there is one of ringcomm",
    "RINGCOMM_CUDA_DRIVER": "the first use of a GPU",
    "RINGCOMM_CUDA_IMAGE": "the first use of a GPU",
    "RINGCOMM_FLIGHT_DUMP": "a dump, which is said to be missing",
    "RINGCOMM_HOST_ID": "any text",
    "RINGCOMM_TRACE": "any folder that can be made: OSError otherwise",
    **dict.fromkeys(
        (
            *("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS", "RINGCOMM_PREBUILT", "RINGCOMM_USE_ENV"),
            *("RINGCOMM_TORCH", "RINGCOMM_TORCH_INDEX", "RINGCOMM_MAX_JOBS", "RINGCOMM_WERROR"),
        ),
        "the build",
    ),
}


def test_every_variable_is_checked_somewhere() -> None:
    assert {*WRONG_VALUES, *ELSEWHERE} == known_variables()
    assert not {*WRONG_VALUES} & {*ELSEWHERE}


@in_ranks(2, backend=None, fresh=True)
def test_all_ranks_hear_of_a_wrong_value(rank: int, tmp_path: Path) -> None:
    """Its process lives on: https://github.com/vllm-project/vllm/issues/16259."""
    for name, value in WRONG_VALUES.items():
        wrong = {name: value} if rank == 1 else {}
        if wrong and name == "RINGCOMM_TRACE_EVENTS":
            wrong["RINGCOMM_TRACE"] = str(tmp_path)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with mock.patch.dict(os.environ, wrong):
            error = timed(make_group, rank, 2, folder)
        assert error.get("type", "") not in ("", "CollectiveTimeoutError"), (name, error)
        assert name in error["text"], error
        assert rank == 1 or "rank 1" in error["text"], (name, error)
        assert error["seconds"] < SOON_S, (name, error)


# ---- a rank without descriptors when it is asked


def take_all_descriptors() -> list[int]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    files = []
    for _ in range(5):  # those that are just being closed, too
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        time.sleep(0.1)
    return files


@in_ranks(2, backend=None, fresh=True)
def test_a_rank_without_descriptors_is_named(rank: int, tmp_path: Path) -> None:
    """Reported for torch's own at https://github.com/pytorch/pytorch/issues/973."""
    make_group(rank, 2, tmp_path)
    shared = ringcomm.empty_shared(1 << 16).fill_(rank)
    dist.barrier()
    files = take_all_descriptors() if rank == 1 else []
    error = timed(dist.broadcast, shared, 1)
    for file in files:
        os.close(file)
    assert error["type"] == "RingcommError", error
    said = r"rank 1 \(pid .*\) accepts no connections: .*errno 24.* 256 \(ulimit -n\)"
    assert re.search(said, error["text"]), error
    assert error["seconds"] < SOON_S, error


# ---- ranks without standard descriptors, and ranks in which a library closes all others
#
# Reported for other libraries at https://github.com/rsyslog/rsyslog/issues/1526 and
# https://github.com/bmc/daemonize/issues/34.

WORLD_SIZE = 2
LIMIT_S = 60
OWN = b"the program's own"


def files_at_standard_descriptors() -> dict[int, str]:
    found = {number: Path(f"/proc/self/fd/{number}") for number in range(3)}
    return {number: os.readlink(path) for number, path in found.items() if path.is_symlink()}


@in_ranks(WORLD_SIZE, backend=None, fresh=True)
@pytest.mark.parametrize("transport", [None, "messages"])
def test_no_file_takes_the_number_of_a_standard_descriptor(
    rank: int, transport: Any, tmp_path: Path
) -> None:
    """Of everything that opens files."""
    os.environ["RINGCOMM_TRACE"] = str(tmp_path)
    os.closerange(0, 3)
    buffer = ringcomm.empty_shared(1 << 20, dtype=torch.uint8).fill_(7)
    file, _ = open_scratch(tmp_path)
    assert files_at_standard_descriptors() == {}
    assert file > 2
    options = ringcomm.Options(transport=transport)
    init_group(rank, WORLD_SIZE, tmp_path / "store", 60, options)
    dist.all_reduce(buffer)
    ringcomm.flight_dump(str(tmp_path / "dump"))
    # Gloo's sockets may have them.
    assert transport == "messages" or files_at_standard_descriptors() == {}
    assert (buffer == 7 * WORLD_SIZE).all()


# ---- a library closes all descriptors of a rank that has a group


def lose_all(rank: int, folder: Path) -> None:
    init_group(rank, WORLD_SIZE, folder / "store", 10 * LIMIT_S)
    dist.all_reduce(torch.ones(1000))
    files = []
    if rank == 1:
        os.closerange(3, 4096)
        files = [os.open(folder / f"own-{number}", os.O_RDWR | os.O_CREAT) for number in range(50)]
        for file in files:
            os.write(file, OWN)
            os.lseek(file, 0, os.SEEK_SET)
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.1)
    except ringcomm.RingcommError as error:
        text = str(error)
    dist.destroy_process_group()
    told = [os.lseek(file, 0, os.SEEK_CUR) == 0 and os.read(file, 99) == OWN for file in files]
    (folder / f"told-{rank}").write_text(json.dumps([told, text]))


@in_ranks(1, backend=None, fresh=True, timeout_s=2 * LIMIT_S)
def test_files_that_take_the_numbers_of_ours_are_left_alone(rank: int, tmp_path: Path) -> None:
    """As python-daemon does it: https://github.com/bmc/daemonize/issues/34."""
    lose = partial(machines.run_in_child, LIMIT_S, lose_all)
    assert [os.waitpid(pid, 0)[1] for pid in [lose(0, tmp_path), lose(1, tmp_path)]] == [0, 0]
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(WORLD_SIZE)]
    assert [own for own, _ in told] == [[], [True] * 50]
    # What rank 0 sees, or what rank 1 does, which then tells rank 0.
    causes = (
        "is no longer a rank: its process runs",
        "a library has closed descriptors of this rank",
    )
    for _, text in told:
        assert any(cause in text for cause in causes), told
        assert "died" not in text, told


# ---- ranks that do not come, to the making of a group


def assert_missing(error: dict[str, Any], rank: int, words: str) -> None:
    assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", rank), error
    assert words in error["text"], error


@in_ranks(2, backend=None, fresh=True)
def test_ranks_that_were_not_started_are_named(rank: int, tmp_path: Path) -> None:
    """Rank 1 comes later, and so is still waiting when rank 0 has given up and ended."""
    pid = os.fork()
    if pid == 0:
        time.sleep(0.6 * rank)
        error = caught(init_group, rank, 4, tmp_path / "store", 1.5)
        (tmp_path / f"error-{rank}").write_text(json.dumps(error))
        os._exit(1)
    os.waitpid(pid, 0)
    error = json.loads((tmp_path / f"error-{rank}").read_text())
    assert_missing(error, 2, "ranks 2 and 3 did not join the group")


@in_ranks(1, backend=None, fresh=True)
def test_many_missing_ranks_are_counted(rank: int, tmp_path: Path) -> None:
    words = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not join the group"
    assert_missing(caught(init_group, 0, 12, tmp_path / "store", 0.5), 1, words)


@in_ranks(4, fresh=True)
def test_new_group_names_missing_ranks_with_their_global_ranks(rank: int) -> None:
    """Rank 3 of the group's ranks 1 and 3 does not call it."""
    if rank == 3:
        return
    error = caught(dist.new_group, [1, 3], timedelta(seconds=1))
    if rank == 1:
        said = "ringcomm rank 0/2 (global rank 1): rank 1 of the group (global rank 3)"
        assert_missing(error, 1, said)
        assert "did not join the group" in error["text"]


def make_nothing(*args: Any) -> None:
    time.sleep(3)
    raise RuntimeError("too late")


@pytest.mark.slow
@in_ranks(4, backend=None, fresh=True, env=TRANSPORTS["messages"])
def test_only_ranks_that_do_not_connect_are_named(rank: int, tmp_path: Path) -> None:
    """Ranks 1 and 2 are in the group, and never make their Gloo, so no other rank can."""
    if rank in (1, 2):
        message_backend.make = make_nothing  # type: ignore[assignment]
    error = caught(init_group, rank, 4, tmp_path / "store", 1.0)
    if rank in (0, 3):
        assert_missing(error, 1, "ranks 1 and 2 did not connect to the others in 1000 ms")


def wait_for_a_missing_rank(rank: int, folder: Path) -> None:
    log = os.open(folder / f"log-{rank}", os.O_RDWR | os.O_CREAT)
    os.dup2(log, 2)
    if rank < 2:
        error = caught(lambda: init_group(rank, 3, folder / "store", 12))
        assert error["type"] == "CollectiveTimeoutError", error


@pytest.mark.slow
def test_one_rank_says_who_is_missing(tmp_path: Path) -> None:
    run_ranks(3, wait_for_a_missing_rank, tmp_path, backend=None, fresh=True)
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(3)]
    line = re.compile(r"rank 2 did not join the group in 1\d s; the group is still being made")
    assert [len(line.findall(log)) for log in logs] == [1, 0, 0], logs


# ---- to the barrier that names missing ranks (that no rank leaves it early: sequences)

SHORT = timedelta(milliseconds=300)


@in_ranks(fresh=True)
@pytest.mark.parametrize(
    ("env", "missing", "waits_for_all", "is_late"),
    [
        ("aaaa", [1, 3], False, False),
        ("aaaa", [1], False, True),
        *((env, [1, 3], True, True) for env in ("aaaa", "----", "abab")),
    ],
)
def test_missing_ranks(
    rank: int, env: str, missing: list[int], waits_for_all: bool, is_late: bool
) -> None:
    """The error of the ranks that come, after which the group does all it did before.

    One timeout for all ranks: https://github.com/pytorch/pytorch/pull/55010
    """
    group: Any = dist.group.WORLD
    error: dict[str, Any] = {}
    begin = time.monotonic()
    if rank not in missing:
        error = caught(lambda: ringcomm.monitored_barrier(group, SHORT, waits_for_all))
    assert time.monotonic() - begin < 10  # the group's timeout is 30 s
    dist.barrier()
    if rank in missing and is_late:
        error = caught(lambda: group.monitored_barrier(SHORT, waits_for_all))
    if rank not in missing or is_late:
        names = "ranks 1 and 3" if waits_for_all and rank == 0 else "rank 1"
        words = f"monitored_barrier: {names} did not come within 300 ms"
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 1), error
        assert words in error["text"], error
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == 4).all()
    if is_late:  # all have come to that one, and come to the next
        ringcomm.monitored_barrier(group, timedelta(seconds=20))
    received = torch.zeros(2)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(received, 0)
        assert (received == 1).all()


@in_ranks(2, fresh=True, group_timeout_s=0.5)
def test_rank_0_missing(rank: int) -> None:
    """The others wait as long as the group's time-out says: it is rank 0 who knows."""
    if rank == 1:
        error = caught(lambda: ringcomm.monitored_barrier(None, timedelta(milliseconds=100)))
        assert (error["type"], error["rank"]) == ("CollectiveTimeoutError", 0)
        assert "monitored_barrier: rank 0 did not come within 500 ms" in error["text"]


@in_ranks((1, 2))
def test_arguments(rank: int) -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(TypeError, match="timedelta"):
        ringcomm.monitored_barrier(timeout=1.0)  # type: ignore[arg-type]
    if TORCH_VERSION < (2, 14):
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    group.monitored_barrier()
    ringcomm.monitored_barrier(wait_all_ranks=True)


# ---- ranks that die or become another program while a group is made
#
# At every step, without torch and Gloo: tests/cpp/test_deaths.cc; in calls: test_failures.py.


def make_group_and_die(rank: int, path: str, victim: int, end_behind: int, how: str) -> Any:
    """What the first group and its first barrier come to, and this rank's operations."""
    watcher = EndsBehind(path, end_behind if rank == victim else 0, how)

    def make_and_use() -> None:
        make_watched_group(WatchedStore(dist.FileStore(path, 3), watcher), rank, 3)
        dist.barrier()

    error, num_operations = timed(make_and_use), watcher.num_operations
    if how == "exec":
        kill_named(error, path + " seen", rank, victim)
    return error, num_operations


def assert_death(error: dict[str, Any], victim: int, *place: Any) -> None:
    """Seen soon, from a rank's own start on: also the waits for the others' imports."""
    assert (error.get("type"), error.get("rank")) == ("PeerDiedError", victim), (error, place)
    assert error["seconds"] < 1 + SOON_S, (error, place)


@pytest.mark.parametrize(
    ("env", "victim", "how"),
    [
        slow("shm", 0, "kill"),
        ("shm", 2, "kill"),
        ("messages", 1, "exec"),
        slow("hosts", 2, "kill"),
    ],
)
def test_end_behind_operations_of_the_store(
    tmp_path: Path, env: str, victim: int, how: str
) -> None:
    """Behind some operations, or every one where RINGCOMM_DEATHS asks for all."""
    kind: dict[str, Any] = {"backend": None, "fresh": True, "env": ENVS[env]}
    results = run_ranks(3, make_group_and_die, str(tmp_path / "0"), victim, 0, how, **kind)
    num_operations = results[victim][1]
    assert num_operations >= 5
    stride = 1 if os.environ.get("RINGCOMM_DEATHS") == "all" else 9 if num_operations > 20 else 3
    for end_behind in range(1, num_operations + 1, stride):
        args = (str(tmp_path / str(end_behind)), victim, end_behind, how)
        results = run_ranks(3, make_group_and_die, *args, may_die=[victim], **kind)
        if results[victim] is not None:  # this time it came with fewer operations, and lives
            assert end_behind > num_operations // 2
            continue
        for rank in {0, 1, 2} - {victim}:
            assert_death(results[rank][0], victim, end_behind, rank)


# Rank 1 is the first of the group, where torch can have it so: from 2.13 on.
UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
)


@in_ranks(3, backend=None, fresh=True, may_die=[1])
@pytest.mark.parametrize(
    ("env", "how", "when"),
    [("---", "kill", "before"), ("---", "kill", "after"), ("aba", "exec", "before")],
)
def test_end_while_gloo_connects(rank: int, env: str, how: str, when: str, tmp_path: Path) -> None:
    """Rank 1 ends before Gloo connects, or when only its own end is made."""
    make = dist.ProcessGroupGloo

    def make_own(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            make(*args, **kwargs)
        end_process(how)

    if rank == 1:
        dist.ProcessGroupGloo = make_own  # type: ignore[assignment,misc]
    error = timed(lambda: init_group(rank, 3, tmp_path / "store", 60))
    kill_named(error, str(tmp_path / "seen"), rank, 1)
    assert_death(error, 1)


@in_ranks(3, ENVS, fresh=True, may_die=[1])
def test_death_before_a_new_group(rank: int) -> None:
    """Known from the group of all ranks: nothing of rank 1 is in the store."""
    dist.barrier()
    if rank == 1:
        end_process("kill")
    assert_death(timed(lambda: dist.new_group([1, 0, 2], **UNSORTED)), 0 if UNSORTED else 1)
