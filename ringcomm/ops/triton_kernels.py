"""Imports ringcomm.kernels at the first launch, and chooses the kernels' launch parameters.

Importing ringcomm needs no Triton.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ringcomm import _kernels
from ringcomm.torch_names import has_kernel

VECTOR_BYTES = 16
WARP_SIZE = 32
MAX_WARPS = 32
# At least as many lanes as both edges of a row have.
MIN_BLOCK = 32
# Of kernels over tokens: some for each program, or all for one.
TOKENS, ONE_PROGRAM = {"BLOCK": 128, "num_warps": 4}, {"BLOCK": 2048, "num_warps": 8}


@functools.cache
def kernels() -> ModuleType:
    """ringcomm.kernels with its modules; raises ImportError without Triton."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "cross_entropy and weight updates on CUDA tensors use Triton kernels, but `import"
            f" triton` failed ({error}): pip install triton"
        ) from error
    for name in ("cross_entropy", "token_losses", "weight_update"):
        importlib.import_module(f"ringcomm.kernels.{name}")
    return importlib.import_module("ringcomm.kernels")


@functools.cache
def check_operators(names: tuple[str, ...], device_type: str) -> None:
    """Raises NotImplementedError for an operator of ringcomm that a device does not have.

    Or ImportError, where its kernels need Triton.
    """
    if device_type == "cuda":
        kernels()
    for name in names:
        if not has_kernel(f"ringcomm::{name}", device_type):
            raise NotImplementedError(
                f"the operator ringcomm::{name} has no implementation for tensors on {device_type}:"
                " no weight has been written. Train the model on a CPU or a CUDA device"
            )


L = TypeVar("L", bound=Callable[..., Any])
_CUDA = torch.library.Library("ringcomm", "IMPL", "CUDA")


def on_cuda(launcher: L) -> L:
    """Registers a function as the CUDA implementation of the operator of its name."""
    _CUDA.impl(launcher.__name__, launcher)
    return launcher


# What Triton has compiled, and its last arguments, by all that it compiles for.
_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) on the first argument's device.

    Finds sooner than Triton what it has compiled; its knobs count at the first such launch alone.
    """
    key = (kernel.fn, args[0].get_device(), _kernels.argument_kinds(args), *constants.items())
    with torch.cuda.device_of(args[0]):
        if (found := _compiled.get(key)) is not None:
            compiled, last = found
            compiled[(*grid, 1, 1)[:3]](*args, *last)
        elif (compiled := kernel[grid](*args, **constants)) is not None:
            _compiled[key] = compiled, [constants[x] for x in kernel.arg_names[len(args) :]]


def lead_of(tensor: Tensor) -> int:
    """Elements between the last 16-byte boundary and the tensor."""
    return tensor.data_ptr() % VECTOR_BYTES // tensor.element_size()


# ---- rows of logits


class Plan(NamedTuple):
    """Elements at a time, and the warps that share them."""

    block: int
    num_warps: int

    def constants(self, rows: Tensor) -> dict[str, int]:
        """The compile-time arguments of a kernel that reads the rows in vectors."""
        vector_elems = VECTOR_BYTES // rows.element_size()
        return {"VEC": vector_elems, "BLOCK": self.block, "num_warps": self.num_warps}


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


@functools.cache
def _plan(width: int, elems_per_thread: int, max_warps: int) -> Plan:
    """As many warps as the row or `max_warps` allows."""
    block = max(MIN_BLOCK, min(_power_of_two(width), elems_per_thread * WARP_SIZE * max_warps))
    return Plan(block, max(1, min(max_warps, block // (elems_per_thread * WARP_SIZE))))


def stats_plan(width: int) -> Plan:
    """For the sums over a row: 8 a thread are 32 registers, and 75 with every option on.

    2048 threads on an SM then have 32 KB in flight. 16 a thread: 58 registers, 166 with all on.
    """
    return _plan(width, 8, 8)


def grad_plan(width: int, element_bytes: int) -> Plan:
    """For a pass without sums: two vectors a thread are 32 registers, and 56 with all on."""
    return _plan(width, 2 * VECTOR_BYTES // element_bytes, 8)


def held_plan(width: int, num_options: int) -> Plan | None:
    """For a row in registers; None where it is too wide for them.

    32 elements a thread are the 64 registers that 1024 threads have. Each of softcap, class weights
    and outputs keeps more of an element, and spills unless there are half as many.
    """
    elems_per_thread = max(8, 32 >> num_options)
    if _power_of_two(width) > elems_per_thread * WARP_SIZE * MAX_WARPS:
        return None
    return _plan(width, elems_per_thread, MAX_WARPS)


def twice_plan(element_bytes: int) -> Plan:
    """For two reads of a row, with so many threads per row that all active rows fit in L2.

    1024 threads of more than 32 registers are one row for each SM: 132 rows of 128256 bfloat16
    elements are 34 MB of an H200's 50. The loops take 14 and 8 instructions an element: 0.76 ms for
    8192 such rows if all SMs issue at each clock of 1.755 GHz, beside 0.98 ms for one read and one
    write of memory.
    """
    return Plan(MAX_WARPS * WARP_SIZE * VECTOR_BYTES // element_bytes, MAX_WARPS)


# ---- weights

# One vector of 16-bit elements a thread: 32 to 40 registers, so that an SM has 2048 threads with
# 64 KB in flight, where 23 KB keep its memory busy.
SGD_BLOCK, SGD_WARPS = 2048, 8
# Few warps for a row of an embedding: most rows are of one token or two.
EMBEDDING_BLOCK, EMBEDDING_WARPS, EMBEDDING_UNROLL = 1024, 4, 4
# One vector a thread: 40 to 51 registers (sm_90). About as many programs as 132 SMs have at once;
# more would leave more parts, which each program of the next kernel reads; those of a row of more
# than 131,072 elements are summed before.
MATRIX, MATRIX_PROGRAMS = {"BLOCK_ROWS": 16, "BLOCK_COLS": 128, "num_warps": 8}, 1024
MOMENTS = {"PARTS": 32, "BLOCK": 64, "num_warps": 8}


# ---- products

# A linear layer's gradient is computed in fp32 in groups of rows, which the update then reads. A
# group is a quarter of the rows, and small enough to stay in an L2 of 50 MB. Small gradients are
# computed at once.
PRODUCT_BYTES, SMALL_PRODUCT_BYTES = 32 << 20, 8 << 20
PRODUCT_TILE = 128  # rows of a tile of the product
WHOLE_BYTES = 256 << 20  # of a gradient in the weight's dtype, for stochastic rounding


def rows_per_product(num_rows: int, num_cols: int) -> int:
    """The number of rows of a gradient that are computed at a time: a multiple of a tile."""
    row_bytes = 4 * max(1, num_cols)
    quarter = -(-num_rows // (4 * PRODUCT_TILE)) * PRODUCT_TILE
    wanted = max(quarter, SMALL_PRODUCT_BYTES // row_bytes)
    return max(1, min(wanted, PRODUCT_BYTES // row_bytes) // PRODUCT_TILE) * PRODUCT_TILE


def add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1.0) -> Tensor:
    """total = beta * total + left @ right, in place; with beta 0 total is not read.

    The product is summed in fp32 and rounded to total's dtype: that of the operands, or float32.
    """
    if total.dtype == left.dtype:
        return total.addmm_(left, right, beta=beta)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    return total.addmm_(left.float(), right.float(), beta=beta)
