"""Tests of torch's that fail on ringcomm, and why each of them cannot do otherwise.

An entry whose test passes is an error, and so is a failure without an entry. Keys are
(mode, test); "*" stands for every mode.
"""

from __future__ import annotations

__all__ = ["reason"]

KNOWN: dict[tuple[str, str], str] = {}


def reason(mode: str, test: str) -> str | None:
    """Why the test is known to fail in the mode; None where it is expected to pass."""
    return KNOWN.get((mode, test)) or KNOWN.get(("*", test))
