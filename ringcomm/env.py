"""Every environment variable of the Python side, in one place.

The C++ side reads RINGCOMM_SIMD (avx512, avx2, baseline: the instruction set of reductions) and
RINGCOMM_HOST_ID (which ranks count as one host). The build has its own; README.md lists all.
"""

import os

__all__ = ["algorithm", "num_slots", "slot_bytes"]


def algorithm() -> str | None:
    """RINGCOMM_ALGORITHM: auto, one_shot, two_shot or ring. None when unset."""
    return os.environ.get("RINGCOMM_ALGORITHM") or None


def num_slots() -> int | None:
    """RINGCOMM_NUM_SLOTS: slots of a ring link, 2 to 64. None when unset. Raises ValueError."""
    return _integer("RINGCOMM_NUM_SLOTS")


def slot_bytes() -> int | None:
    """RINGCOMM_SLOT_BYTES: bytes of a slot of a ring link. None when unset. Raises ValueError."""
    return _integer("RINGCOMM_SLOT_BYTES")


def _integer(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} wants a whole number, got {text!r}"
        ) from None
