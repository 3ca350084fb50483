"""A rank that cannot make a group: the others hear why at once; ranks that lack descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import machines
import pytest
import torch
import torch.distributed as dist
from failures import timed
from machines import limit_of_descriptors, limited, used_bytes
from ranks import in_ranks, init_group

import ringcomm
from ringcomm.options import known_variables
from ringcomm.parallel.offload.file_store import open_scratch

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
