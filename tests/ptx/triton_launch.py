"""Launches of Triton's kernels run on this CPU, by the PTX that Triton makes for a GPU.

After install(arch) a launch compiles its kernel for sm_ARCH, for which neither a GPU nor nvcc is
needed. The PTX is translated and compiled (triton_library.py), and the machine runs the blocks of
the grid one after the other, on the memory of the tensors that the launch is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton_library
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction
from triton_library import TensorMemory

WARP_SIZE = 32
# How numbers are passed: the codes of struct; pointers have types that begin with "*".
NUMBERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "fp32", "fp64")
FORMATS = dict(zip(NUMBERS, "bbhiqBBHIQefd", strict=True))
# Triton appends two pointers, to memory of the grid and to a profiler's, which no kernel here uses.
NO_SCRATCH = [("*i8", 0), ("*i8", 0)]

Passed = list[tuple[str, Any]]


def flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """What is passed of an argument: nothing of a constant, the parts of a tuple."""
    if isinstance(kind, tuple):
        for kind_of_part, part in zip(kind, value, strict=True):
            yield from flat(kind_of_part, part)
    elif kind != "constexpr":
        yield kind, value


def passed_arguments(kernel: Any, compiled: Any, args: Any, options: Any) -> Passed:
    """The types and values that a launch passes, by the signature that Triton compiled for.

    A None, a constexpr and an int that is specialized as 1 are constants in it.
    """
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    kinds = compiled.src.signature.items()
    return [pair for name, kind in kinds for pair in flat(kind, bound.arguments[name])]


def packed(passed: Passed) -> bytes:
    """The block of parameters, each at a multiple of its size."""
    block = b""
    for kind, value in passed:
        code = "Q" if kind.startswith("*") else FORMATS[kind]
        number = value.data_ptr() if isinstance(value, Tensor) else value
        block += bytes(-len(block) % struct.calcsize(code)) + struct.pack(f"<{code}", number)
    return block


def memory_of(tensor: Tensor) -> TensorMemory:
    """The bytes of its elements: those of rows, or from the first element to the last."""
    size = tensor.element_size()
    is_rows = tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
    if is_rows and not tensor.is_contiguous():
        num_rows, width = tensor.shape
        return TensorMemory(tensor.data_ptr(), num_rows, tensor.stride(0) * size, width * size)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    span = size * (1 + sum((length - 1) * stride for length, stride in strides))
    return TensorMemory(tensor.data_ptr(), 1, span, span)


def run(
    kernel: Any, compiled: Any, ptx: str, grid: tuple[int, ...], args: Any, options: Any
) -> None:
    """Runs the PTX of a compiled kernel on the grid."""
    metadata = compiled.metadata
    assert metadata.num_ctas == 1, "no kernel here has clusters"
    passed = passed_arguments(kernel, compiled, args, options)
    tensors = [value for _, value in passed if isinstance(value, Tensor) and value.numel()]
    for device in {value.device for value in tensors if value.device.type != "cpu"}:
        torch.get_device_module(device).synchronize()  # emulated: its memory is the host's
    x, y, z = (*grid, 1, 1)[:3]
    triton_library.load(metadata.name, ptx).launch(
        packed(passed + NO_SCRATCH),
        [memory_of(tensor) for tensor in tensors],
        grid=(x, y, z),
        num_threads=metadata.num_warps * WARP_SIZE,
        shared_bytes=metadata.shared,
    )


def install(arch: int, change: Callable[[str], str] = str) -> None:
    """From now on launches of this process run on the CPU.

    Args:
        arch: whose PTX runs, such as 90.
        change: makes the PTX that runs of a kernel's.
    """

    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, WARP_SIZE),
    )

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            run(kernel, compiled, change(compiled.asm["ptx"]), grid, args, options)

        return launch

    # Machine code, whose making takes half of a compilation, has tests of its own.
    CUDABackend.make_cubin = lambda *_: b""
    triton.runtime.driver.set_active(driver)
    JITFunction.__getitem__ = getitem
