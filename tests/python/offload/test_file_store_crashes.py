"""Scratch files after a kill, and a disk that is full at any write of a step."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import in_ranks
from steps import train_step
from torch import nn

from ringcomm.parallel import offload, zero
from ringcomm.parallel.offload import file_store
from ringcomm.parallel.offload.file_store import FileStore
from ringcomm.parallel.offload.transfers import Transfer, empty_row


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS and FUSE."""
    real = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_a_killed_process_leaves_no_file(
    has_unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_unnamed:
        without_unnamed_files(monkeypatch)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = FileStore(tmp_path / "new", block_bytes=4096)
            store.put("first", empty_row(1 << 20, torch.float32)).wait()
            os.write(tell, b"1")
            while True:  # writes are under way when it is killed
                store.put("next", empty_row(1 << 20, torch.float32))
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(told)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [*tmp_path.rglob("*")] == [tmp_path / "new"]


class FullDisk:
    """Transfers, of which the write of some number fails: counted from 0, over all stores."""

    def __init__(self, fails_at: int) -> None:
        self._fails_at, self.num_writes = fails_at, 0

    def __call__(self, what: str, row: Any, fd: int, *given: Any) -> Transfer:
        is_write = given[-1] is None
        self.num_writes += is_write
        if is_write and self.num_writes - 1 == self._fails_at:
            with open("/dev/full", "wb") as full:
                transfer = Transfer(what, row, full.fileno(), *given)
                transfer.wait_for_end()
            return transfer
        return Transfer(what, row, fd, *given)


@in_ranks(1)
def test_a_disk_that_is_full_at_any_write_ends_the_run(rank: int, tmp_path: Path) -> None:
    """At the latest where the row is read: no step uses what was not written."""

    def train(fails_at: int) -> tuple[int, int]:
        """The numbers of writes before and after the second step."""
        disk = FullDisk(fails_at)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_store, "Transfer", disk)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 130))
            own = offload.Offloaded(torch.optim.AdamW(model.parameters()), to="nvme", path=tmp_path)
            optimizer: Any = zero.shard(model, own, 3, offload_weights=True)
            counts = []
            for _ in range(2):
                train_step(model(torch.ones(2, 130)).square().mean(), optimizer)
                counts.append(disk.num_writes)
            full_weights(optimizer)
            optimizer.state_dict()
        optimizer.close()
        return counts[0], counts[1]

    first, last = train(-1)
    assert 5 < first < last
    for fails_at in range(last):
        with pytest.raises(OSError, match=rf"(weight|gradient|state)\.\S+ at {tmp_path}") as caught:
            train(fails_at)
        assert caught.value.errno == errno.ENOSPC
        assert "the disk is full" in str(caught.value)
