"""The litmus tests, and what makes the bad outcome of each possible. Needs Python alone."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ACQUIRE, RELEASE = "ld.acquire.sys", "st.release.sys"
# What makes the outcome possible: text, and what stands there instead.
RELAXED_STORE = (RELEASE, "st.relaxed.sys")
RELAXED_LOAD = (ACQUIRE, "ld.relaxed.sys")
NARROW_STORE = (RELEASE, "st.release.gpu")
NARROW_LOAD = (ACQUIRE, "ld.acquire.gpu")
BEFORE_STORE = ("bar.cta.sync 0", "")
AFTER_LOAD = ("bar.cta.sync 1", "")
SIX = (RELAXED_STORE, RELAXED_LOAD, NARROW_STORE, NARROW_LOAD, BEFORE_STORE, AFTER_LOAD)
WEAKENED = {
    "board_publish": SIX,
    "board_copies": (
        ("st.release.sys e", "st.relaxed.sys e"),
        ("ld.acquire.sys r2", "ld.relaxed.sys r2"),
        BEFORE_STORE,
    ),
    "board_reuse": SIX,
    "board_lend": (*SIX, ("st.release.gpu k", "st.relaxed.gpu k")),
    "link_slot": (
        ("st.release.sys h", "st.relaxed.sys h"),
        ("ld.acquire.sys r0", "ld.relaxed.sys r0"),
        ("st.release.sys h", "st.release.gpu h"),
        ("bar.cta.sync 1", ""),
        ("bar.cta.sync 3", ""),
    ),
    # Kernels of one stream that do not follow each other: the wait is not over when q is written.
    "packet_reuse": (("ld.acquire.gpu r1, j", ""), ("ld.acquire.gpu r3, k", "")),
    "control_record": (RELAXED_STORE, RELAXED_LOAD, NARROW_STORE, NARROW_LOAD),
    "block_answers": (("bar.cta.sync 1", ""),),
}


def read(name: str) -> str:
    return (TESTS / f"{name}.litmus").read_text(encoding="utf-8")
