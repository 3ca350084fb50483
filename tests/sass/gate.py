#!/usr/bin/env python3
"""Compares what nvcc makes of the kernels that are called most with tests/sass/table.txt.

    python tests/sass/gate.py [--update]

Fails, and says which number of which kernel, where one has become worse: registers, bytes of stack
and of spills, generic and local accesses, fences, and 16-byte loads under way before the first of
them is used. Kernels of which the table says "hot" may have no stack, spill, generic or local
access at all. With --update it writes the table. The table is of one release of nvcc: with another
only what holds for hot kernels is checked. Nothing runs on a GPU.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
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
# The ring keeps some of its state in memory between loops: it is chosen by name only.
HOT = (
    "one_shot_bfloat16", "one_shot_float32", "two_shot_bfloat16", "two_shot_float32",
    "reduce_scatter_bfloat16", "reduce_scatter_float32", "reduce_bfloat16", "move", "move_same",
    "exchange", "update_adamw_bfloat16_bfloat16", "update_adamw_float32_float32",
    "update_sgd_bfloat16_bfloat16", "update_lomo_bfloat16_bfloat16",
    "loss_rows_bfloat16", "loss_rows_float32", "smooth_loss_rows_bfloat16",
    "smooth_loss_rows_float32", "shard_loss_rows_bfloat16", "shard_loss_rows_float32",
    "smooth_shard_loss_rows_bfloat16", "smooth_shard_loss_rows_float32",
)  # fmt: skip
OTHERS = ("ring_bfloat16", "ring_float32", "one_shot_any", "two_shot_any")
GROUP_SOURCE = """
#include "device/cuda/gpu_kernel.cuh"
#include "device/cuda/kernel_list.h"
namespace ringcomm::cuda {{
RINGCOMM_GPU_KERNEL(ringcomm_{name}, {rest})
}}
"""
LOSS_SOURCE = """
#include "device/cuda/loss_kernel_list.h"
#undef RINGCOMM_LOSS_KERNELS
#undef RINGCOMM_SHARD_LOSS_KERNELS
#define RINGCOMM_LOSS_KERNELS(X)
#define RINGCOMM_SHARD_LOSS_KERNELS(X)
#undef RINGCOMM_{kind}
#define RINGCOMM_{kind}(X) X(ringcomm_{name}, {rest})
#include "device/cuda/loss_kernels.cu"
"""
COLUMNS = ("registers", "stack", "spills", "generic", "local", "fences", "single", "at_once")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is in the code of one kernel.

    `at_once` are, of each piece of straight code that has several 16-byte loads, as many as are
    issued before the first is used, the most first; `single` are the pieces with one.
    """

    registers: int
    stack: int
    spills: int
    generic: int
    local: int
    fences: int
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
            for name in COLUMNS[:-1]
            if getattr(self, name) > getattr(before, name)
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


def facts_of(report: str, sass: str) -> Facts:
    """From what the assembler says of a kernel, and the disassembly."""

    def number(pattern: str) -> int:
        return max((int(found) for found in re.findall(pattern, report)), default=0)

    def count(pattern: str) -> int:
        return len(re.findall(rf"\s{pattern}\b", sass))

    loads = sorted((loads_at_once(piece) for piece in straight_pieces(sass)), reverse=True)
    return Facts(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill stores"),
        generic=count(r"(?:LD|ST|ATOM|RED)(?:\.\w+)*"),
        local=count(r"(?:LDL|STL)(?:\.\w+)*"),
        fences=count(r"MEMBAR(?:\.\w+)*"),
        single=loads.count(1),
        at_once=tuple(n for n in loads if n > 1),
    )


