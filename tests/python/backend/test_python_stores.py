"""Groups over a store that the program has written in Python, which has what Gloo asks for only."""

from __future__ import annotations

import datetime
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from failures import ENVS
from ranks import run_ranks

LIMIT = datetime.timedelta(seconds=30)


class FolderStore(dist.Store):
    """A file for each key."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def _place(self, key: str) -> Path:
        return self._folder / key.encode().hex()

    def set(self, key: str, value: Any) -> None:
        own = self._place(key).with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        own.write_bytes(value.encode() if isinstance(value, str) else value)
        own.replace(self._place(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._place(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            number = amount + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(number))
        return number

    def check(self, keys: list[str]) -> bool:
        return all(self._place(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta = LIMIT) -> None:
        ends = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > ends:
                raise RuntimeError(f"no {keys}")
            time.sleep(0.002)


class OfANewObject(FolderStore):
    """Nothing but the caller refers to what clone() returns."""

    def clone(self) -> dist.Store:
        return FolderStore(str(self._folder))


class OfItself(FolderStore):
    def clone(self) -> dist.Store:
        return self


def sum_over_stores(rank: int, kind: type[FolderStore], folder: str) -> None:
    store = kind(folder)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=3, timeout=LIMIT)
    x = torch.full((5,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [6.0] * 5
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [12.0] * 5
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        *((env, FolderStore) for env in ENVS),
        *(slow(env, kind) for env in ENVS for kind in (OfANewObject, OfItself)),
    ],
)
def test_groups(env: str, kind: type[FolderStore], tmp_path: Path) -> None:
    run_ranks(3, sum_over_stores, kind, str(tmp_path), backend=None, fresh=True, env=ENVS[env])
