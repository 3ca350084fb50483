"""Stores that are written in Python: around another one, or a folder of files."""

from __future__ import annotations

import datetime
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from failures import end_process

LIMIT = datetime.timedelta(seconds=30)
# What is told of each operation when it is over: its name, its keys, and what it has returned.
Watcher = Callable[[str, list[str], Any], None]


class WatchedStore(dist.Store):
    """Another store, of which a watcher hears, also of what its clones do."""

    _kept: ClassVar[list[WatchedStore]] = []  # for C++, which holds no Python object

    def __init__(self, store: Any, watcher: Watcher) -> None:
        super().__init__()
        self._store = store
        self._watcher = watcher
        self._kept.append(self)

    def clone(self) -> Any:
        return WatchedStore(self._store.clone(), self._watcher)

    def _call(self, name: str, keys: list[str], *args: Any) -> Any:
        result = getattr(self._store, name)(*args)
        self._watcher(name, keys, result)
        return result

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", [key], key, amount))

    def set(self, key: str, value: bytes | str) -> None:
        self._call("set", [key], key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", [key], key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys, keys))

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self._call("wait", keys, keys, *timeout)


class EndsBehind:
    """A watcher that ends its process behind the n-th operation, counted from the first write."""

    def __init__(self, path: str, number: int, how: str) -> None:
        self.num_operations = 0
        self._path, self._number, self._how = path, number, how

    def __call__(self, name: str, keys: list[str], result: Any) -> None:
        if name in ("get", "check") and self.num_operations == 0:
            return  # a rank that ends now is not missed
        if name == "check" and not result:
            return  # how often it asks in vain is a matter of time
        self.num_operations += 1
        if self.num_operations == self._number:
            with open(self._path) as file:
                # A program that exec() starts would keep the lock that a thread may hold here.
                fcntl.flock(file, fcntl.LOCK_EX)
                end_process(self._how)


class FolderStore(dist.Store):
    """A file for each key, and what Gloo asks of a store only."""

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


def make_group(
    store: Any, rank: int, size: int, timeout_s: float = 30.0, options: Any = None
) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    place: dict[str, Any] = {"rank": rank, "world_size": size, "pg_options": options}
    dist.init_process_group("ringcomm", store=store, timeout=timeout, **place)