@functools.cache
def kernel_list() -> dict[str, str]:
    """Of every kernel a source that has it alone, from kernel_list.h and loss_kernel_list.h."""
    done = subprocess.run(
        ["c++", "-E", "-P", "-std=c++20", f"-I{buildconfig.CSRC}",
         "-imacros", "device/cuda/kernel_list.h", "-imacros", "device/cuda/loss_kernel_list.h",
         "-x", "c++", "-"],
        input="RINGCOMM_ALL_KERNELS(KERNEL)\nRINGCOMM_LOSS_KERNELS(LOSS)\n"
        "RINGCOMM_SHARD_LOSS_KERNELS(SHARD)",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    of_groups = re.findall(r"KERNEL\(ringcomm_(\w+), (\w+, \([^()]*\))\)", done.stdout)
    of_losses = re.findall(r"LOSS\(ringcomm_(\w+), (\([^()]*\))\)", done.stdout)
    of_shards = re.findall(r"SHARD\(ringcomm_(\w+), (\([^()]*\))\)", done.stdout)

    def of_kind(kind: str, found: list[tuple[str, str]]) -> dict[str, str]:
        return {n: LOSS_SOURCE.format(kind=kind, name=n, rest=rest) for n, rest in found}

    return {
        **{name: GROUP_SOURCE.format(name=name, rest=rest) for name, rest in of_groups},
        **of_kind("LOSS_KERNELS", of_losses),
        **of_kind("SHARD_LOSS_KERNELS", of_shards),
    }


def compile_one(nvcc: Path, nvdisasm: str, folder: Path, name: str, arch: str) -> Facts:
    """Raises subprocess.CalledProcessError where a tool fails."""
    source = folder / f"{name}-{arch}.cu"
    source.write_text(kernel_list()[name])
    cubin = source.with_suffix(".cubin")
    flags = [*cuda_kernels.FLAGS, "-O3", f"-arch=sm_{arch}", "-Xptxas", "-v", "-cubin"]
    command = [str(nvcc), *flags, "-I", str(buildconfig.CSRC), str(source), "-o", str(cubin)]
    built = subprocess.run(command, capture_output=True, text=True, check=True)
    sass = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True)
    return facts_of(built.stderr, sass.stdout)


def find_nvdisasm(nvcc: Path) -> str | None:
    """Beside nvcc, on PATH, or in Triton's package."""
    spec = importlib.util.find_spec("triton")
    triton = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else Path()
    places = [nvcc.resolve().parent / "nvdisasm", triton / "nvdisasm"]
    return next((str(p) for p in places if p.is_file()), None) or shutil.which("nvdisasm")


def read_table() -> tuple[str, dict[str, Facts]]:
    """The release of nvcc, and facts by "name sm_90"."""
    lines = TABLE.read_text().splitlines()
    rows = (line.split(maxsplit=3) for line in lines if line and not line.startswith("#"))
    return lines[0].removeprefix("# "), {f"{r[0]} {r[1]}": Facts.parse(r[3]) for r in rows}


def write_table(release: str, facts: dict[str, Facts]) -> None:
    head = f"{'# kernel':34}{'arch':8}{'kind':6}" + " ".join(f"{c:>9}" for c in COLUMNS)
    lines = [f"# {release}", head]
    for key, found in facts.items():
        name, arch = key.split()
        lines.append(f"{name:34}{arch:8}{'hot' if name in HOT else '-':6}{found.text()}")
    TABLE.write_text("\n".join(lines) + "\n")


def problems_of(key: str, found: Facts, before: Facts | None) -> list[str]:
    """What is wrong with a kernel; `before` is None where the table is of another nvcc."""
    problems = found.worse_than(before) if before else []
    if key.split(maxsplit=1)[0] in HOT:
        rules = ("stack", "spills", "generic", "local")
        problems += [
            f"{r} {getattr(found, r)}, of a hot kernel" for r in rules if getattr(found, r)
        ]
    return [f"{key}: {problem}" for problem in problems]


def main() -> int:
    """Compiles, compares, and returns 1 where something is worse."""
    nvcc = buildconfig.find_nvcc()
    nvdisasm = find_nvdisasm(nvcc) if nvcc else None
    if nvcc is None or nvdisasm is None:
        print(
            f"[sass] no {'nvcc' if nvcc is None else 'nvdisasm'} here: kernels' code NOT compared"
        )
        return 0
    release = cuda_kernels.release_of(nvcc)
    keys = [f"{name} sm_{arch}" for name in (*HOT, *OTHERS) for arch in ARCHITECTURES]
    with (
        tempfile.TemporaryDirectory(prefix="ringcomm_sass_") as folder,
        concurrent.futures.ThreadPoolExecutor(buildconfig.num_jobs()) as pool,
    ):

        def compile_key(key: str) -> Facts:
            name, arch = key.split(" sm_")
            return compile_one(nvcc, nvdisasm, Path(folder), name, arch)

        facts = dict(zip(keys, pool.map(compile_key, keys), strict=True))
    if sys.argv[1:] == ["--update"]:
        write_table(release, facts)
        return 0
    made_by, table = read_table()
    if made_by != release:
        print(f"[sass] the table is of nvcc {made_by}, this is {release}: numbers NOT compared")
        table = {}
    missing = [f"{key}: not in the table" for key in keys if table and key not in table]
    problems = missing + [p for key in keys for p in problems_of(key, facts[key], table.get(key))]
    better = [key for key in keys if key in table and table[key].worse_than(facts[key])]
    print("\n".join(problems) or f"[sass] {len(keys)} kernels are as the table says, or better")
    if better:
        print("[sass] better than the table (--update writes it): " + ", ".join(better))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
