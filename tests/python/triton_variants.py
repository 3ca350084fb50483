"""Compiles cross-entropy's Triton kernels for GPUs that are not here.

As a script: python triton_variants.py ARCH prints as JSON, for every variant, its global loads and
stores, registers per thread and bytes of stack (spills) and shared memory; --table as text.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from ringcomm.kernels import cross_entropy, cross_entropy_in_place, token_losses
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringcomm.ops import triton_plans as plans
from ringcomm.ops.token_losses_cuda import COUNT_BLOCK, TOKEN_BLOCK

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
POINTERS = {"target": "i64", "denominator": "fp64", "weight_sum": "fp64"}
FLOATS = ("logit_scale", "softcap", "label_smoothing", "z_loss", "way")
INTEGERS = (*cross_entropy.VARYING, "stride", "to_stride", "num_entries")
FLAGS = {
    *("HAS_SOFTCAP", "SMOOTHS", "HAS_PADDING", "WANTS_WEIGHTED", "WANTS_MORE"),
    *("IS_HELD", "IS_ALIGNED"),
}
# Rows that are read twice, held by a whole SM, and by a few warps.
WIDTHS = (128256, 32000, 4000)

Variant = tuple[str, Any, str, dict[str, Any], int]


def constants(kernel: Any, element_bytes: int, block: int, is_full: bool, **known: Any) -> Any:
    """The compile-time arguments: every option on, or none of them."""
    names = [param.name for param in kernel.params]
    found: dict[str, Any] = {name: is_full for name in names if name in FLAGS}
    found |= {"VEC": 16 // element_bytes, "BLOCK": block, "IS_ALIGNED": True, **known}
    if not is_full:
        found |= {"weight": None, "shard_weight": None, "weight_sum": None}
    return {name: value for name, value in found.items() if name in names}


def variants() -> Iterator[Variant]:
    """Name, kernel, type of the logits, constants and warps of what the launchers launch."""
    tokens = token_losses
    for element, element_bytes in TYPES.items():
        for is_full in (False, True):
            if element == "fp16" and is_full:
                continue
            said = f"{element} {'all options' if is_full else 'plain'}"
            for kernel, plan in (
                (cross_entropy.stats_kernel, plans.stats_plan(WIDTHS[0])),
                (cross_entropy.grad_kernel, plans.grad_plan(WIDTHS[0], element_bytes)),
            ):
                fixed = constants(kernel, element_bytes, plan.block, is_full)
                yield f"{kernel.fn.__name__} {said}", kernel, element, fixed, plan.num_warps
            kernel = cross_entropy_in_place.stats_and_grad_kernel
            for width in WIDTHS if element != "fp16" else ():
                held = plans.held_plan(width, 3 if is_full else 0)
                plan = held or plans.twice_plan(element_bytes)
                fixed = constants(
                    kernel, element_bytes, plan.block, is_full, IS_HELD=held is not None
                )
                yield f"in place {width} {said}", kernel, element, fixed, plan.num_warps
        kernel, plan = cross_entropy.scale_kernel, plans.grad_plan(WIDTHS[0], element_bytes)
        fixed = constants(kernel, element_bytes, plan.block, True)
        yield f"scale_kernel {element}", kernel, element, fixed, plan.num_warps
    kernel, plan = cross_entropy.grad_kernel, plans.grad_plan(WIDTHS[0], 2)
    fixed = constants(kernel, 2, plan.block, False, IS_ALIGNED=False)
    yield "grad_kernel unaligned", kernel, "bf16", fixed, plan.num_warps
    block = TOKEN_BLOCK
    yield "merge_kernel", tokens.merge_kernel, "", {"NUM_RANKS": 4, "BLOCK": block}, 4
    yield "loss_kernel", tokens.loss_kernel, "", {"SMOOTHS": True, "BLOCK": block}, 4
    block = COUNT_BLOCK
    yield "count_kernel", tokens.count_kernel, "", {"weight": None, "BLOCK": block}, 8
    yield "reduce_kernel", tokens.reduce_kernel, "", {"BLOCK": block}, 8


def signature(kernel: Any, element: str, fixed: dict[str, Any]) -> dict[str, str]:
    """The types of a kernel's arguments."""

    def type_of(name: str) -> str:
        if name in fixed:
            return "constexpr"
        if name in ("logits", "to", "tensor"):
            return f"*{element}"
        if name in INTEGERS:
            return "i32"
        return "fp32" if name in FLOATS else f"*{POINTERS.get(name, 'fp32')}"

    return {param.name: type_of(param.name) for param in kernel.params}


def compile_variant(variant: Variant, arch: int) -> dict[str, Any]:
    """What the compiler and the assembler make of it; strides and bounds have no known divisor."""
    _, kernel, element, fixed, num_warps = variant
    types = signature(kernel, element, fixed)
    positions = {name: (i,) for i, name in enumerate(types)}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={positions[name]: value for name, value in fixed.items()},
        attrs={
            positions[name]: [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    return {
        "loads": _accesses("ld", compiled.asm["ptx"]),
        "stores": _accesses("st", compiled.asm["ptx"]),
        **_resources(compiled.asm["cubin"]),
    }


def _accesses(kind: str, ptx: str) -> list[str]:
    """The widths of global accesses: b16, v4.b32."""
    found = re.findall(rf"\b{kind}\.global[\w.:]*?\.((?:v\d\.)?[a-z]\d+)\b", ptx)
    return sorted(set(found))


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
    assert found, said
    names = ("registers", "stack_bytes", "shared_bytes")
    return dict(zip(names, map(int, found.groups()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arch", type=int, help="80, 90 or 100")
    parser.add_argument("--table", action="store_true", help="as text")
    arguments = parser.parse_args()
    found = {variant[0]: compile_variant(variant, arguments.arch) for variant in variants()}
    if not arguments.table:
        print(json.dumps(found))
        return
    warps = {variant[0]: variant[-1] for variant in variants()}
    for name, entry in found.items():
        used = [f"{entry[key]:6}" for key in ("registers", "stack_bytes", "shared_bytes")]
        print(f"{name:45} {warps[name]:2} warps", *used, *entry["loads"], "|", *entry["stores"])


if __name__ == "__main__":
    main()
