"""Which cases of a test `make test` runs: the others are slow, and run in `.ci/run slow`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that is slow: its values, or what pytest.param() has made of them."""
    if len(values) == 1 and hasattr(values[0], "marks"):
        case = values[0]
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*values, marks=pytest.mark.slow)


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """The values as cases, of which those that are not `chosen` are slow.

    A tuple is the values of several parameters.
    """
    return [
        value if value in chosen else slow(*(value if isinstance(value, tuple) else (value,)))
        for value in values
    ]


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values, of which as few are quick as have each value once."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    chosen = {tuple(axis[i % len(axis)] for axis in values) for i in range(longest)}
    return quick(itertools.product(*values), *chosen)


def name_of(value: Any) -> str:
    """What cases are called by: the name of a function, and text."""
    return str(getattr(value, "__name__", value))
