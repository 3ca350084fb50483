"""Markdown's tables."""

from __future__ import annotations

from collections.abc import Sequence


def grid(headers: list[str], num_words: int, rows: Sequence[list[str]]) -> list[str]:
    """A table whose first ``num_words`` columns are words, and the others figures."""
    rule = "|" + "---|" * num_words + "---:|" * (len(headers) - num_words)
    return ["", f"| {' | '.join(headers)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
