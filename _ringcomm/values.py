"""Values of command line options: each function reads a text, for argparse's `type`.

Each raises argparse's own error. A value
out of its range, a file that is missing and one that cannot be written are errors before that.
"""

import argparse
import difflib
import glob
import math
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

MAX_WORLD_SIZE = 64
MAX_MICRO_BATCHES = 256
# If other programs use more than this share of all cores, a measured ratio is not reliable.
MAX_OTHERS_PERCENT = 10.0


def number(text: str) -> float:
    """A duration in seconds: finite and not negative."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid number value: {text!r}") from None
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and not negative, got {text}")
    return seconds


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number of at least ``least`` and at most ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least or (most is not None and value > most):
            allowed = f"{least} or more" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    return read


def several(read: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Reads the parts of a comma-separated option, each as ``read`` does."""
    return lambda text: [read(part) for part in words(text)]


def words(text: str, between: str = ",") -> list[str]:
    """The parts of a comma-separated option, at least one."""
    parts = [part.strip() for part in text.split(between) if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError("the list is empty")
    return parts


def amount(text: str) -> int:
    """``80GiB``, ``16k``, ``4M`` in powers of 1024; ``80GB`` in powers of 1000; or all digits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip().lower())
    count = 0.0
    if match is not None:
        base = 1000 if match[3] == "b" else 1024
        count = float(match[1]) * base ** " kmgt".index(match[2] or " ")
    if not 1 <= count < math.inf or count != int(count):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number with an optional unit, such as 4096, 16k, 4M, 80GiB or 80GB"
        )
    return int(count)


byte_counts = several(amount)


def all_known(
    names: Collection[str], read: Callable[[str], list[str]] = words
) -> Callable[[str], list[str]]:
    """Reads the parts of a comma-separated option as ``read`` does, each one of ``names``."""

    def read_known(text: str) -> list[str]:
        for part in (parts := read(text)):
            if part not in names:
                near = did_you_mean(part, names)
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(names)}{near}")
        return parts

    return read_known


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The name that is nearest, as the end of an error; "" where none is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near and near[0] != name else ""


def input_file(text: str) -> Path:
    """A file that can be read."""
    try:
        Path(text).open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return Path(text)


def recordings(text: str) -> Path:
    """A folder, or what the names of files begin with, as in RINGCOMM_FLIGHT_DUMP."""
    path = Path(text)
    if not path.is_dir() and not any(path.parent.glob(f"{glob.escape(path.name)}*")):
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder, and no file begins so")
    return path


def output_file(text: str) -> Path:
    """A file that can be written, in a folder that exists. It is not made, and stays as it is."""
    path = Path(text)
    try:
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} cannot be written: no folder {path.parent}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            return path  # a terminal or a pipe, whose opening may wait for a reader
        is_new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink(missing_ok=True)  # another rank may have done it
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return path


def output_folder(text: str) -> Path:
    """A folder that exists, or a new one in a folder that exists; it is not made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "it may not be written to" if path.parent.is_dir() else f"no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}")
    return path
