#!/usr/bin/env python3
"""Compares what nvcc makes of every kernel with tests/sass/table.txt.

    python tests/sass/gate.py [--update]

Reads the images in build/cuda, and compiles them first where they are missing or old. Fails, and
says which number of which kernel, where one has become worse: registers, bytes of stack, generic
and local accesses, fences, words of 8 bytes that ranks exchange, and 16-byte loads under way before
the first of them is used. Hot kernels may have no stack, generic or local access at all, whatever
the table says, and so no spill, which is both; packets are exchanged by accesses of 16 bytes, and
sums and copies have at least as many loads under way as the source asks for. With --update it
writes the table. The table is of one release of nvcc: with another only these rules are checked.
Nothing runs on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = Path(__file__).with_name("table.txt")
sys.path.insert(0, str(ROOT / "tools"))

import buildconfig  # noqa: E402
import cuda_kernels  # noqa: E402

ARCHITECTURES = ("90", "100")
IMAGES = ROOT / "build" / "cuda"
# The ring, which is chosen by name only, keeps some of its state in memory between loops; of types
# that nobody reduces in bulk, and of what runs once in a call, a table says enough.
COLD = re.compile(r"ring_\w+|\w+_any|where|sum_losses")
WITH_PACKETS = re.compile(r"one_shot_\w+")
# They load 4 vectors at once or more wherever they load any; sums of 2, 4 and 8 sources 8, which is
# N * U (cuda/kernels/combine.h).
SUMS = re.compile(r"(two_shot|reduce_scatter|reduce)_(float16|bfloat16|float32)")
COPIES = re.compile(r"move(_same)?")
AT_ONCE = 4
AT_ONCE_OF_SUMS = (8, 8, 8)
COLUMNS = (
    "registers", "stack", "generic", "local", "fences", "words", "packets", "single", "at_once",
)  # fmt: skip
# Of these fewer are worse, which the rules check.
NOT_WORSE = ("packets", "at_once")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is in the code of one kernel.

    `words` and `packets` are accesses of 8 and 16 bytes that another rank sees as they are (strong,
    of the system); of packets the fewer of loads and stores. `at_once` are, of each piece of
    straight code that has several 16-byte loads, as many as are issued before the first is used,
    the most first; `single` are the pieces with one.
    """

    registers: int
    stack: int
    generic: int
    local: int
    fences: int
    words: int
    packets: int
    single: int
    at_once: tuple[int, ...]

    def text(self) -> str:
        """The columns of the table."""
        groups = [f"{n}x{self.at_once.count(n)}" for n in sorted(set(self.at_once), reverse=True)]
        numbers = [str(getattr(self, name)) for name in COLUMNS[:-1]]
        return " ".join([*(f"{number:>9}" for number in numbers), " ", ",".join(groups) or "-"])

    @staticmethod
    def parse(text: str) -> Facts:
        """The other way."""
        *numbers, at_once = text.split()
        pairs = [group.split("x") for group in at_once.split(",") if group != "-"]
        loads = tuple(int(n) for n, times in pairs for _ in range(int(times)))
        columns = {name: int(n) for name, n in zip(COLUMNS[:-1], numbers, strict=True)}
        return Facts(at_once=loads, **columns)

    def worse_than(self, before: Facts) -> list[str]:
        """Which columns have become worse, with both numbers."""
        found = [
            f"{name} {getattr(before, name)} -> {getattr(self, name)}"
            for name in COLUMNS
            if name not in NOT_WORSE and getattr(self, name) > getattr(before, name)
        ]
        fewer = len(self.at_once) < len(before.at_once)
        if fewer or any(a < b for a, b in zip(self.at_once, before.at_once, strict=False)):
            found.append(f"loads at once {before.at_once} -> {self.at_once}")
        return found


def straight_pieces(sass: str) -> list[list[str]]:
    """The instructions between labels and branches, without their predicates."""
    pieces: list[list[str]] = [[]]
    for line in sass.splitlines():
        if re.match(r"\.L\w*:", line):
            pieces.append([])
        if match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S.*?)\s*;", line):
            pieces[-1].append(match.group(1))
            if match.group(1).startswith(("BRA", "EXIT", "RET", "CALL", "WARPSYNC")):
                pieces.append([])
    return pieces


def loads_at_once(piece: list[str]) -> int:
    """The most 16-byte loads of a piece that are issued before one of them is used."""
    most = 0
    loaded: set[int] = set()
    num_loads = 0
    for instruction in piece:
        operation, _, operands = instruction.partition(" ")
        first, _, rest = operands.partition(",")
        is_load = operation.startswith("LDG") and ".128" in operation and "STRONG" not in operation
        read = operands if operation.startswith(("ST", "RED")) else rest
        if loaded & {int(number) for number in re.findall(r"\bR(\d+)", read)}:
            loaded, num_loads = set(), 0
        if is_load and (match := re.match(r"R(\d+)", first)):
            loaded |= {int(match.group(1)) + word for word in range(4)}
            num_loads += 1
            most = max(most, num_loads)
    return most


