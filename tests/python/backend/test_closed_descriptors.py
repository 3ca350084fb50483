"""Ranks that were started without standard descriptors: no file of ringcomm takes their numbers.

Reported for other libraries at https://github.com/rsyslog/rsyslog/issues/1526 and
https://github.com/bmc/daemonize/issues/34.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ringcomm
from ringcomm.contacts import Contacts
from ringcomm.parallel.offload.store_index import open_file

WORLD_SIZE = 2


def files_at_standard_descriptors() -> dict[int, str]:
    found = {number: Path(f"/proc/self/fd/{number}") for number in range(3)}
    return {number: os.readlink(path) for number, path in found.items() if path.is_symlink()}


def use_everything_that_opens_files(rank: int, folder: Path, transport: str) -> list[Any]:
    os.environ["RINGCOMM_TRACE"] = str(folder)
    os.closerange(0, 3)
    buffer = ringcomm.empty_shared(1 << 20, dtype=torch.uint8).fill_(7)
    contacts = Contacts(rank, WORLD_SIZE)
    file, _ = open_file(folder / f"file-{rank}", keep=True, direct=False)
    found = [files_at_standard_descriptors(), contacts.listener.fileno() > 2, file > 2]
    dist.init_process_group(
        "ringcomm",
        store=dist.FileStore(str(folder / "store"), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=60),
        pg_options=ringcomm.Options(transport="p2p" if transport else None),
    )
    ringcomm.on_death(print)
    dist.all_reduce(buffer)
    ringcomm.flight_dump(str(folder / "dump"))
    if transport != "p2p":  # Gloo's sockets may have them
        found.append(files_at_standard_descriptors())
    found.append([value.item() for value in buffer.aminmax()])
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("transport", ["", "p2p"])
def test_no_file_takes_the_number_of_a_standard_descriptor(transport: str, tmp_path: Path) -> None:
    sums = [7 * WORLD_SIZE, 7 * WORLD_SIZE]
    expected = [{}, True, True, sums] if transport == "p2p" else [{}, True, True, {}, sums]
    assert (
        run_ranks(
            WORLD_SIZE,
            use_everything_that_opens_files,
            tmp_path,
            transport,
            backend=None,
            fresh=True,
            module=__name__,
        )
        == [expected] * WORLD_SIZE
    )
