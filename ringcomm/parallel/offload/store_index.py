"""What a FileStore has where: an index that is replaced as a whole, and the one before it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


@dataclasses.dataclass
class Entry:
    """A tensor in the data file.

    Attributes:
        dtype: as in torch.
        shape: its sizes.
        offsets: where it stands, in bytes: two places, so that the last complete one stays while
            the next is written; one in a store that keeps nothing.
        current: which of them was complete at the last commit; None before the first.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: list[int]
    current: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass
class Index:
    """All entries of one commit, and what the caller said with it."""

    generation: int = 0
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Without what was never complete."""
        entries = {
            key: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "offsets": entry.offsets,
                "current": entry.current,
            }
            for key, entry in self.entries.items()
            if entry.current is not None
        }
        found = {"format": FORMAT, "generation": self.generation, "info": self.info}
        return json.dumps({**found, "entries": entries})

    @classmethod
    def from_json(cls, text: str) -> Index:
        """The inverse.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise ValueError(f"of format {found['format']}, this is {FORMAT}")
            entries = {
                key: Entry(
                    getattr(torch, entry["dtype"]),
                    tuple(entry["shape"]),
                    entry["offsets"],
                    entry["current"],
                )
                for key, entry in found["entries"].items()
            }
            return cls(found["generation"], found["info"], entries)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no index of a FileStore: {error!r}") from error


class IndexFiles:
    """The index and the one before it, in a folder; either is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current = folder / "index.json"
        self._previous = folder / "index.previous.json"

    def read(self) -> Index | None:
        """The last one; None in a folder without.

        Raises:
            ValueError: the file is damaged.
        """
        # A process that ended between the two renames of write() has left the older name only.
        for path in (self._current, self._previous):
            if path.exists():
                return _read(path)
        return None

    def read_previous(self) -> Index | None:
        """The one before the last, while its tensors are still there."""
        return _read(self._previous) if self._previous.exists() else None

    def write(self, index: Index) -> None:
        """Replaces the index: on disk when this returns."""
        draft = self._folder / "index.draft.json"
        with draft.open("w", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        if self._current.exists():
            self._current.replace(self._previous)
        draft.replace(self._current)
        self._sync_folder()

    def forget_previous(self) -> None:
        """Before its tensors are written over."""
        if self._previous.exists():
            self._previous.unlink()
            self._sync_folder()

    def restore_previous(self) -> None:
        """Makes the one before the last the last."""
        self._previous.replace(self._current)
        self._sync_folder()

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _read(path: Path) -> Index:
    try:
        return Index.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): begin in an empty folder") from error
