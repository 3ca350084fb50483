"""The litmus tests, and what makes the bad outcome of each possible. Needs Python alone."""

from __future__ import annotations

import re
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

# Programs of textbooks whose outcome nothing forbids: the threads, and registers' values.
TEXTBOOK = {
    "store buffering": (
        "P0@cta 0,gpu 0 | P1@cta 1,gpu 1 ;\n st.relaxed.sys x, 1 | st.relaxed.sys y, 1 ;\n"
        " ld.relaxed.sys r0, y | ld.relaxed.sys r1, x ;",
        {("P0:r0", 0), ("P1:r1", 0)},
    ),
    "message passing without order": (
        "P0@cta 0,gpu 0 | P1@cta 1,gpu 0 ;\n st.relaxed.sys x, 1 | ld.relaxed.sys r0, y ;\n"
        " st.relaxed.sys y, 1 | ld.relaxed.sys r1, x ;",
        {("P1:r0", 1), ("P1:r1", 0)},
    ),
    "message passing by too narrow a scope": (
        "P0@cta 0,gpu 0 | P1@cta 1,gpu 0 ;\n st.weak x, 1 | ld.acquire.cta r0, y ;\n"
        " st.release.cta y, 1 | ld.weak r1, x ;",
        {("P1:r0", 1), ("P1:r1", 0)},
    ),
    "independent reads of independent writes": (
        "P0@cta 0,gpu 0 | P1@cta 1,gpu 1 | P2@cta 2,gpu 2 | P3@cta 3,gpu 3 ;\n"
        " st.relaxed.sys x, 1 | st.relaxed.sys y, 1 |"
        " ld.acquire.sys r0, x | ld.acquire.sys r2, y ;\n"
        " | | ld.relaxed.sys r1, y | ld.relaxed.sys r3, x ;",
        {("P2:r0", 1), ("P2:r1", 0), ("P3:r2", 1), ("P3:r3", 0)},
    ),
}


def textbook_program(name: str) -> str:
    """The litmus test of a program of TEXTBOOK."""
    threads, wanted = TEXTBOOK[name]
    question = " /\\ ".join(f"{register} == {value}" for register, value in sorted(wanted))
    return f"PTX t\n{{ x=0; y=0; }}\n{threads}\nexists ({question})"


def weaker(name: str, old: str, new: str) -> str:
    """The test with a weaker instruction. Nothing is asked about what is not loaded."""
    text = read(name).replace(old, new)
    if name == "packet_reuse":
        text = re.sub(rf" /\\ P\d:{old.split()[1][:-1]} == 1", "", text)
    return text


def read(name: str) -> str:
    return (TESTS / f"{name}.litmus").read_text(encoding="utf-8")
