"""Values of command line options: each function reads a text, for argparse's `type`.

They are outside of the package, whose import is torch's, and so raise argparse's own error.
"""

import argparse
import math
import re


def number(text: str) -> float:
    """A duration in seconds: finite and not negative."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid number value: {text!r}") from None
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and not negative, got {text}")
    return seconds


def words(text: str) -> list[str]:
    """The parts of a comma-separated option, at least one."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError("the list is empty")
    return parts


def whole_numbers(text: str) -> list[int]:
    """The parts of a comma-separated option as whole numbers."""
    try:
        return [int(part) for part in words(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def byte_counts(text: str) -> list[int]:
    """The parts of a comma-separated option, as ``amount`` reads each."""
    return [amount(part) for part in words(text)]


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