def facts_of(usage: str, sass: str) -> Facts:
    """Of one kernel, from what cuobjdump says that it uses, and the disassembly."""

    def number(name: str) -> int:
        return int(re.findall(rf"{name}:(\d+)", usage)[0])

    def count(pattern: str) -> int:
        return len(re.findall(rf"\s{pattern}\b", sass))

    loads = sorted((loads_at_once(piece) for piece in straight_pieces(sass)), reverse=True)
    return Facts(
        registers=number("REG"),
        stack=number("STACK"),
        generic=count(r"(?:LD|ST|ATOM|RED)(?:\.\w+)*"),
        local=count(r"(?:LDL|STL)(?:\.\w+)*"),
        fences=count(r"MEMBAR(?:\.\w+)*"),
        words=count(r"(?:LD|ST)G?\.E\.64\.STRONG\.SYS"),
        packets=min(count(rf"{access}G?\.E\.128\.STRONG\.SYS") for access in ("LD", "ST")),
        single=loads.count(1),
        at_once=tuple(n for n in loads if n > 1),
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


def read_table() -> tuple[str, dict[str, Facts]]:
    """The release of nvcc, and facts by "name sm_90"."""
    lines = TABLE.read_text().splitlines()
    rows = (line.split(maxsplit=3) for line in lines if line and not line.startswith("#"))
    return lines[0].removeprefix("# "), {f"{r[0]} {r[1]}": Facts.parse(r[3]) for r in rows}


def is_hot(name: str) -> bool:
    return COLD.fullmatch(name) is None


def write_table(release: str, facts: dict[str, Facts]) -> None:
    head = f"{'# kernel':36}{'arch':8}{'kind':6}" + " ".join(f"{c:>9}" for c in COLUMNS)
    lines = [f"# {release}", head]
    for key, found in facts.items():
        name, arch = key.split()
        lines.append(f"{name:36}{arch:8}{'hot' if is_hot(name) else '-':6}{found.text()}")
    TABLE.write_text("\n".join(lines) + "\n")


def broken_rules(name: str, found: Facts) -> list[str]:
    """What no kernel of its kind may have, whatever the table says."""
    problems = []
    if is_hot(name):
        rules = ("stack", "generic", "local")
        problems += [
            f"{r} {getattr(found, r)}, of a hot kernel" for r in rules if getattr(found, r)
        ]
    if WITH_PACKETS.fullmatch(name) and (found.packets == 0 or found.words > 0):
        problems.append(
            f"packets are not exchanged by 16-byte accesses alone: {found.packets} of these, "
            f"{found.words} of 8 bytes"
        )
    least = AT_ONCE_OF_SUMS if SUMS.fullmatch(name) else (AT_ONCE,)
    if (SUMS.fullmatch(name) or COPIES.fullmatch(name)) and (
        found.single > 0
        or len(found.at_once) < len(least)
        or any(n < m for n, m in zip(found.at_once, least, strict=False))
        or min(found.at_once) < AT_ONCE
    ):
        problems.append(
            f"loads at once {found.at_once} and {found.single} single ones, where the first are to "
            f"be {least} and none less than {AT_ONCE}"
        )
    return problems


def problems_of(key: str, found: Facts, before: Facts | None) -> list[str]:
    """What is wrong with a kernel; `before` is None where the table is of another nvcc."""
    problems = found.worse_than(before) if before else []
    problems += broken_rules(key.split(maxsplit=1)[0], found)
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
    if nvcc is None:
        print("[sass] no nvcc here: kernels' code NOT compared")
        return 0
    tools = {name: find_tool(nvcc, name) for name in ("cuobjdump", "nvdisasm")}
    if not all(tools.values()):
        missing = " and no ".join(name for name, path in tools.items() if not path)
        print(f"[sass] no {missing} here: kernels' code NOT compared")
        return 0
    cuda_kernels.compile_all(nvcc, IMAGES)
    facts: dict[str, Facts] = {}
    for source in cuda_kernels.sources():
        facts |= facts_of_image(IMAGES / f"{source.stem}.fatbin", **tools)
    release = cuda_kernels.release_of(nvcc)
    if sys.argv[1:] == ["--update"]:
        write_table(release, facts)
        return 0
    made_by, table = read_table()
    if made_by != release:
        print(f"[sass] the table is of nvcc {made_by}, this is {release}: numbers NOT compared")
        table = {}
    for arch in ARCHITECTURES:
        if not any(key.endswith(f" sm_{arch}") for key in facts):
            print(f"[sass] RINGCOMM_CUDA_ARCHS has no {arch}: sm_{arch} NOT compared")
    problems = compare(facts, table)
    better = [key for key in facts if key in table and table[key].worse_than(facts[key])]
    print("\n".join(problems) or f"[sass] {len(facts)} kernels are as the table says, or better")
    if better:
        print("[sass] better than the table (--update writes it): " + ", ".join(better))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
