"""Every environment variable of the Python side, in one place.

The C++ side reads RINGCOMM_SIMD (avx512, avx2, baseline: the instruction set of reductions) and
RINGCOMM_HOST_ID (which ranks count as one host). The build has its own;
docs/reference/environment.md lists all.
"""

import os

__all__ = ["checks_targets", "option"]

# Options of a group, by field: the variable, and the type of its value. See ringcomm.Options.
_OPTIONS = {
    "algorithm": ("RINGCOMM_ALGORITHM", str),
    "deterministic": ("RINGCOMM_DETERMINISTIC", str),
    "num_slots": ("RINGCOMM_NUM_SLOTS", int),
    "p2p_backend": ("RINGCOMM_P2P_BACKEND", str),
    "slot_bytes": ("RINGCOMM_SLOT_BYTES", int),
    "transport": ("RINGCOMM_TRANSPORT", str),
    "tuning": ("RINGCOMM_TUNING", str),
}


def option(field: str) -> str | int | None:
    """The value for a field of ringcomm.Options; None if its variable is unset or empty.

    Raises:
        ValueError: the variable is not the whole number that it should be.
    """
    name, kind = _OPTIONS[field]
    text = os.environ.get(name)
    try:
        return kind(text) if text else None
    except ValueError:
        raise ValueError(
            f"the environment variable {name} wants a whole number, got {text!r}"
        ) from None


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
