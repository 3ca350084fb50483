"""Formats figures for a terminal, shows the progress of a measurement, and has colours of pages."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

# Of pages; Okabe and Ito's, which most people can tell apart.
COLORS = {
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "yellow": "#e69f00",
    "sky": "#56b4e9",
}

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Progress:
    """Says on stderr which measurement runs, and about how long those that remain will take.

    A terminal has one line that is rewritten; a file or a pipe gets a line for each measurement.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._num_done = 0
        self._num_shown = 0
        self._begin = time.monotonic()

    def show(self) -> None:
        """Names the measurement that runs now, unless all are done or a line has it already."""
        is_shown = self._num_shown > self._num_done and not sys.stderr.isatty()
        if is_shown or self._num_done == len(self._names):
            return
        self._num_shown = self._num_done + 1
        text = f"{self._num_done + 1} of {len(self._names)}: {self._names[self._num_done]}"
        if self._num_done:
            each = (time.monotonic() - self._begin) / self._num_done
            text += f", about {each * (len(self._names) - self._num_done):.0f} s left"
        self._write(text)

    def step(self) -> None:
        """The measurement is done, and the next one runs."""
        self._num_done += 1
        self.show()

    def clear(self) -> None:
        """Empties the line of a terminal, before other output."""
        if sys.stderr.isatty():
            self._write("")

    def _write(self, text: str) -> None:
        line = f"\r\x1b[K{text}" if sys.stderr.isatty() else f"{text}\n"
        print(line, end="", file=sys.stderr, flush=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of writing have the file's name, which Python gives those of opening it only."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8. Raises OSError with its name."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


def in_gib(num_bytes: float) -> str:
    """``7.75 GiB`` in powers of 1024, or in MiB or KiB where it is less: three digits."""
    for size, unit in UNITS:
        if num_bytes >= size:
            return f"{factor(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def in_seconds(seconds: float) -> str:
    """``1.25 s``, ``12.5 ms`` or ``8.10 µs``: three digits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{factor(seconds / size)} {unit}"
    return f"{factor(seconds * 1e6)} µs"


def counted(count: int, name: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def factor(value: float) -> str:
    """Three digits, at most two of them after the decimal point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def byte_count(value: int) -> str:
    """``4 MiB`` where that is exact, else all digits."""
    for size, unit in UNITS:
        if value >= size and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:,} B"


def columns(rows: Sequence[Sequence[str]], aligns: str) -> str:
    """Formats rows, headers first: "<" aligns a column to the left; those after `aligns` right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, chain(aligns, repeat(">")), widths, strict=False)
        lines.append("  ".join(f"{cell:{align}{width}}" for cell, align, width in cells).rstrip())
    return "\n".join(lines)
