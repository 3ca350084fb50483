"""Which parts of a range of addresses are free, for arenas and for what is simulated."""

from __future__ import annotations

from bisect import bisect
from typing import Literal

Policy = Literal["first_fit", "best_fit"]


class FreeSpace:
    """The free parts of [0, num_bytes), neighbours joined.

    Attributes:
        num_bytes: of all.
        free_bytes: of the free parts together.
    """

    def __init__(self, num_bytes: int, policy: Policy = "first_fit") -> None:
        """All of it is free.

        Args:
            num_bytes: of the whole range.
            policy: take the first free part that is large enough, or the smallest.
        """
        self.num_bytes = self.free_bytes = num_bytes
        self._policy = policy
        # Begins and ends of the free parts, ascending.
        self._begins, self._ends = [0], [num_bytes]

    @property
    def largest_bytes(self) -> int:
        """Of the largest free part."""
        sizes = (end - begin for begin, end in zip(self._begins, self._ends, strict=True))
        return max(sizes, default=0)

    def take(self, num_bytes: int) -> int | None:
        """Where so many bytes begin that were free; None if no part is large enough."""
        fits = [
            (end - begin if self._policy == "best_fit" else 0, idx)
            for idx, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True))
            if end - begin >= num_bytes
        ]
        if not fits:
            return None
        _, idx = min(fits)
        begin = self._begins[idx]
        self._begins[idx] += num_bytes
        if self._begins[idx] == self._ends[idx]:
            del self._begins[idx], self._ends[idx]
        self.free_bytes -= num_bytes
        return begin

    def give_back(self, begin: int, num_bytes: int) -> None:
        """Makes [begin, begin + num_bytes) free, which take() has given."""
        idx, end = bisect(self._begins, begin), begin + num_bytes
        self._begins.insert(idx, begin)
        self._ends.insert(idx, end)
        for right in (idx + 1, idx):  # a part ends where the next one begins
            if 0 < right < len(self._begins) and self._ends[right - 1] == self._begins[right]:
                del self._ends[right - 1], self._begins[right]
        self.free_bytes += num_bytes
