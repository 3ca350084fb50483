"""What collectives should give, by numpy in 64 bits: written without the code under test.

Inputs are small integers (any order of summation is exact, also in bfloat16) or, for uint8, any
value (sums wrap around).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTS = [*UNSIGNED, torch.int8, torch.int16, torch.int32, torch.int64]
NUMBER_OPS = ["sum", "avg", "product", "min", "max"]
BIT_OPS = ["band", "bor", "bxor"]
OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in NUMBER_OPS + BIT_OPS}


def integers(rank: int, num_elems: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of -2 to 2 but 0 (a product of zeros shows nothing), of unsigned types 0 to 255."""
    if num_elems == 0:  # numpy's empty arrays have strides that torch cannot view
        return torch.empty(0, dtype=dtype)
    rng = np.random.default_rng([seed, rank, num_elems])
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, num_elems).astype(bool))
    values = rng.choice(np.array([-2, -1, 1, 2]), num_elems)
    if dtype in UNSIGNED:
        values = rng.integers(0, 256, num_elems)
    return torch.from_numpy(values).to(dtype)


def floats(rank: int, num_elems: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values: the order of summation shows in their last bits."""
    rng = np.random.default_rng([seed, rank, num_elems])
    return torch.from_numpy(rng.standard_normal(num_elems)).to(dtype)


def _wide(tensor: Tensor) -> np.ndarray:
    if tensor.dtype.is_complex:
        return np.asarray(tensor.to(torch.complex128).numpy())
    if tensor.dtype.is_floating_point:
        return np.asarray(tensor.double().numpy())
    return np.asarray(tensor.to(torch.int64).numpy())


def reduced(inputs: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of the ranks' tensors. Of bool a sum is an or, a product an and."""
    dtype = inputs[0].dtype
    stacked = np.stack([_wide(tensor) for tensor in inputs])
    if dtype == torch.bool:
        op = {"sum": "max", "product": "min"}.get(op, op)
    if op == "avg":
        total = stacked.sum(axis=0)
        count = len(inputs)
        if dtype.is_floating_point or dtype.is_complex:
            result = total / count
        else:  # in the type, then towards zero
            total = _wide(torch.from_numpy(total).to(dtype))
            result = np.sign(total) * (np.abs(total) // count)
    else:
        functions = {
            "sum": np.add,
            "product": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
            "band": np.bitwise_and,
            "bor": np.bitwise_or,
            "bxor": np.bitwise_xor,
        }
        result = functions[op].reduce(stacked, axis=0)
    return torch.from_numpy(np.asarray(result)).to(dtype)


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


def bits(tensor: Tensor) -> bytes:
    """The contents, byte by byte."""
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """torch's threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
