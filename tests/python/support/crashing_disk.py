"""A disk that records what a FileStore does to it, and shows what a crash would have left.

Every change of a file or folder is an operation in a log. A kill leaves some prefix of the log. A
power cut leaves a prefix without some of what no fsync had made durable: data by the fsync of its
file, names by the fsync of their folder.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ringcomm.parallel.offload import transfers

PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation. `file` numbers the files; their names come and go."""

    kind: str  # create, rename, unlink: of names. write, resize: of data. sync, sync_names, mark
    file: int = -1
    name: str = ""
    target: str = ""  # of a rename
    offset: int = 0
    data: bytes = b""
    mark: Any = None
    has_failed: bool = False

    @property
    def is_change(self) -> bool:
        return self.kind in ("create", "rename", "unlink", "write", "resize")


@dataclasses.dataclass
class State:
    """What a folder has: files by number, and numbers by name."""

    files: dict[int, bytes] = dataclasses.field(default_factory=dict)
    names: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> State:
        paths = sorted(folder.iterdir())
        return cls(
            {i: path.read_bytes() for i, path in enumerate(paths)},
            {path.name: i for i, path in enumerate(paths)},
        )

    def contents(self) -> dict[str, bytes]:
        return {name: self.files.get(file, b"") for name, file in self.names.items()}

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for name, data in self.contents().items():
            (folder / name).write_bytes(data)

    def after(self, ops: list[Op]) -> State:
        found = State(dict(self.files), dict(self.names))
        for op in ops:
            if op.kind == "create":
                found.names[op.name] = op.file
            elif op.kind == "rename":
                found.names = {n: f for n, f in found.names.items() if f != op.file}
                found.names[op.target] = op.file
            elif op.kind == "unlink" and found.names.get(op.name) == op.file:
                del found.names[op.name]
            elif op.kind == "resize":
                data = found.files.get(op.file, b"")
                found.files[op.file] = data[: op.offset].ljust(op.offset, b"\0")
            elif op.kind == "write":
                data = found.files.get(op.file, b"").ljust(op.offset, b"\0")
                end = op.offset + len(op.data)
                found.files[op.file] = data[: op.offset] + op.data + data[end:]
        return found


