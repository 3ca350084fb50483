"""What tests/sass/gate.py counts in a disassembly, and that it fails where a number grows."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "sass" / "gate.py"
SPEC = importlib.util.spec_from_file_location("sass_gate", PATH)
assert SPEC is not None
assert SPEC.loader is not None
gate = importlib.util.module_from_spec(SPEC)
sys.modules["sass_gate"] = gate
SPEC.loader.exec_module(gate)

# Two loads under way at once, then one alone; a fence, a local and a generic access.
SASS = """
.text.kernel:
        /*0000*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0020*/                   FADD R4, R4, R8 ;
        /*0030*/                   LDG.E.128 R12, desc[UR4][R2.64+0x20] ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_1:
        /*0050*/                   LDG.E.128 R16, desc[UR4][R2.64+0x30] ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R16 ;
        /*0070*/                   LDG.E.128.STRONG.SYS R20, desc[UR4][R2.64] ;
        /*0080*/                   MEMBAR.ALL.SYS ;
        /*0090*/                   STL [R1], R4 ;
        /*00a0*/                   ST.E desc[UR4][R2.64], R4 ;
        /*00b0*/                   EXIT ;
"""
REPORT = """ptxas info : Function properties for kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info : Used 40 registers, used 1 barriers"""


def test_counts_what_is_in_the_code() -> None:
    found = gate.facts_of(REPORT, SASS)
    assert found == gate.Facts(
        registers=40, stack=16, spills=12, generic=1, local=1, fences=1, single=1, at_once=(2,)
    )
    assert gate.Facts.parse(found.text()) == found


@pytest.mark.parametrize("column", gate.COLUMNS[:-1])
def test_fails_where_a_number_grows(column: str) -> None:
    before = gate.Facts(40, 0, 0, 0, 0, 8, 1, (8, 4))
    worse = dataclasses.replace(before, **{column: getattr(before, column) + 1})
    (problem,) = gate.problems_of("ring_bfloat16 sm_90", worse, before)
    assert column in problem
    assert "ring_bfloat16 sm_90" in problem
    assert gate.problems_of("ring_bfloat16 sm_90", before, worse) == []


@pytest.mark.parametrize("at_once", [(8,), (8, 3), (7, 4), ()])
def test_fails_where_fewer_loads_are_under_way(at_once: tuple[int, ...]) -> None:
    before = gate.Facts(40, 0, 0, 0, 0, 8, 1, (8, 4))
    worse = dataclasses.replace(before, at_once=at_once)
    assert "at once" in gate.problems_of("ring_bfloat16 sm_90", worse, before)[0]


@pytest.mark.parametrize("column", ["stack", "spills", "generic", "local"])
def test_hot_kernels_have_none_whatever_the_table_says(column: str) -> None:
    found = dataclasses.replace(gate.Facts(64, 0, 0, 0, 0, 8, 1, (8,)), **{column: 8})
    assert gate.problems_of("two_shot_bfloat16 sm_90", found, found)
    assert gate.problems_of("two_shot_bfloat16 sm_90", found, None)
    assert not gate.problems_of("ring_bfloat16 sm_90", found, found)


def test_table_has_every_kernel_of_the_gate() -> None:
    _, table = gate.read_table()
    kernels = gate.kernel_list()
    assert {key.split()[0] for key in table} == {*gate.HOT, *gate.OTHERS}
    assert set(gate.HOT) | set(gate.OTHERS) <= set(kernels)
    for key, facts in table.items():
        assert gate.problems_of(key, facts, facts) == []
