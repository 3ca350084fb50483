#!/usr/bin/env python3
"""Breaks the kernels where only nvcc compiles them, one way at a time: a test on PTX must fail.

    python3 tests/ptx/mutants.py [--dry] [NAME...]

Run by `make test-ptx ARGS=all`, after the tests have passed; with --dry, which looks only whether
the text is there, by each `make test-ptx`. Each mutant is one or more textual
replacements in a copy of csrc. The text must occur exactly once: if the source has moved on, the
run fails and says which mutant needs an update. The tests must fail with the expected words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build" / "ptx" / "mutants"
LIMIT_S = 300.0

ONE_SHOT = ("ringcomm_one_shot_bfloat16", "all_reduce_one_shot<TypedReducer<BFloat16Element>>")
TWO_SHOT = (
    "ringcomm_two_shot_bfloat16",
    "reduce_gather<TypedReducer<BFloat16Element>, ReduceShape::kAllReduce>",
)
# Of a file of its own: no body.
LOSS = ("ringcomm_loss_rows_bfloat16", "")
SUMS = "ptx: sums*"
ROWS = "loss rows: rows of any width*"


class Mutant(NamedTuple):
    """`edits`: file of csrc, text, replacement. `said`: words of the failure."""

    kernel: tuple[str, str]
    cases: str
    said: str
    edits: tuple[tuple[str, str, str], ...]


MUTANTS = {
    # A constexpr function without RINGCOMM_HD that refers to a constant of the host: nvcc puts a
    # trap in the place of the call, without a word.
    "trap_in_wait": Mutant(
        TWO_SHOT,
        SUMS,
        "trap",
        (
            (
                "cuda/kernels/block.h",
                "#include <cstdint>\n",
                "#include <algorithm>\n#include <cstdint>\n",
            ),
            (
                "cuda/kernels/block.h",
                "/// The wait of a block's thread, its look_until().",
                "inline constexpr int kLeastPeer = 0;\n"
                "constexpr int counted(int peer) { return std::max(peer, kLeastPeer); }\n"
                "/// The wait of a block's thread, its look_until().",
            ),
            (
                "cuda/kernels/block.h",
                "block.stopped(peer);\n    // After the reason to stop: ",
                "block.stopped(counted(peer));\n    // After the reason to stop: ",
            ),
        ),
    ),
    # nvcc takes the compiler's builtin for a constant.
    "countr_zero": Mutant(
        TWO_SHOT,
        SUMS,
        "the oracle's result",
        (
            (
                "cuda/kernels/reducers.h",
                "#include <cstdint>\n",
                "#include <bit>\n#include <cstdint>\n",
            ),
            (
                "cuda/kernels/reducers.h",
                "bits_as<float>((254u << 23) - "
                "bits_as<std::uint32_t>(static_cast<float>(divisor)))",
                "bits_as<float>((127u - static_cast<std::uint32_t>(std::countr_zero("
                "static_cast<unsigned>(divisor)))) << 23)",
            ),
        ),
    ),
    "half_a_warp": Mutant(
        LOSS,
        ROWS,
        "ERROR",
        (
            (
                "cuda/kernels/loss_kernels.cu",
                "for (int offset = 16; offset > 0; offset /= 2)\n      value = fmaxf",
                "for (int offset = 8; offset > 0; offset /= 2)\n      value = fmaxf",
            ),
        ),
    ),
    "bfloat16_pair_swapped": Mutant(
        TWO_SHOT,
        SUMS,
        "the oracle's result",
        (
            (
                "cuda/kernels/elements.h",
                "__floats2bfloat162_rn(low, high)",
                "__floats2bfloat162_rn(high, low)",
            ),
        ),
    ),
    "packet_words_swapped": Mutant(
        ONE_SHOT,
        SUMS,
        "the oracle's result|mismatch|does not fail",
        (
            (
                "cuda/kernels/gpu_block.cuh",
                'asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};"',
                'asm volatile("st.volatile.global.v2.u64 [%0], {%2, %1};"',
            ),
        ),
    ),
    "fewer_bytes_expected": Mutant(
        LOSS,
        ROWS,
        "bytes more at an mbarrier than it expects",
        (
            (
                "cuda/kernels/loss_kernels.cu",
                "arrive(shared_words().loaded[slot], num_bytes);",
                "arrive(shared_words().loaded[slot], num_bytes - 16);",
            ),
        ),
    ),
    "stores_left": Mutant(
        LOSS,
        "loss rows: more rows*",
        "ERROR",
        (("cuda/kernels/loss_kernels.cu", '"n"(kNumLeft)', '"n"(kNumLeft + 2)'),),
    ),
    "rank_for_number_of_blocks": Mutant(
        LOSS,
        ROWS,
        "ERROR|mbarrier",
        (("cuda/kernels/loss_kernels.cu", '"cluster_nctarank"', '"cluster_ctarank"'),),
    ),
    "load_where_not_wanted": Mutant(
        ONE_SHOT,
        SUMS,
        "the oracle's result|a kernel that does not fail",
        (
            (
                "cuda/kernels/memory.h",
                "#define RINGCOMM_LOAD_TWO_WORDS(words, from, is_wanted)                      \\\n"
                "  asm volatile(                                                              \\\n"
                '      "{ .reg .pred p; setp.ne.b32 p, %3, 0;',
                "#define RINGCOMM_LOAD_TWO_WORDS(words, from, is_wanted)                      \\\n"
                "  asm volatile(                                                              \\\n"
                '      "{ .reg .pred p; setp.eq.b32 p, %3, 0;',
            ),
        ),
    ),
    "unsigned_minimum": Mutant(
        TWO_SHOT,
        SUMS,
        "the oracle's result",
        (
            (
                "cuda/kernels/elements.h",
                "return __vmins2(words, 0x7fc07fc0u);",
                "return __vminu2(words, 0x7fc07fc0u);",
            ),
        ),
    ),
}


def _edited(name: str) -> dict[str, str]:
    """The texts of the files that a mutant changes."""
    texts: dict[str, str] = {}
    for file, old, new in MUTANTS[name].edits:
        text = texts.get(file) or (ROOT / "csrc" / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"mutant {name}: {file} has its text {text.count(old)} times")
        texts[file] = text.replace(old, new)
    return texts


def _mutate(name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for file, text in _edited(name).items():
        (folder / "csrc" / file).write_text(text)
    kernel, body = MUTANTS[name].kernel
    source = folder / "csrc" / "mutant.cu"
    if not body:
        source.write_text('#include "cuda/kernels/loss_kernels.cu"\n')
        return
    source.write_text(
        '#include "cuda/kernels/gpu_block.cuh"\n#include "cuda/kernels/kernel_list.h"\n'
        "namespace ringcomm::cuda {\n"
        f"RINGCOMM_GPU_KERNEL({kernel}, KernelCall, ({body}))\n}}\n"
    )


def check(name: str) -> str:
    """Returns what is wrong with a mutant; "" if the tests find it."""
    folder = OUT / name
    _mutate(name, folder)
    mutant = MUTANTS[name]
    make = ["make", "-s", "-f", str(HERE / "Makefile"), "mutant", "FORM=all"]
    built = subprocess.run(
        [*make, f"MUTANT={folder}", f"KERNEL={mutant.kernel[0]}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if built.returncode != 0:
        return f"does not compile:\n{built.stdout}{built.stderr}"
    try:
        done = subprocess.run(
            [str(folder / "ptx_tests"), f"-tc={mutant.cases}"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its tests do not end in {LIMIT_S:.0f} s"
    output = done.stdout + done.stderr
    if done.returncode == 0:
        return "the tests pass"
    if not any(words in output for words in mutant.said.split("|")):
        return f"the tests fail without {mutant.said!r}:\n{output[-2000:]}"
    return ""


def main() -> int:
    """Checks the mutants of the names, or all."""
    names = [name for name in sys.argv[1:] if name != "--dry"] or [*MUTANTS]
    for name in names:
        _edited(name)
    if "--dry" in sys.argv[1:]:
        return 0
    failed = 0
    for name in names:
        wrong = check(name)
        failed += bool(wrong)
        print(f"  mutant {name}: {wrong or 'found'}", flush=True)
        if not wrong and "RINGCOMM_TEST_KEEP_MUTANTS" not in os.environ:
            shutil.rmtree(OUT / name)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
