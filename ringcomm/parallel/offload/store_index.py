"""The index of a FileStore's tensors: of the last commit, and of the one before it."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from ringcomm.descriptors import open_above

_LOCK_WAIT_S = 5.0


def make_folder(path: Path) -> None:
    """Creates a folder and its parents if needed, durably (also after a power failure)."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path, keep: bool, direct: bool | None) -> tuple[int, bool]:
    """Opens a file, or an unnamed one in a folder; returns whether it bypasses the page cache."""
    if direct is not False:
        try:
            return _open(path, keep, os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if direct:
                raise OSError(
                    errno.EINVAL,
                    f"the file system of {path} does not support O_DIRECT: use direct=False",
                ) from error
    return _open(path, keep, 0), False


def _open(path: Path, keep: bool, more_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | more_flags
    if keep:
        return open_above(path, flags | os.O_CREAT, 0o600)
    try:
        return open_above(path, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # NFS and FUSE have no unnamed files. An open that is refused O_DIRECT may have made this one.
    name = path / f"ringcomm-{secrets.token_hex(8)}"
    try:
        return open_above(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def lock_file(fd: int, path: Path) -> None:
    """Locks a file for one store until it is closed. Raises BlockingIOError if another has it."""
    # The kernel holds the file of a killed process until its pending writes have ended,
    # which may be after its parent has waited for it; before that the file is not to be read.
    ends = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= ends:
                text = f"{path} is in use by another FileStore"
                raise BlockingIOError(error.errno, text) from error
            time.sleep(0.01)


FORMAT = 3


@dataclasses.dataclass
class Place:
    """Where a value of a tensor is in the data file, and the checksums of its blocks."""

    offset: int  # in bytes
    block_bytes: int = 0
    checksums: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Entry:
    """A tensor in the data file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    # Two, so that the last complete value stays while the next is written; one in a store with
    # keep=False.
    places: list[Place]
    current: int | None = None  # the place that was complete at the last commit, if any

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass
class Index:
    """All entries of one commit, and its `info`."""

    generation: int = 0
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """As JSON, without what was never complete, and its checksum in a second line."""
        entries = {}
        for key, entry in self.entries.items():
            if entry.current is None:
                continue
            # Of the other place only the offset is known after a crash.
            places = [
                vars(place) if number == entry.current else {"offset": place.offset}
                for number, place in enumerate(entry.places)
            ]
            dtype = str(entry.dtype).removeprefix("torch.")
            entries[key] = {**vars(entry), "dtype": dtype, "places": places}
        text = json.dumps({"format": FORMAT, **vars(self), "entries": entries})
        return f"{text}\n{zlib.crc32(text.encode()):08x}\n"

    @classmethod
    def from_json(cls, text: str) -> "Index":
        """The inverse of to_json(). Raises ValueError for other text."""
        try:
            body, _, checksum = text.partition("\n")
            found = json.loads(body)
            if found["format"] != FORMAT:
                raise ValueError(f"the format must be {FORMAT}, got {found['format']}")
            if checksum != f"{zlib.crc32(body.encode()):08x}\n":
                raise ValueError("its checksum is of another text")
            entries = {}
            for key, entry in found["entries"].items():
                dtype, shape = getattr(torch, entry["dtype"]), tuple(entry["shape"])
                places = [Place(**place) for place in entry["places"]]
                entries[key] = Entry(dtype, shape, places, entry["current"])
            return cls(found["generation"], found["info"], entries)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an index of a FileStore: {error!r}") from error


class IndexFiles:
    """The indices of the last commit and of the one before it, in a folder.

    Two files alternate, by the generation's parity. A commit is one rename over the older file: the
    newer one never disappears, and each file is complete or absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recover(self) -> Index:
        """The last commit's index, empty if there is none; removes files of an interrupted commit.

        Raises ValueError: a file is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._draft)
        found = [self.read(generation) for generation in (0, 1)]
        return max((index or Index() for index in found), key=lambda index: index.generation)

    def write(self, index: Index) -> None:
        """Makes an index the last one: survives a kill, and after sync() a power failure."""
        text = memoryview(index.to_json().encode())
        fd = open_above(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            while text:
                text = text[os.write(fd, text) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(self._draft, self._path(index.generation))

    def forget(self, *generations: int) -> None:
        """Removes existing indices; their tensors may then be overwritten."""
        for generation in generations:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(generation))
        self.sync()

    def sync(self) -> None:
        """Makes write() durable after a power failure."""
        sync_folder(self._folder)

    @property
    def _draft(self) -> Path:
        return self._folder / "index.draft.json"

    def _path(self, generation: int) -> Path:
        return self._folder / f"index.{generation % 2}.json"

    def read(self, generation: int) -> Index | None:
        """The index of the last commit or of the one before, if its tensors still exist."""
        path = self._path(generation)
        try:
            return Index.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): use an empty folder") from error
