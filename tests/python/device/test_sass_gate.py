"""What tests/sass/gate.py counts in a disassembly, and that it fails where a number grows."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "sass" / "gate.py"
ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("sass_gate", PATH)
assert SPEC is not None
assert SPEC.loader is not None
gate = importlib.util.module_from_spec(SPEC)
sys.modules["sass_gate"] = gate
SPEC.loader.exec_module(gate)

USAGE = "  REG:40 STACK:{stack} SHARED:5744 LOCAL:0 CONSTANT[0]:2464 TEXTURE:0 SURFACE:0 SAMPLER:0"
SUM = "reduce_bfloat16 sm_90"
RING = "ring_bfloat16 sm_90"
UPDATE = "update_adamw_float32_bfloat16 sm_90"
COPY = "move sm_90"
PACKETS = "one_shot_bfloat16 sm_90"


def sass(*lines: str) -> str:
    """A disassembly of labels and instructions, some with a predicate."""
    found = [".text.kernel:"]
    for idx, line in enumerate(lines):
        if line.endswith(":"):
            found.append(line)
            continue
        predicate, _, rest = line.rpartition("| ")
        found.append(f"        /*{16 * idx:04x}*/ {predicate:>16} {rest} ;")
    return "\n".join(found)


def loads(num: int, first: int = 4) -> list[str]:
    """Vector loads to registers of their own."""
    return [f"LDG.E.128 R{first + 4 * i}, desc[UR4][R2.64+0x{16 * i:x}]" for i in range(num)]


def sum_loop(label: int, num_loads: int = 8, num_stores: int = 4) -> list[str]:
    """A turn as those of sums are: all loads, a barrier of the warp, the additions, the stores."""
    return [
        f".L_x_{label}:",
        "LDS.64 R2, [R60]",
        "R2UR UR4, R61",
        *loads(num_loads),
        f"BRA.DIV UR4, `(.L_x_{label + 90})",
        f".L_x_{label + 50}:",
        "WARPSYNC.ALL",
        *(f"FADD R{4 + 4 * i}, R{4 + 4 * i}, R{8 + 4 * i}" for i in range(num_stores)),
        *(f"STG.E.128 desc[UR4][R2.64], R{4 + 4 * i}" for i in range(num_stores)),
        f"@!P0| BRA `(.L_x_{label})",
    ]


def kernel(*loops: list[str], more: tuple[str, ...] = ()) -> list[str]:
    """Loops one after the other in an outer one; what BRA.DIV branches to follows."""
    inner = [line for loop in loops for line in loop]
    ways = [
        line
        for target in re.findall(r"BRA\.DIV UR4, `\((\.L_x_\d+)\)", "\n".join(inner))
        for line in (f"{target}:", "NOP", f"BRA `(.L_x_{int(target[5:]) - 40})")
    ]
    outer = [".L_x_1:", "BAR.SYNC.DEFER_BLOCKING 0x0", *inner]
    return ["MOV R1, R1", *outer, "@!P1| BRA `(.L_x_1)", *more, "EXIT", *ways]


SUM_LOOPS = (sum_loop(10), sum_loop(11, 8, 2), sum_loop(12, 8, 1), sum_loop(13, 4, 4))
SUM_CODE = kernel(*SUM_LOOPS)
COPY_CODE = kernel(sum_loop(10, 4, 4))
PACKET_CODE = [
    "STG.E.128.STRONG.SYS desc[UR4][R2.64], R20",
    "LDG.E.128.STRONG.SYS R24, desc[UR4][R2.64]",
    "LDG.E.STRONG.SYS R28, desc[UR4][R2.64]",
    "EXIT",
]


def facts(code: list[str], registers: int = 40, stack: int = 0) -> Any:
    """Of a kernel of this code."""
    usage = USAGE.replace("REG:40", f"REG:{registers}").format(stack=stack)
    return gate.facts_of(usage, sass(*code))


def test_counts_what_is_in_the_code() -> None:
    code = [
        *loads(2),
        "FADD R4, R4, R8",
        "LDG.E.128.STRONG.SYS R20, desc[UR4][R2.64]",
        "STG.E.128.STRONG.SYS desc[UR4][R2.64], R20",
        "LDG.E.64.STRONG.SYS R20, desc[UR4][R2.64]",
        "MEMBAR.ALL.SYS",
        "STL [R1], R4",
        "ST.E desc[UR4][R2.64], R4",
        "EXIT",
    ]
    found = facts(code, stack=16)
    assert found == gate.Facts(
        registers=40, stack=16, generic=1, local=1, fences=1, words=1, packets=1, traps=0, loops=()
    )


def test_counts_loops_by_themselves() -> None:
    """What BRA.DIV does for parts of a warp is no part of them, nor is what an inner loop has."""
    found = facts(SUM_CODE)
    assert [(loop.at_once, loop.loads, loop.stores) for loop in found.loops] == [
        (8, 8, 4), (8, 8, 2), (8, 8, 1), (4, 4, 4),
    ]  # fmt: skip
    first = found.loops[0]
    assert first.instructions == len(sum_loop(10)) - 2  # but its labels
    assert (first.shared, first.to_uniform, first.barriers, first.fences) == (1, 1, 2, 0)
    held = kernel(*SUM_LOOPS, more=())
    held[3:3] = ["MEMBAR.ALL.SYS", "LDG.E.128 R4, desc[UR4][R2.64]"]
    assert [loop.loads for loop in facts(held).loops] == [8, 8, 8, 4, 1]
    assert facts(held).loops[4].fences == 1


def test_counts_loops_behind_a_table_of_branches() -> None:
    jump = 'BRX R8 -0x10 (*"BRANCH_TARGETS .L_x_10,.L_x_11"*)'
    found = facts([jump, *sum_loop(10), "EXIT", *sum_loop(11, 8, 2), "EXIT"])
    assert [loop.stores for loop in found.loops] == [4, 2]


def replaced(code: list[str], old: str, *new: str, times: int = 1) -> list[str]:
    """The code with the first lines that have `old` replaced, `times` of them."""
    found: list[str] = []
    for line in code:
        if old in line and times > 0:
            times -= 1
            found += new
        else:
            found.append(line)
    assert times == 0
    return found


def after(code: list[str], old: str, *new: str, times: int = 1) -> list[str]:
    """The code with `new` behind the first line that has `old`."""
    line = next(line for line in code if old in line)
    return replaced(code, line, line, *new, times=times)


# What a compiler, or a change of the source, may do to a kernel: its name, the code as it was, what
# it becomes, and what the gate says. Numbers that have grown are below.
FAULTS: dict[str, tuple[str, list[str], Callable[[list[str]], list[str]], str]] = {
    "a loop twice": (
        SUM, SUM_CODE, lambda _: kernel(*SUM_LOOPS, sum_loop(14)), "4 loops -> 5"),
    "a loop gone": (SUM, SUM_CODE, lambda _: kernel(*SUM_LOOPS[:3]), "4 loops -> 3"),
    "a loop of words for one of vectors": (
        COPY, COPY_CODE, lambda c: [line.replace(".128", ".64") for line in c], "1 loops -> 0"),
    "a use before the last load": (
        SUM, SUM_CODE, lambda c: after(c, "LDG.E.128 R28", "FADD R4, R4, R8"), "at_once 8 -> 7"),
    "loads one by one": (
        COPY, COPY_CODE,
        lambda c: [part for line in c for part in (
            [line, f"FADD R1, {line[10:13]}, R1"] if line.startswith("LDG") else [line])],
        "loads at once (1,) in its loops"),
    "fewer loads than the source asks for, in table and code": (
        SUM, kernel(*[sum_loop(10 + i, 4) for i in range(4)]), lambda c: c, "(4, 4, 4, 4)"),
    "fewer loads in one loop of an update, in table and code": (
        UPDATE, kernel(sum_loop(10, 12), sum_loop(11, 7)), lambda c: c, "(12, 7)"),
    "an update of no vectors": (UPDATE, ["EXIT"], lambda c: c, "()"),
    "a spill in a hot kernel": (
        SUM, SUM_CODE, lambda c: after(c, "WARPSYNC", "STL [R1], R4"), "local 1, of a hot kernel"),
    "a trap, in table and code": (
        SUM, kernel(*SUM_LOOPS, more=("BPT.TRAP 0x1",)), lambda c: c, "1 traps: nvcc has put one"),
    "a publication of a plain kernel": (
        SUM, SUM_CODE, lambda c: after(c, "WARPSYNC", "MEMBAR.ALL.SYS"), "polls or publishes"),
    "a packet's load in halves": (
        PACKETS, PACKET_CODE,
        lambda c: replaced(c, "LDG.E.128", *[c[1].replace(".128", ".64")] * 2), "16-byte accesses"),
    "a packet's store in halves": (
        PACKETS, PACKET_CODE,
        lambda c: replaced(c, "STG.E.128", *[c[0].replace(".128", ".64")] * 2), "16-byte accesses"),
    "packets that are not strong": (
        PACKETS, PACKET_CODE, lambda c: [line.replace(".STRONG.SYS", "") for line in c],
        "16-byte accesses"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_code_generation_are_seen(fault: str) -> None:
    key, code, change, said = FAULTS[fault]
    before, now = facts(code), facts(change(list(code)))
    problems = gate.problems_of(key, now, before)
    assert any(said in problem and key in problem for problem in problems), problems
    if before != now:
        assert gate.problems_of(key, before, before) == []


@pytest.mark.parametrize("column", [c for c in gate.COLUMNS if c not in gate.NOT_WORSE])
def test_fails_where_a_number_grows(column: str) -> None:
    before = facts(SUM_CODE)
    worse = dataclasses.replace(before, **{column: getattr(before, column) + 1})
    assert any(f"{column} " in problem for problem in gate.problems_of(RING, worse, before))
    assert gate.problems_of(RING, before, dataclasses.replace(before, fences=8)) == []


def test_fails_where_a_number_of_a_loop_grows() -> None:
    """But of the loads at once, which shrink; one instruction is enough."""
    before = facts(SUM_CODE)
    first, *others = before.loops
    for name, number in first.named():
        worse = dataclasses.replace(first, **{name: number + (-1 if name == "at_once" else 1)})
        now = dataclasses.replace(before, loops=(worse, *others))
        for key in (SUM, RING):
            (problem,) = (p for p in gate.problems_of(key, now, before) if "loop 0: " in p)
            assert f"loop 0: {name} {number} -> " in problem


COLD = "ring_any sm_90"


def test_where_a_cold_kernel_spills_is_not_compared() -> None:
    """nvcc does not make the same code of ring_any everywhere; all else of it is compared."""
    before = facts(SUM_CODE)
    other = facts(kernel(*SUM_LOOPS, sum_loop(14), more=("STL [R1], R4",)), stack=32)
    assert other.loops != before.loops
    assert (other.stack, other.local) == (32, 1)
    assert gate.problems_of(RING, other, before)
    assert gate.problems_of(COLD, other, before) == []
    for column in ("registers", "generic", "fences", "words"):
        worse = dataclasses.replace(before, **{column: getattr(before, column) + 1})
        (problem,) = gate.problems_of(COLD, worse, before)
        assert f"{column} " in problem
    assert gate.problems_of(COLD, dataclasses.replace(before, traps=1), before)


def test_the_table_has_each_loop_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TABLE", tmp_path / "table.txt")
    more = kernel(*SUM_LOOPS[:3], sum_loop(13, 8, 1), sum_loop(14, 6, 4))
    of_90, of_100 = facts(SUM_CODE, stack=32), facts(more, registers=64, stack=32)
    found = {f"{name} {arch}": of_arch for name in ("ring_any", "ring_bfloat16", "ring_float16")
             for arch, of_arch in (("sm_100", of_100), ("sm_90", of_90))}  # fmt: skip
    gate.write_table("release 13.0", found)
    table = {key: gate.compared(key.split()[0], of_arch) for key, of_arch in found.items()}
    assert gate.read_table() == ("release 13.0", table)
    _, _, *loops, _, cold, hot, other = map(str.split, gate.TABLE.read_text().splitlines())
    assert [loop[:4] for loop in loops] == [
        cells.split() for cells in ("0 8 8 4", "1 8 8 2", "2 8 8 1", "3 6 6 4", "4 4 4 4")
    ]
    assert (cold[:4], cold[9:]) == (["ring_any", "40/64", "-", "0"], [])
    assert hot[:4] == ["ring_bfloat16", "40/64", "32", "0"]
    assert hot[9:] == other[9:] == ["0x1", "1x1", "2x1/2", "3x0/1", "4x1/0"]


def test_another_nvcc_has_the_rules_alone() -> None:
    more = dataclasses.replace(facts(SUM_CODE), registers=41)
    assert gate.problems_of(SUM, more, None) == []
    assert gate.problems_of(SUM, dataclasses.replace(more, stack=8), None)
    assert gate.problems_of(RING, dataclasses.replace(more, stack=8), None)
    assert gate.problems_of("ring_any sm_90", dataclasses.replace(more, stack=8), None) == []


def test_every_kernel_is_compared() -> None:
    few = facts(["EXIT"])
    table = {"where sm_90": few, "ring_any sm_90": few, "ring_any sm_100": few}
    assert gate.compare({"where sm_90": few, "ring_any sm_90": few}, table) == []
    (problem,) = gate.compare({"where sm_90": few}, table)
    assert "ring_any sm_90: in the table, but" in problem
    (problem,) = gate.compare({**table, "new sm_90": few}, table)
    assert problem == "new sm_90: not in the table"


def test_the_gate_fails_without_nvcc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate.buildconfig, "find_nvcc", lambda: None)
    assert gate.main() == 1
    assert "no nvcc here: kernels' code NOT compared" in capsys.readouterr().out


LISTS = ("csrc/cuda/kernels/kernel_list.h", "kernels/losses/loss_kernels.cu")  # of kernels
INCLUDED = (f"-I{ROOT / 'csrc'}", f"-I{ROOT}")


def kernel_names() -> list[str]:
    list_file, losses = (str(ROOT / name) for name in LISTS)
    command = ["c++", "-E", "-P", "-std=c++20", *INCLUDED, "-imacros", list_file, "-x", "c++", "-"]
    text = subprocess.check_output(command, input="RINGCOMM_ALL_KERNELS(KERNEL)", text=True)
    text += Path(losses).read_text()
    return re.findall(r"KERNEL\(ringcomm_(\w+),", text)


def test_table_has_every_kernel() -> None:
    _, table = gate.read_table()
    names = kernel_names()
    assert len(names) > 55
    assert set(table) == {f"{name} sm_{arch}" for name in names for arch in gate.ARCHITECTURES}
    for key, found in table.items():
        assert gate.problems_of(key, found, found) == []


def test_kernels_use_no_bit_functions_of_the_standard_library() -> None:
    """nvcc takes them for constants without a word: all sums were 2^-32 of what they are."""
    lists = [str(ROOT / name) for name in LISTS]
    command = ["c++", "-MM", "-std=c++20", *INCLUDED, "-x", "c++", *lists]
    said = subprocess.check_output(command, text=True)
    headers = {word for word in said.split() if word.endswith(".h")}
    assert len(headers) > 20
    functions = r"std::(count[lr]_\w+|popcount|bit_(width|ceil|floor)|has_single_bit|rot[lr])\("
    assert [name for name in headers if re.search(functions, Path(name).read_text())] == []
