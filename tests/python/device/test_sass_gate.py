"""What tests/sass/gate.py counts in a disassembly, and that it fails where a number grows."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "sass" / "gate.py"
CSRC = Path(__file__).parents[3] / "csrc"
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
USAGE = "  REG:40 STACK:16 SHARED:5744 LOCAL:0 CONSTANT[0]:2464 TEXTURE:0 SURFACE:0 SAMPLER:0"
# A packet there and back, and a word of 4 bytes.
PACKETS = """
        /*0000*/                   STG.E.128.STRONG.SYS desc[UR4][R2.64], R20 ;
        /*0010*/                   LDG.E.128.STRONG.SYS R24, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.STRONG.SYS R28, desc[UR4][R2.64] ;
"""
FEW = gate.Facts(
    registers=40, stack=0, generic=0, local=0, fences=8, words=0, packets=1, single=1, at_once=()
)
SUMS = dataclasses.replace(FEW, single=0, at_once=(8, 8, 8, 4, 4))
COPIES = dataclasses.replace(FEW, single=0, at_once=(4, 4))


def test_counts_what_is_in_the_code() -> None:
    found = gate.facts_of(USAGE, SASS)
    assert found == gate.Facts(
        registers=40,
        stack=16,
        generic=1,
        local=1,
        fences=1,
        words=0,
        packets=0,
        single=1,
        at_once=(2,),
    )
    assert gate.Facts.parse(found.text()) == found


@pytest.mark.parametrize(
    "column", [column for column in gate.COLUMNS if column not in gate.NOT_WORSE]
)
def test_fails_where_a_number_grows(column: str) -> None:
    before = dataclasses.replace(FEW, at_once=(8, 4))
    worse = dataclasses.replace(before, **{column: getattr(before, column) + 1})
    (problem,) = gate.problems_of("ring_bfloat16 sm_90", worse, before)
    assert column in problem
    assert "ring_bfloat16 sm_90" in problem
    assert gate.problems_of("ring_bfloat16 sm_90", before, worse) == []


@pytest.mark.parametrize("at_once", [(8,), (8, 3), (7, 4), ()])
def test_fails_where_fewer_loads_are_under_way(at_once: tuple[int, ...]) -> None:
    before = dataclasses.replace(FEW, at_once=(8, 4))
    worse = dataclasses.replace(before, at_once=at_once)
    assert "at once" in gate.problems_of("ring_bfloat16 sm_90", worse, before)[0]


@pytest.mark.parametrize("column", ["stack", "generic", "local"])
def test_hot_kernels_have_none_whatever_the_table_says(column: str) -> None:
    assert not gate.problems_of("two_shot_bfloat16 sm_90", SUMS, None)
    found = dataclasses.replace(SUMS, **{column: 8})
    assert gate.problems_of("two_shot_bfloat16 sm_90", found, found)
    assert gate.problems_of("two_shot_bfloat16 sm_90", found, None)
    assert not gate.problems_of("ring_bfloat16 sm_90", found, found)


def halved(access: str) -> str:
    """The code of PACKETS with one access in two halves."""
    return "\n".join(
        line if f"{access}.E.128" not in line else f"{line}\n{line}".replace(".128", ".64")
        for line in PACKETS.splitlines()
    )


@pytest.mark.parametrize("name", ["one_shot_any", "one_shot_bfloat16"])
def test_packets_are_whole_whatever_the_table_says(name: str) -> None:
    usage = USAGE.replace("STACK:16", "STACK:0")
    whole = gate.facts_of(usage, PACKETS)
    assert (whole.packets, whole.words) == (1, 0)
    assert not gate.problems_of(f"{name} sm_90", whole, whole)
    broken = [
        halved("LDG"),
        halved("STG"),
        PACKETS + halved("LDG"),  # some of them
        PACKETS.replace(".128", ""),
        PACKETS.replace(".STRONG.SYS", ""),
    ]
    for sass in broken:
        found = gate.facts_of(usage, sass)
        (problem,) = gate.broken_rules(name, found)
        assert "16-byte accesses alone" in problem
        assert problem in gate.problems_of(f"{name} sm_90", found, found)[0]
        assert not gate.broken_rules("exchange", found)  # has cursors, and no packets


@pytest.mark.parametrize(
    "change",
    [
        {"at_once": (8, 8, 4, 4, 4)},
        {"at_once": (8, 8, 8, 4, 3)},
        {"at_once": (8, 8)},
        {"at_once": ()},
        {"single": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["two_shot_float16", "reduce_scatter_float32", "reduce_bfloat16"])
def test_sums_load_all_sources_at_once_whatever_the_table_says(
    name: str, change: dict[str, Any]
) -> None:
    assert not gate.broken_rules(name, SUMS)
    found = dataclasses.replace(SUMS, **change)
    (problem,) = gate.problems_of(f"{name} sm_100", found, found)
    assert "loads at once" in problem
    assert not gate.broken_rules("update_sgd_float32_float32", found)


@pytest.mark.parametrize("change", [{"at_once": (4, 3)}, {"at_once": ()}, {"single": 1}], ids=str)
@pytest.mark.parametrize("name", ["move", "move_same"])
def test_copies_load_four_at_once_whatever_the_table_says(
    name: str, change: dict[str, Any]
) -> None:
    assert not gate.broken_rules(name, COPIES)
    found = dataclasses.replace(COPIES, **change)
    (problem,) = gate.problems_of(f"{name} sm_100", found, found)
    assert "loads at once" in problem


def test_every_kernel_is_compared() -> None:
    table = {"where sm_90": FEW, "ring_any sm_90": FEW, "ring_any sm_100": FEW}
    assert gate.compare({"where sm_90": FEW, "ring_any sm_90": FEW}, table) == []
    (problem,) = gate.compare({"where sm_90": FEW}, table)
    assert "ring_any sm_90: in the table, but" in problem
    (problem,) = gate.compare({**table, "new sm_90": SUMS}, table)
    assert problem == "new sm_90: not in the table"


def kernel_names() -> list[str]:
    """Of kernel_list.h and loss_rows.h."""
    done = subprocess.run(
        ["c++", "-E", "-P", "-std=c++20", f"-I{CSRC}",
         "-imacros", "cuda/kernels/kernel_list.h", "-imacros", "cuda/kernels/loss_rows.h",
         "-x", "c++", "-"],
        input="RINGCOMM_ALL_KERNELS(KERNEL)\nRINGCOMM_LOSS_KERNELS(KERNEL)",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return re.findall(r"KERNEL\(ringcomm_(\w+),", done.stdout)


def test_table_has_every_kernel() -> None:
    _, table = gate.read_table()
    names = kernel_names()
    assert len(names) > 55
    assert set(table) == {f"{name} sm_{arch}" for name in names for arch in gate.ARCHITECTURES}
    for key, facts in table.items():
        assert gate.problems_of(key, facts, facts) == []


def test_kernels_use_no_bit_functions_of_the_standard_library() -> None:
    """nvcc takes them for constants without a word: all sums were 2^-32 of what they are."""
    lists = [CSRC / "cuda/kernels" / name for name in ("kernel_list.h", "loss_rows.h")]
    command = ["c++", "-MM", "-std=c++20", f"-I{CSRC}", "-x", "c++", *map(str, lists)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    headers = {word for word in done.stdout.split() if word.endswith(".h")}
    assert len(headers) > 20
    functions = r"std::(count[lr]_\w+|popcount|bit_(width|ceil|floor)|has_single_bit|rot[lr])\("
    assert [name for name in headers if re.search(functions, Path(name).read_text())] == []