class Disk:
    """Records what is done in a folder from now on.

    Args:
        folder: is there already.
        monkeypatch: restores the functions of os at the end of the test.
        fails_at: the operation, counted from 0, that fails and does nothing.
        code: the errno it fails with.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int = -1, code: int = 0
    ) -> None:
        self.folder, self.before, self.ops = folder, State.read(folder), list[Op]()
        self._now = State(dict(self.before.files), dict(self.before.names))
        self._of_fd: dict[int, int] = {}  # -1: the folder
        self._fails_at, self._code, self._num_calls = fails_at, code, 0
        for name in ("open", "close", "write", "replace", "unlink", "ftruncate", "posix_fallocate"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._wrap("sync", getattr(os, name)))
        find = transfers.shared_engine
        monkeypatch.setattr(transfers, "shared_engine", lambda *a: RecordingEngine(self, find(*a)))

    def mark(self, mark: Any) -> None:
        self._log(Op("mark", mark=mark))

    def _wrap(self, name: str, real: Any) -> Any:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            is_path = not isinstance(first, int)
            if name == "close":
                self._of_fd.pop(first, None)
                return real(first)
            if name == "open" and rest[0] & os.O_TMPFILE == os.O_TMPFILE:
                return real(first, *rest, **options)  # a crash leaves nothing of it
            if is_path and Path(first) != self.folder and Path(first).parent != self.folder:
                return real(first, *rest, **options)
            if not is_path and first not in self._of_fd:
                return real(first, *rest, **options)
            position = os.lseek(first, 0, os.SEEK_CUR) if name == "write" else 0
            if self.fails_now():
                self._note(name, first, rest, position, has_failed=True)
                path = (str(first),) if is_path else ()
                raise OSError(self._code, os.strerror(self._code), *path)
            result = real(first, *rest, **options)
            if name == "open":
                self._of_fd[result] = -1 if Path(first) == self.folder else self._number(first)
            self._note(name, first, rest, position, has_failed=False)
            return result

        return call

    @property
    def has_failed(self) -> bool:
        """Whether the operation that was to fail has come."""
        return self._num_calls > self._fails_at

    def fails_now(self) -> bool:
        self._num_calls += 1
        return self._num_calls - 1 == self._fails_at

    def _number(self, path: Any) -> int:
        """Of the file of a name; creates it where there is none."""
        name = Path(path).name
        if name not in self._now.names:
            self._log(Op("create", max([-1, *self._now.files]) + 1, name))
        return self._now.names[name]

    def _note(
        self, name: str, first: Any, rest: tuple[Any, ...], position: int, has_failed: bool
    ) -> None:
        if name == "sync":
            file = self._of_fd[first]
            self._log(Op("sync_names" if file == -1 else "sync", file, has_failed=has_failed))
        elif has_failed:
            return
        elif name == "open" and rest[0] & os.O_TRUNC:
            self._log(Op("resize", self._number(first), offset=0))
        elif name == "write":
            self.wrote(first, position, bytes(rest[0]))
        elif name == "replace":
            old, new = Path(first).name, Path(rest[0]).name
            self._log(Op("rename", self._now.names[old], old, new))
        elif name == "unlink":
            old = Path(first).name
            self._log(Op("unlink", self._now.names[old], old))
        elif name in ("ftruncate", "posix_fallocate"):
            self._log(Op("resize", self._of_fd[first], offset=sum(rest)))

    def wrote(self, fd: int, offset: int, data: bytes) -> None:
        """By pages: a crash may leave some of them."""
        for begin in range(0, len(data), PAGE):
            part = data[begin : begin + PAGE]
            self._log(Op("write", self._of_fd[fd], offset=offset + begin, data=part))

    def _log(self, op: Op) -> None:
        self.ops.append(op)
        self._now = self._now.after([op])
        self._now.files.setdefault(op.file, b"")

    def check_is_complete(self) -> None:
        """That the folder is what the log says: nothing was done without a record."""
        assert State.read(self.folder).contents() == self._now.contents()


class RecordingEngine:
    def __init__(self, disk: Disk, real: Any) -> None:
        self._disk, self._real = disk, real

    def start(
        self, is_write: bool, fd: int, memory: Tensor, num_bytes: int, offset: int, **options: Any
    ) -> Any:
        if is_write and fd in self._disk._of_fd:
            if self._disk.fails_now():
                return FailedTransfer(self._disk._code)
            self._disk.wrote(fd, offset, ctypes.string_at(memory.data_ptr(), num_bytes))
        return self._real.start(is_write, fd, memory, num_bytes, offset, **options)


@dataclasses.dataclass
class FailedTransfer:
    code: int
    checksums: tuple[int, ...] = ()

    def is_done(self) -> bool:
        return True

    def wait(self) -> int:
        return self.code


def crashes(
    before: State, ops: list[Op], begin: int = 0, every_loss: bool = True
) -> Iterator[tuple[int, State]]:
    """(number of operations done, state that a crash leaves), for each prefix from `begin`.

    Of what is not durable: all is there, which a kill leaves; nothing is; and with `every_loss` all
    but one operation, and one alone.
    """
    durable, pending = before, list[Op]()
    for count in range(len(ops) + 1):
        if count >= begin:
            kept = [pending, []]
            if every_loss:
                kept += [pending[:i] + pending[i + 1 :] for i in range(len(pending))]
                kept += [[op] for op in pending]
            for some in kept:
                yield count, durable.after(some)
        if count == len(ops):
            return
        op = ops[count]
        if op.is_change:
            place = op.kind, op.file, op.offset
            pending = [
                p for p in pending if not p.has_failed or (p.kind, p.file, p.offset) != place
            ]
            pending.append(op)
        elif op.kind in ("sync", "sync_names"):
            is_names = op.kind == "sync_names"
            done = [
                p
                for p in pending
                if not p.has_failed
                and (p.kind in ("create", "rename", "unlink") if is_names else p.file == op.file)
                and (is_names or p.kind in ("write", "resize"))
            ]
            if op.has_failed:
                # The kernel drops data that it could not write; a later fsync does not see it.
                lost = [p for p in done if p.kind == "write"]
                pending = [
                    dataclasses.replace(p, has_failed=True) if p in lost else p for p in pending
                ]
            else:
                durable = durable.after(done)
                pending = [p for p in pending if p not in done]
