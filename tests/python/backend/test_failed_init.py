"""A rank that cannot make a group: the others hear why at once, and all may try again."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, init_group, run_ranks

import ringcomm

# The group's. Nothing here may take as long.
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


def failure_of(body: Callable[[], object]) -> tuple[str, str, float]:
    """The type and the text of what it raises, and the seconds until then."""
    begin = time.monotonic()
    try:
        body()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


# ---- a rank that fails while the group is made


def without_memory() -> Callable[[], None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (9 << 20), limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, limits)


def without_descriptors() -> Callable[[], None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in range(1 << 20) if not Path(f"/proc/self/fd/{number}").is_symlink())
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, 8, None)), limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def with_a_wrong_option() -> Callable[[], None]:
    os.environ["RINGCOMM_ALGORITHM"] = "no such one"

    def mend() -> None:
        del os.environ["RINGCOMM_ALGORITHM"]

    return mend


CAUSES = {
    "no memory": (without_memory, "shared memory failed|thread ringcomm-|std::bad_alloc"),
    "no descriptors": (without_descriptors, "ulimit -n"),
    "a wrong option": (with_a_wrong_option, "no such one"),
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
    fail, words = CAUSES[cause]
    mend = fail() if rank == failing else None
    kind, text, seconds = failure_of(lambda: make_group(rank, 3, tmp_path, transport))
    if mend is not None:
        mend()
    assert kind not in ("", "CollectiveTimeoutError"), text
    assert seconds < SOON_S, text
    assert any(word in text for word in words.split("|")), text
    assert rank == failing or f"rank {failing}" in text, text
    time.sleep(0.3 * rank)  # who tries again at once reads the records of who does not yet
    make_group(rank, 3, tmp_path, transport)
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0] == 3


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
    kind, text, seconds = failure_of(lambda: dist.broadcast(shared, 1))
    for file in files:
        os.close(file)
    assert kind == "RingcommError", text
    assert re.search(r"rank 1 \(pid .*\) is out of file descriptors; .*ulimit -n", text), text
    assert seconds < SOON_S, text


# ---- other ranks under one name


@in_ranks(4, backend=None, fresh=True)
def test_groups_of_other_ranks_under_one_name(rank: int, tmp_path: Path) -> None:
    """Reported for torch's own at https://github.com/pytorch/pytorch/issues/130102."""
    make_group(rank, 4, tmp_path)
    pair = [0, 3] if rank in (0, 3) else [1, 2]
    time.sleep(2 if rank in (1, 3) else 0)  # one rank of each pair comes first
    kind, text, seconds = failure_of(lambda: sum_over(pair))
    assert kind in ("", "MismatchError"), text  # or it has found the other of its pair in time
    assert not kind or {"{0, 3}", "{1-2}"} <= set(re.findall(r"{.*?}", text)), text
    assert seconds < SOON_S, text


def sum_over(pair: list[int]) -> None:
    x = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(x, group=dist.new_group(pair))
    assert x.item() == sum(10.0**each for each in pair)


# ---- a rank that does not come


def wait_for_a_missing_rank(rank: int, folder: Path) -> None:
    log = os.open(folder / f"log-{rank}", os.O_RDWR | os.O_CREAT)
    os.dup2(log, 2)
    if rank < 2:
        kind, *_ = failure_of(lambda: make_group(rank, 3, folder, timeout_s=12))
        assert kind == "CollectiveTimeoutError"


def test_one_rank_says_who_is_missing(tmp_path: Path) -> None:
    run_ranks(3, wait_for_a_missing_rank, tmp_path, backend=None, fresh=True)
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(3)]
    line = "rank 2 did not join the group in 10 s; the group is still being made"
    assert [log.count(line) for log in logs] == [1, 0, 0], logs
