"""What collectives should give: written without the code under test.

Inputs are small integers (any order of summation is exact, also in bfloat16) or, for uint8, any
value (sums wrap around).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMBER_OPS = ["sum", "avg", "product", "min", "max"]
OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in NUMBER_OPS}
_STEPS: dict[str, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def integers(rank: int, num_elems: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of -2 to 2 but 0 (a product of zeros shows nothing), of uint8 0 to 255."""
    if num_elems == 0:  # numpy's empty arrays have strides that torch cannot view
        return torch.empty(0, dtype=dtype)
    rng = np.random.default_rng([seed, rank, num_elems])
    values = rng.choice(np.array([-2, -1, 1, 2]), num_elems)
    if dtype == torch.uint8:
        values = rng.integers(0, 256, num_elems)
    return torch.from_numpy(values).to(dtype)


def floats(rank: int, num_elems: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values: the order of summation shows in their last bits."""
    rng = np.random.default_rng([seed, rank, num_elems])
    return torch.from_numpy(rng.standard_normal(num_elems)).to(dtype)


def total(inputs: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' integers, in 64 bits; unsigned ones wrap around."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return torch.stack([tensor.to(wide) for tensor in inputs]).sum(0).to(dtype)


def left_to_right(inputs: Sequence[Tensor], op: str = "sum") -> Tensor:
    """In fp32 where elements have 16 bits, and rounded once; else in the type."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    result = reduce(_STEPS[op], [value.to(wide) for value in inputs])
    return (result / len(inputs) if op == "avg" else result).to(dtype)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """To the last bit, dtype and shape; float8 has no comparison of its own."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if bits(actual) == bits(expected):
        return
    wrong = (actual.cpu().double() != expected.double()).nonzero()
    raise AssertionError(
        f"{len(wrong)} of {actual.numel()} elements differ, the first at {wrong[:1].tolist()}: "
        f"{actual.flatten()[:5]} instead of {expected.flatten()[:5]}"
    )


def all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether they are as many, and equal one by one."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def bits(tensor: Tensor) -> bytes:
    """The contents, byte by byte."""
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """With torch.set_default_dtype()."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """torch's threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
