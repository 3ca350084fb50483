"""The orders that groups on GPUs stand on, by the memory model of PTX; each fails if it is weaker.

docs/design/gpu.md says which code each test in tests/litmus is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2] / "litmus"
ROOT = TESTS.parents[1]
sys.path.insert(0, str(TESTS))

import ptx_model  # noqa: E402
from weakened import TEXTBOOK, WEAKENED, read, textbook_program, weaker  # noqa: E402


def test_every_file_is_tested() -> None:
    assert {path.stem for path in TESTS.glob("*.litmus")} == {*WEAKENED}


@pytest.mark.parametrize("name", WEAKENED)
def test_the_order_holds_and_nothing_less_would_do(name: str) -> None:
    text = read(name)
    assert ptx_model.parse(text).is_forbidden
    assert not ptx_model.is_allowed(text)
    for old, new in WEAKENED[name]:
        assert old in text
        is_weak = ptx_model.is_allowed(weaker(name, old, new))
        assert is_weak, f"{name} holds with {new!r} instead of {old!r}"


def outcome(threads: str, question: str) -> bool:
    return ptx_model.is_allowed(f"PTX t\n{{ x=0; y=0; }}\n{threads}\n~exists ({question})")


SAME, OTHER = "P0@cta 0,gpu 0 | P1@cta 0,gpu 0 ;", "P0@cta 0,gpu 0 | P1@cta 1,gpu 1 ;"


@pytest.mark.parametrize(
    ("threads", "question", "is_allowed"),
    [
        # Message passing: by scope, and by order.
        ("st.weak x, 1 | ld.acquire.S r0, y ;\n st.release.S y, 1 | ld.weak r1, x ;", "MP", False),
        ("st.weak x, 1 | ld.relaxed.S r0, y ;\n st.release.S y, 1 | ld.weak r1, x ;", "MP", True),
        # A fence on either side does as well.
        (
            "st.weak x, 1 | ld.relaxed.S r0, y ;\n fence.acq_rel.S | fence.acq_rel.S ;\n"
            " st.relaxed.S y, 1 | ld.weak r1, x ;",
            "MP",
            False,
        ),
        # Store buffering: release and acquire do not forbid it.
        (
            "st.release.S x, 1 | st.release.S y, 1 ;\n ld.acquire.S r0, y | ld.acquire.S r1, x ;",
            "P0:r0 == 0 /\\ P1:r1 == 0",
            True,
        ),
        # Two loads of one location, strong ones in order and weak ones in any.
        ("st.relaxed.S x, 1 | ld.relaxed.S r0, x ;\n | ld.relaxed.S r1, x ;", "MP", False),
        ("st.relaxed.S x, 1 | ld.weak r0, x ;\n | ld.weak r1, x ;", "MP", True),
        # Values out of thin air.
        (
            "ld.weak r0, x | ld.weak r1, y ;\n st.weak y, r0 | st.weak x, r1 ;",
            "P0:r0 == 1 /\\ P1:r1 == 1",
            False,
        ),
    ],
)
def test_the_model_on_programs_of_textbooks(threads: str, question: str, is_allowed: bool) -> None:
    question = question.replace("MP", "P1:r0 == 1 /\\ P1:r1 == 0")
    for places, scope in ((OTHER, "sys"), (SAME, "sys"), (SAME, "cta")):
        assert outcome(f"{places}\n {threads.replace('.S', '.' + scope)}", question) is is_allowed
    # A scope that does not have the other thread orders nothing.
    assert outcome(f"{OTHER}\n {threads.replace('.S', '.gpu')}", question) is (
        is_allowed or "P1:r0" in question
    )


@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_model_allows_what_nothing_orders(name: str) -> None:
    assert ptx_model.is_allowed(textbook_program(name))


def test_what_it_does_not_know_is_refused() -> None:
    for line in ("atom.relaxed.sys.exch r0, x, 1 | ;", "st.weak x | ;", "LC00: | ;"):
        with pytest.raises(ValueError, match="does not know"):
            outcome(f"{SAME}\n {line}", "P0:r0 == 1")
    with pytest.raises(ValueError, match="a thread is"):
        outcome("P0 | P1 ;\n st.weak x, 1 | ;", "P0:r0 == 1")
    with pytest.raises(ValueError, match="an outcome is"):
        outcome(f"{SAME}\n st.weak x, 1 | ;", "x == 1")


def test_the_code_has_these_instructions() -> None:
    """What the tests say of waits and publications is what the device's code has."""
    code = (ROOT / "csrc/cuda/kernels/gpu_block.cuh").read_text(encoding="utf-8")
    found = set(re.findall(r'asm volatile\("((?:ld|st|membar|fence)[\w.]*)', code))
    assert found == {
        "ld.acquire.sys.global.u64",
        "ld.relaxed.sys.global.u32",
        "ld.relaxed.sys.global.u64",
        "ld.volatile.global.v2.u64",
        "st.release.sys.global.u32",
        "st.release.sys.global.u64",
        "st.volatile.global.v2.u64",
    }
    page = (ROOT / "docs/design/gpu.md").read_text(encoding="utf-8")
    assert all(instruction in page for instruction in found)
    assert all(f"`{name}`" in page for name in WEAKENED)
