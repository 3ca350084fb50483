#!/usr/bin/env python3
"""Compares what nvcc makes of every kernel with tests/sass/table.txt.

    python tests/sass/gate.py [--update]

Reads the images in build/cuda, and compiles them first where they are missing or old. Fails, and
says which number of which kernel or of which of its loops, where one has become worse. Whatever the
table says, no kernel may have a trap, hot ones no stack, generic or local access, and so no spill,
which is both; packets are exchanged by accesses of 16 bytes, and sums and copies have at least as
many loads under way as the source asks for. Of cold kernels the stack, local accesses and loops are
not compared: the table has "-" for them, and no loops. With --update it writes the table. It lists
each different loop once, by a number; a kernel's row ends with its loops: "7x2" is two of loop 7.
"64/62" is 64 for sm_90 and 62 for sm_100. The table is of one release of nvcc: with another only
these rules are checked. Fails where there is no nvcc. Nothing runs on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = Path(__file__).with_name("table.txt")
COUNTS = ROOT / "benchmarks" / "gpu" / "loop_counts.h"
sys.path[:0] = [str(ROOT / "tools"), str(TABLE.parent)]

import buildconfig  # noqa: E402
import cuda_kernels  # noqa: E402
from loops import Loop, loops_of  # noqa: E402

ARCHITECTURES = ("90", "100")
IMAGES = ROOT / "build" / "cuda"
# Types that are not reduced in bulk, and kernels that run once in a call. Where they spill is not
# compared, nor their loops: one release of nvcc makes different codes of ring_any on two machines.
COLD = re.compile(r"\w+_any|sum_losses")
WITH_PACKETS = re.compile(r"(one_shot|two_rounds|reduce_packets)_\w+|move_packets")
# They load 4 vectors at once or more wherever they load any; sums of 2, 4 and 8 sources 8, which is
# N * U (cuda/kernels/reducers.h), and updates 8 in each loop.
SUMS = re.compile(r"reduce_(float16|bfloat16|float32)")
COPIES = re.compile(r"move|copy_(in|out|messages)")
UPDATES = re.compile(r"update_\w+")
# They wait for nobody, and publish nothing: the ends of kernels order what they do.
PLAIN = re.compile(rf"{SUMS.pattern}|reduce_any|{COPIES.pattern}|{UPDATES.pattern}")
AT_ONCE, AT_ONCE_OF_SUMS = 4, 8
COLUMNS = ("registers", "stack", "generic", "local", "fences", "words", "packets", "traps")
# Fewer are worse, which the rules check.
NOT_WORSE = ("packets",)
NOT_COMPARED = "-"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is in the code of one kernel.

    `words` and `packets` are accesses of 8 and 16 bytes that another rank sees as they are (strong,
    of the system); of packets the fewer of loads and stores. A trap of nvcc's is seen for sm_90
    only: for sm_100 the kernel ends there.
    """

    registers: int
    stack: int | None
    generic: int
    local: int | None
    fences: int
    words: int
    packets: int
    traps: int
    loops: tuple[Loop, ...]

    def worse_than(self, before: Facts) -> list[str]:
        """Which numbers have become worse, with both."""
        found = [
            f"{name} {getattr(before, name)} -> {getattr(self, name)}"
            for name in COLUMNS
            if name not in NOT_WORSE and (getattr(self, name) or 0) > (getattr(before, name) or 0)
        ]
        if len(self.loops) != len(before.loops):
            return [*found, f"{len(before.loops)} loops -> {len(self.loops)}"]
        for idx, (loop, was) in enumerate(zip(self.loops, before.loops, strict=True)):
            found += [f"loop {idx}: {problem}" for problem in loop.worse_than(was)]
        return found


def facts_of(usage: str, sass: str) -> Facts:
    """Of one kernel, from what cuobjdump says that it uses, and the disassembly."""

    def number(name: str) -> int:
        return int(re.findall(rf"{name}:(\d+)", usage)[0])

    def count(pattern: str) -> int:
        return len(re.findall(rf"\s{pattern}\b", sass))

    return Facts(
        registers=number("REG"),
        stack=number("STACK"),
        generic=count(r"(?:LD|ST|ATOM|RED)(?:\.\w+)*"),
        local=count(r"(?:LDL|STL)(?:\.\w+)*"),
        fences=count(r"MEMBAR(?:\.\w+)*"),
        words=count(r"(?:LD|ST)G?\.E\.64\.STRONG\.SYS"),
        packets=min(count(rf"{access}G?\.E\.128\.STRONG\.SYS") for access in ("LD", "ST")),
        traps=count(r"BPT\.TRAP"),
        loops=loops_of(sass),
    )


