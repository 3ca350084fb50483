"""What the first rank of a ring sends, to the element."""

from __future__ import annotations

__all__ = ["ring_elems"]


def ring_elems(num_elems: int, num_ranks: int) -> int:
    """Elements that rank 0 sends in an all_reduce: 2 (N - 1) / N of them where N divides.

    Of both halves all chunks go on but its own and its neighbour's; the first ones are longer by
    an element where N does not divide (ringcomm.ops.shard_range).
    """
    base, num_longer = divmod(num_elems, num_ranks)
    stay = 2 * base + min(num_longer, 2) if num_ranks > 1 else 2 * num_elems
    return 2 * num_elems - stay
