"""ringcomm.kernels, imported by the first launch: importing ringcomm needs no Triton."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

VECTOR_BYTES = 16
WARP_SIZE = 32
MAX_WARPS = 32
# Fewer lanes than both edges of a row have are of no use.
MIN_BLOCK = 32


class Plan(NamedTuple):
    """Elements at a time, and the warps that share them."""

    block: int
    num_warps: int


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


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
    """For two reads of a row by so many threads that the rows at work at once stay in L2.

    1024 threads of more than 32 registers are one row for each SM: 132 rows of 128256 bfloat16
    elements are 34 MB of an H200's 50. The loops take 14 and 8 instructions an element: 0.76 ms for
    8192 such rows if all SMs issue at each clock of 1.755 GHz, beside 0.98 ms for one read and one
    write of memory.
    """
    return Plan(MAX_WARPS * WARP_SIZE * VECTOR_BYTES // element_bytes, MAX_WARPS)


class Kernels(NamedTuple):
    """The modules of kernels, once Triton is imported."""

    rows: ModuleType
    in_place: ModuleType
    tokens: ModuleType
    weights: ModuleType
    matrices: ModuleType
    linear: ModuleType


@functools.cache
def kernels() -> Kernels:
    """Raises ImportError where there is no Triton."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "cross_entropy and weight updates on CUDA tensors are made of Triton kernels, and"
            f" `import triton` failed ({error}): pip install triton"
        ) from error
    from ringcomm.kernels import (
        cross_entropy,
        cross_entropy_in_place,
        linear_update,
        matrix_update,
        token_losses,
        weight_update,
    )

    return Kernels(
        cross_entropy,
        cross_entropy_in_place,
        token_losses,
        weight_update,
        matrix_update,
        linear_update,
    )


def mark_written(*tensors: Tensor | None) -> None:
    """A backward pass that saved what was overwritten must not use it."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