def find_tool(nvcc: Path, name: str) -> str:
    """Beside nvcc, in Triton's package, or on PATH; empty where there is none."""
    spec = importlib.util.find_spec("triton")
    triton = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else Path()
    places = [nvcc.resolve().parent / name, triton / name]
    return next((str(p) for p in places if p.is_file()), None) or shutil.which(name) or ""


def said_by(*command: object, folder: Path | None = None) -> str:
    """Raises subprocess.CalledProcessError."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder).stdout


def facts_of_image(image: Path, cuobjdump: str, nvdisasm: str) -> dict[str, Facts]:
    """By "name sm_90", of all kernels of an image for the architectures of the gate."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="ringcomm_sass_") as folder:
        said_by(cuobjdump, "-xelf", "all", image, folder=Path(folder))
        for arch in ARCHITECTURES:
            for cubin in Path(folder).glob(f"*.sm_{arch}.cubin"):
                usage = said_by(cuobjdump, "-res-usage", cubin)
                sass = said_by(nvdisasm, "-c", cubin)
                uses = dict(re.findall(r"Function ringcomm_(\w+):\n(.*)", usage))
                _, *parts = re.split(r"(?m)^\.text\.ringcomm_(\w+):$", sass)
                for name, code in zip(parts[::2], parts[1::2], strict=True):
                    found[f"{name} sm_{arch}"] = facts_of(uses[name], code)
    return dict(sorted(found.items()))


def is_hot(name: str) -> bool:
    return COLD.fullmatch(name) is None


def compared(name: str, found: Facts) -> Facts:
    """What is compared with the table, or written to it."""
    if is_hot(name):
        return found
    return dataclasses.replace(found, stack=None, local=None, loops=())


def read_table() -> tuple[str, dict[str, Facts]]:
    """The release of nvcc, and facts by "name sm_90"."""
    release, *rows = TABLE.read_text().splitlines()
    found: dict[str, Facts] = {}
    loops: dict[str, Loop] = {}
    for title, *cells in map(str.split, rows):
        for idx, arch in enumerate(ARCHITECTURES):

            def number(cell: str, idx: int = idx) -> Any:
                text = (cell.split("/") * 2)[idx]
                return None if text == NOT_COMPARED else int(text)

            if title.isdigit():
                loops[f"{title} {arch}"] = Loop(*map(number, cells))
            elif title != "#":
                own = [
                    loops[f"{name} {arch}"]
                    for name, times in (cell.split("x") for cell in cells[len(COLUMNS) :])
                    for _ in range(number(times))
                ]
                facts = dict(zip(COLUMNS, map(number, cells[: len(COLUMNS)]), strict=True))
                found[f"{title} sm_{arch}"] = Facts(**facts, loops=tuple(own))
    return release.removeprefix("# "), found


def row_of(title: str, cells: Iterable[object], loops: Iterable[str] = ()) -> str:
    return " ".join([f"{title:30}", *(f"{cell:>12}" for cell in cells), *loops])


def both(numbers: tuple[int | None, ...]) -> str:
    """A cell of the table: each architecture's number, where it has one; once if all are equal."""
    texts = dict.fromkeys(str(number) for number in numbers if number is not None)
    return "/".join(texts) or NOT_COMPARED


def write_table(release: str, facts: dict[str, Facts]) -> None:
    loop_rows: dict[tuple[str, ...], str] = {}  # the number of each
    kernel_rows = []
    for name in dict.fromkeys(key.split()[0] for key in facts):
        found = [compared(name, facts[f"{name} sm_{arch}"]) for arch in ARCHITECTURES]
        own = []
        for kind in sorted({loop.kind for f in found for loop in f.loops}, reverse=True):
            of_archs = (
                [
                    (n, *dataclasses.astuple(l))
                    for l, n in Counter(f.loops).items()
                    if l.kind == kind
                ]
                for f in found
            )
            absent = (0, *[None] * len(dataclasses.fields(Loop)))
            for pair in zip_longest(*of_archs, fillvalue=absent):
                times, *cells = map(both, zip(*pair, strict=True))
                own.append(f"{loop_rows.setdefault(tuple(cells), str(len(loop_rows)))}x{times}")
        cells = [both(tuple(getattr(f, c) for f in found)) for c in COLUMNS]
        kernel_rows.append(row_of(name, cells, own))
    loop_names = (field.name for field in dataclasses.fields(Loop))
    rows = [f"# {release}", row_of("# loop", loop_names)]
    rows += [row_of(number, cells) for cells, number in loop_rows.items()]
    rows += [row_of("# kernel", COLUMNS, ["loops"]), *kernel_rows]
    TABLE.write_text("\n".join(rows) + "\n")


