"""How people write amounts of memory and of tokens, and how the planner writes them."""

from __future__ import annotations

import re

__all__ = ["bytes_of", "count_of", "in_gb", "in_seconds"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(text: str) -> int:
    """``80GiB`` in powers of 1024, ``80GB`` in powers of 1000, or plain bytes.

    Raises:
        ValueError: it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b|b?)", text.strip().lower())
    size = 0.0
    if match is not None:
        base = 1024 if match[3] else 1000
        size = float(match[1]) * base ** _POWERS[match[2] or ""]
    if size < 1:
        raise ValueError(f"{text!r} is no amount of memory: write 80GiB, 80GB or bytes")
    return int(size)


def count_of(text: str) -> int:
    """``4M`` tokens in powers of 1024, or plain.

    Raises:
        ValueError: it is no whole positive number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)", text.strip().lower())
    count = float(match[1]) * 1024 ** _POWERS[match[2]] if match is not None else 0.0
    if count < 1 or count != int(count):
        raise ValueError(f"{text!r} is no number of tokens: write 4194304, 512k or 4M")
    return int(count)


def in_gb(num_bytes: float) -> str:
    """``31.4 GB`` in powers of 1000, or in MB or KB where it is less."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:,.{2 if value < 10 else 1}f} {unit}"
    return f"{num_bytes:.0f} B"


def in_seconds(seconds: float) -> str:
    """``1.25 s``, ``12.5 ms`` or ``8.1 µs``: three digits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            value = seconds / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
