"""PTX whose approximate instructions are as wrong as they may be on a GPU: the machine's are exact.

Kernels must give right results with all of them. What ptxas may do besides, one fused multiply-add
of a product and a sum, LLVM has done before it: Triton's PTX has no pair of them left.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# Errors in units of the last place: PTX allows 2 ^ -22 of ex2 and 2 units of div.full.
APPROXIMATE = {"ex2.approx.ftz.f32": 1, "ex2.approx.f32": 1, "div.full.f32": 2}
# Only the upper half of its result is there.
HALF = "rcp.approx.ftz.f64"
INSTRUCTION = re.compile(r"\s*([a-z][\w.:]*)\s+(%\w+),")
# What is moved is a normal number: the bits of 2 ^ -125 and of 2 ^ 127.
LEAST, GREATEST = 2 << 23, 254 << 23
DECLARED = "\t.reg .b32 %magnitude, %step;\n\t.reg .pred %is_moved;\n"


def with_errors(sign: int) -> Callable[[str], str]:
    """A change of PTX that moves results away from zero (sign 1) or towards it (-1)."""

    def change(ptx: str) -> str:
        signature, brace, body = ptx.partition("\n{\n")
        lines = []
        for line in body.split("\n"):
            lines.append(line)
            found = INSTRUCTION.match(line)
            if found is not None and found[1] in APPROXIMATE:
                lines += _moved(found[2], sign * APPROXIMATE[found[1]])
            elif found is not None and found[1] == HALF:
                lines.append(f"\tand.b64 {found[2]}, {found[2]}, 0xFFFFFFFF00000000;")
            elif ".approx" in line or "div.full" in line:
                raise ValueError(f"how wrong may it be? {line}")
        return f"{signature}{brace}{DECLARED}" + "\n".join(lines)

    return change


def _moved(to: str, num_ulps: int) -> list[str]:
    """Adds to a register's bits, where it is a normal number that is not 1."""
    return [
        f"\tand.b32 %magnitude, {to}, 2147483647;",
        f"\tsub.u32 %magnitude, %magnitude, {LEAST};",
        f"\tsetp.lt.u32 %is_moved, %magnitude, {GREATEST - LEAST};",
        f"\tsetp.ne.and.f32 %is_moved, {to}, 0f3F800000, %is_moved;",
        f"\tselp.b32 %step, {num_ulps}, 0, %is_moved;",
        f"\tadd.s32 {to}, {to}, %step;",
    ]


VARIANTS: dict[str, Callable[[str], str]] = {
    "exact": lambda ptx: ptx,
    "larger": with_errors(1),
    "smaller": with_errors(-1),
}
