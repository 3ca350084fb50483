"""Every environment variable of the Python side, in one place.

The C++ side reads RINGCOMM_SIMD (avx512, avx2, baseline: the instruction set of reductions) and
RINGCOMM_HOST_ID (which ranks count as one host). The build has its own; README.md lists all.
"""

import os

__all__ = ["checks_targets", "option"]

# Options of a group, by field; what they mean stands at ringcomm.Options.
_TEXTS = {
    "algorithm": "RINGCOMM_ALGORITHM",
    "deterministic": "RINGCOMM_DETERMINISTIC",
    "p2p_backend": "RINGCOMM_P2P_BACKEND",
    "transport": "RINGCOMM_TRANSPORT",
    "tuning": "RINGCOMM_TUNING",
}
_NUMBERS = {
    "num_slots": "RINGCOMM_NUM_SLOTS",
    "slot_bytes": "RINGCOMM_SLOT_BYTES",
}


def option(field: str) -> str | int | None:
    """The value for a field of ringcomm.Options; None when its variable is unset or empty.

    Raises:
        ValueError: the variable wants a whole number and has none.
    """
    if field in _NUMBERS:
        return _integer(_NUMBERS[field])
    return os.environ.get(_TEXTS[field]) or None


def checks_targets() -> bool:
    """Whether losses on a GPU wait for the answer to whether every target is a class.

    Raises:
        ValueError: the variable wants 0 or 1 and has something else.
    """
    text = os.environ.get("RINGCOMM_CHECK_TARGETS") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"the environment variable RINGCOMM_CHECK_TARGETS wants 0 or 1, got {text!r}"
        )
    return text == "1"


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
