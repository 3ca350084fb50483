"""Small kernels for what the launch and the machine promise: arguments, grids, and refusals.

    python triton_small.py NAME

runs one of them for sm_90. It prints "right", or ends as the machine ends it. Triton evaluates
annotations, so kernels have those of its own types alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
import triton_launch


@triton.jit(do_not_specialize=("varying",))
def arguments_kernel(  # type: ignore[no-untyped-def]
    out, pair, absent, one, sixteen, varying, wide, flag, number, COUNT: tl.constexpr
):
    """Stores what it is given, at places that tell which."""
    numbers = pair[1]
    added, scale = numbers
    tl.store(out, tl.load(pair[0]) + added)
    tl.store(out + 1, one + COUNT)
    tl.store(out + 2, sixteen)
    tl.store(out + 3, varying)
    tl.store(out + 4, wide)
    tl.store(out + 5, flag.to(tl.int64))
    tl.store(out + 6, (number * scale).to(tl.int64))
    if absent is None:
        tl.store(out + 7, -1)


def check_arguments() -> None:
    """Tuples in tuples, None, constants, ints that are specialized for their value, or not."""
    source = torch.tensor([1000])
    for one, sixteen, varying, wide, flag in (
        (1, 16, 1, 2**40, True),
        (2, 17, 16, -(2**40), False),
        (2**31 - 4, 48, -5, 1, True),
    ):
        out = torch.zeros(8, dtype=torch.int64)
        pair = (source, (sixteen, 0.25))
        arguments_kernel[(1,)](out, pair, None, one, sixteen, varying, wide, flag, 12.0, COUNT=3)
        wanted = [1000 + sixteen, one + 3, sixteen, varying, wide, int(flag), 3, -1]
        assert out.tolist() == wanted, (out.tolist(), wanted)


@triton.jit
def grid_kernel(out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each element is made of the program's numbers and its lane."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    lane = tl.arange(0, BLOCK)
    total = tl.sum(lane * lane, 0)
    tl.store(out + program * BLOCK + lane, x + 10 * y + 100 * z + 1000 * (total - lane))


def check_grid() -> None:
    """Three axes, few warps and many: sums over all lanes by shuffles and shared memory."""
    for num_warps, block in ((1, 16), (4, 128), (32, 2048)):
        out = torch.zeros(2, 3, 5, block, dtype=torch.int32)
        grid_kernel[(5, 3, 2)](out, BLOCK=block, num_warps=num_warps)
        lane = torch.arange(block, dtype=torch.int32)
        for z in range(2):
            for y in range(3):
                for x in range(5):
                    wanted = x + 10 * y + 100 * z + 1000 * (int((lane * lane).sum()) - lane)
                    assert torch.equal(out[z, y, x], wanted.int()), (x, y, z)


@triton.jit
def refused_kernel(out, WHAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Breaks one rule."""
    lane = tl.arange(0, 32)
    if WHAT == "load":
        tl.store(out, tl.load(out + 4))
    elif WHAT == "store":
        tl.store(out + 3 + lane, lane, mask=lane < 2)
    elif WHAT == "race":
        tl.store(out, tl.program_id(0))
    elif WHAT == "opcode":
        asm: tl.constexpr = "vabsdiff.s32.s32.s32 $0, $1, $2;"
        found = tl.inline_asm_elementwise(asm, "=r,r,r", [lane, lane], tl.int32, True, 1)
        tl.store(out + lane, found, mask=lane < 4)


def refused(what: str) -> None:
    buffer = torch.zeros(9, dtype=torch.int32)
    refused_kernel[(2,)](buffer[:4], WHAT=what, num_warps=1)


CHECKS: dict[str, Any] = {"arguments": check_arguments, "grid": check_grid}


def main() -> None:
    name = sys.argv[1]
    triton_launch.install(90)
    if name in CHECKS:
        CHECKS[name]()
    else:
        refused(name)
    print("right")


if __name__ == "__main__":
    main()
