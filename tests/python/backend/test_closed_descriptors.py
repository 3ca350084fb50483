"""Ranks without standard descriptors, and ranks in which a library closes all others.

Reported for other libraries at https://github.com/rsyslog/rsyslog/issues/1526 and
https://github.com/bmc/daemonize/issues/34.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import machines
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, init_group

import ringcomm
from ringcomm.contacts import Contacts
from ringcomm.parallel.offload.store_index import open_file

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
    contacts = Contacts(rank, WORLD_SIZE)
    file, _ = open_file(tmp_path / f"file-{rank}", keep=True, direct=False)
    assert files_at_standard_descriptors() == {}
    assert min(contacts.listener.fileno(), file) > 2
    options = ringcomm.Options(transport=transport)
    init_group(rank, WORLD_SIZE, tmp_path / "store", 60, options)
    ringcomm.on_death(print)
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
