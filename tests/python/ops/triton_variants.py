"""Compiles cross-entropy's Triton kernels for GPUs that are not here.

As a script: python triton_variants.py ARCH prints as JSON, for every variant, its global loads and
stores, registers per thread and bytes of stack (spills) and shared memory; --table as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringcomm.kernels import cross_entropy, cross_entropy_in_place, token_losses
from triton_compile import compile_kernel, print_reports, report

from ringcomm.ops import triton_kernels as plans
from ringcomm.ops.losses.token_losses_cuda import COUNT_BLOCK, TOKEN_BLOCK

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


def reports(arch: int) -> dict[str, dict[str, Any]]:
    """What the compiler makes of each; strides and bounds have no known divisor."""
    found = {}
    for name, kernel, element, fixed, num_warps in variants():
        types = signature(kernel, element, fixed)
        compiled = compile_kernel(kernel, types, fixed, arch, num_warps=num_warps)
        found[name] = {"warps": num_warps, **report(compiled)}
    return found


if __name__ == "__main__":
    print_reports(__doc__, reports)