def counts_of(facts: dict[str, Facts]) -> str:
    """The text of COUNTS: the longest loop on vectors in shared memory."""
    loops = facts["loss_rows_bfloat16 sm_90"].loops
    count = max(loop.instructions for loop in loops if loop.kind == (0, 0, 0))
    return "\n".join([
        "#pragma once",
        "",
        "// Instructions of a turn of a kernel's loop for sm_90, by tests/sass/gate.py --update.",
        "",
        "namespace ringcomm::benchmarks::loops {",
        "",
        f"inline constexpr double kLossRow = {count};",
        "",
        "}  // namespace ringcomm::benchmarks::loops",
        "",
    ])  # fmt: skip


def broken_rules(name: str, found: Facts) -> list[str]:
    """What no kernel of its kind may have, whatever the table says."""
    problems = []
    if found.traps:
        problems.append(
            f"{found.traps} traps: nvcc has put one in the place of a call that it cannot make, "
            "such as of a constexpr function without RINGCOMM_HD that refers to a constant"
        )
    if is_hot(name):
        numbers = {rule: getattr(found, rule) for rule in ("stack", "generic", "local")}
        problems += [f"{rule} {n}, of a hot kernel" for rule, n in numbers.items() if n]
    if WITH_PACKETS.fullmatch(name) and (found.packets == 0 or found.words > 0):
        problems.append(
            f"packets are not exchanged by 16-byte accesses alone: {found.packets} of these, "
            f"{found.words} of 8 bytes"
        )
    if PLAIN.fullmatch(name) and found.fences + found.words + found.packets > 0:
        problems.append("a plain kernel polls or publishes: it has fences or strong accesses")
    at_once = tuple(loop.at_once for loop in found.loops if loop.loads)  # the most first
    rules = (
        (SUMS, 3, AT_ONCE_OF_SUMS),
        (UPDATES, max(len(at_once), 1), AT_ONCE_OF_SUMS),
        (COPIES, 1, AT_ONCE),
    )
    for kind, num, least in rules:
        too_few = len(at_once) < num or at_once[num - 1] < least or at_once[-1] < AT_ONCE
        if kind.fullmatch(name) and too_few:
            problems.append(
                f"loads at once {at_once} in its loops, where the first {num} are to have {least} "
                f"and none less than {AT_ONCE}"
            )
    return problems


def problems_of(key: str, found: Facts, before: Facts | None) -> list[str]:
    """What is wrong with a kernel; `before` is None where the table is of another nvcc."""
    name = key.split(maxsplit=1)[0]
    problems = compared(name, found).worse_than(compared(name, before)) if before else []
    problems += broken_rules(name, found)
    return [f"{key}: {problem}" for problem in problems]


def compare(facts: dict[str, Facts], table: dict[str, Facts]) -> list[str]:
    """The problems of all kernels; none is compared with an empty table."""
    archs = {key.split()[1] for key in facts}
    problems = [p for key, found in facts.items() for p in problems_of(key, found, table.get(key))]
    if table:
        problems += [f"{key}: not in the table" for key in facts if key not in table]
        gone = (key for key in table if key not in facts and key.split()[1] in archs)
        problems += [f"{key}: in the table, but there is no such kernel" for key in gone]
    return problems


def main() -> int:
    """Compares, and returns 1 where something is worse."""
    nvcc = buildconfig.find_nvcc()
    tools = {name: find_tool(nvcc, name) for name in ("cuobjdump", "nvdisasm")} if nvcc else {}
    if nvcc is None or not all(tools.values()):
        missing = " and no ".join(name for name, path in tools.items() if not path) or "nvcc"
        print(f"[sass] no {missing} here: kernels' code NOT compared")
        return 1
    cuda_kernels.compile_all(nvcc, IMAGES)
    facts: dict[str, Facts] = {}
    for source in cuda_kernels.sources():
        facts |= facts_of_image(IMAGES / f"{source.stem}.fatbin", **tools)
    without = [arch for arch in ARCHITECTURES if not any(k.endswith(f" sm_{arch}") for k in facts)]
    for arch in without:
        print(f"[sass] RINGCOMM_CUDA_ARCHS has no {arch}: sm_{arch} NOT compared")
    release = cuda_kernels.release_of(nvcc)
    if sys.argv[1:] == ["--update"]:
        if not without:
            write_table(release, facts)
            COUNTS.write_text(counts_of(facts))
        return int(bool(without))
    made_by, table = read_table()
    if made_by != release:
        print(f"[sass] the table is of nvcc {made_by}, this is {release}: numbers NOT compared")
        table = {}
    problems = compare(facts, table)
    if table and "90" not in without and COUNTS.read_text() != counts_of(facts):
        problems.append(f"{COUNTS.name} is not of these kernels (--update writes it)")
    better = [
        key
        for key, found in facts.items()
        if key in table and table[key].worse_than(compared(key.split()[0], found))
    ]
    print("\n".join(problems) or f"[sass] {len(facts)} kernels are as the table says, or better")
    if better:
        print("[sass] better than the table (--update writes it): " + ", ".join(better))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
