"""Compiles the Triton kernels of weight updates for GPUs that are not here.

As a script: python update_variants.py ARCH prints as JSON, for every variant, what
triton_compile.py reports, and how many products of matrices by which instruction; --table as text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringcomm.kernels import linear_update, matrix_update, weight_update
from triton_compile import compile_kernel, print_reports, report

from ringcomm.ops.updates import arguments as plans

INTEGERS = {
    *("lead", "num_elems", "num_rows", "num_cols", "width", "padding_idx", "key"),
    *("num_tokens", "num_out", "num_in", "x_stride", "grad_stride"),
}
POINTERS = {
    **dict.fromkeys(("row_factor", "col_factor", "step_and_decay"), "fp32"),
    **dict.fromkeys(("row_sums", "col_sums", "sums"), "fp64"),
    **dict.fromkeys(("order", "rows", "begins", "ends"), "i64"),
    "low": "i16",
}
# Of whole vectors, as they are where layers are of a multiple of 16 features.
DIVISIBLE = ("num_cols", "width", "num_out", "num_in", "x_stride", "grad_stride")
# Weight, gradient, and how the weight is rounded.
NUMBERS = (
    ("fp32", "fp32", ""),
    ("fp32", "bf16", ""),
    ("bf16", "bf16", "stochastic"),
    ("bf16", "bf16", "split"),
    ("bf16", "fp32", "stochastic"),
    ("fp16", "fp16", ""),
)
PRODUCTS = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}


class Variant(NamedTuple):
    """A kernel with the types of its tensors and its compile-time arguments."""

    name: str
    kernel: Any
    tensors: dict[str, str]
    fixed: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    divisible: tuple[str, ...] = DIVISIBLE


def of_numbers(arch: int) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """What is said of the numbers' kinds, and what they are to a kernel."""
    # Elsewhere the others differ from these as they do on sm_90.
    for weight, grad, rounding in NUMBERS if arch == 90 else NUMBERS[2:5]:
        fixed: dict[str, Any] = {"IS_STOCHASTIC": rounding == "stochastic"}
        if rounding != "split":
            fixed["low"] = None
        tensors = {"weight": f"*{weight}", "grad": f"*{grad}", "grad_out": f"*{grad}"}
        yield f"{weight} {grad} {rounding}", {**tensors, "x": f"*{grad}"}, fixed


def elementwise(arch: int) -> Iterator[Variant]:
    """Those that memory bounds."""
    tile = {"BLOCK_ROWS": plans.MATRIX_ROWS, "BLOCK_COLS": plans.MATRIX_COLS}
    block = {"BLOCK": plans.EMBEDDING_BLOCK, "UNROLL": plans.EMBEDDING_UNROLL}
    for said, tensors, fixed in of_numbers(arch):
        sgd = {"BLOCK": plans.SGD_BLOCK, "IS_ALIGNED": True, **fixed}
        yield Variant(
            f"sgd {said}", weight_update.sgd_kernel, tensors, sgd, plans.SGD_WARPS, divisible=()
        )
        for what, rows in (("touched", {}), ("all", {"rows": None})):
            yield Variant(
                f"embedding {what} {said}",
                weight_update.embedding_kernel,
                tensors,
                {**block, **rows, **fixed},
                plans.EMBEDDING_WARPS,
            )
        for kernel in (
            matrix_update.square_sums_kernel,
            matrix_update.update_squares_kernel,
            matrix_update.adalomo_kernel,
        ):
            named = f"{kernel.fn.__name__} {said}"
            yield Variant(named, kernel, tensors, {**tile, **fixed}, plans.MATRIX_WARPS)
    sgd["IS_ALIGNED"] = False
    yield Variant(
        "sgd unaligned", weight_update.sgd_kernel, tensors, sgd, plans.SGD_WARPS, divisible=()
    )


def products(arch: int) -> Iterator[Variant]:
    """Those of linear layers, by every plan."""
    for said, tensors, fixed in of_numbers(arch):
        element = tensors["x"].removeprefix("*")
        is_fp32 = element == "fp32"
        described = () if is_fp32 or arch < 90 else plans.DESCRIBED
        for plan in (*described, *(plans.ADDRESSED_FP32 if is_fp32 else plans.ADDRESSED)):
            if plan.block_out == 64 and not fixed["IS_STOCHASTIC"]:
                continue  # small tiles of one kind will do
            is_described = plan in described
            kernel = linear_update.addressed_kernel
            operands = {}
            if is_described:
                kernel = linear_update.described_kernel
                operands = {
                    name: f"tensordesc<{element}[{plan.block_tokens}, {width}]>"
                    for name, width in (("x", plan.block_in), ("grad_out", plan.block_out))
                }
            blocks = {
                "BLOCK_TOKENS": plan.block_tokens,
                "BLOCK_OUT": plan.block_out,
                "BLOCK_IN": plan.block_in,
            }
            what = "described" if is_described else "addressed"
            yield Variant(
                f"linear {what} {plan.block_out}x{plan.block_in} {said}",
                kernel,
                {**tensors, **operands},
                {**blocks, **fixed},
                plan.num_warps,
                plan.num_stages,
            )


def signature(variant: Variant) -> dict[str, str]:
    """The types of a kernel's arguments."""

    def type_of(name: str) -> str:
        if name in variant.fixed:
            return "constexpr"
        if name in variant.tensors:
            return variant.tensors[name]
        if name in POINTERS:
            return f"*{POINTERS[name]}"
        if name == "first_elem":
            return "i64"
        return "i32" if name in INTEGERS else "fp32"

    return {param.name: type_of(param.name) for param in variant.kernel.params}


def reports(arch: int) -> dict[str, dict[str, Any]]:
    """What the compiler makes of each."""
    found = {}
    for variant in itertools.chain(elementwise(arch), products(arch)):
        types = signature(variant)
        fixed = {name: value for name, value in variant.fixed.items() if name in types}
        compiled = compile_kernel(
            variant.kernel,
            types,
            fixed,
            arch,
            variant.divisible,
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )
        ptx = compiled.asm["ptx"]
        found[variant.name] = {
            "warps": variant.num_warps,
            "stages": variant.num_stages,
            **report(compiled),
            "shared_bytes": compiled.metadata.shared,
            "waits": sorted(set(re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))),
            **{name: ptx.count(instruction) for name, instruction in PRODUCTS.items()},
        }
    return found


if __name__ == "__main__":
    print_reports(__doc__, reports)
