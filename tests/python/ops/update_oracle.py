"""The weight updates of docs/design/optim.md by numpy: written without the code under test.

What has one right result (rounding, the random bits, SGD with a given gradient) is here to the last
bit; products are in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, BF16, FP16]


# ---- fp32 and its 16-bit forms


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once: the sum in float64 rounded to odd, then to float32."""
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)  # exact
        addend = c.astype(np.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = total.view(np.int64)
        is_inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        towards = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(is_inexact, bits + towards, bits).view(np.float64)
        return odd.astype(np.float32)


def mix(x: np.ndarray) -> np.ndarray:
    """The hash of 32 bits, element by element."""
    x = x.astype(np.uint32)
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_bits(seed: int, elems: np.ndarray) -> np.ndarray:
    """16 random bits for each element (uint64), as uint32."""
    mask = 0xFFFFFFFF
    low = np.array([((seed & mask) + 0x9E3779B9) & mask], dtype=np.uint32)
    key = mix(low) ^ np.uint32(seed >> 32)
    elems = elems.astype(np.uint64)
    low_half = (elems & np.uint64(mask)).astype(np.uint32)
    high_half = (elems >> np.uint64(32)).astype(np.uint32)
    return np.asarray(mix(mix(low_half ^ key) + high_half) >> np.uint32(16))


def _bits_of(values: np.ndarray) -> np.ndarray:
    canonical = np.where(np.isnan(values), np.float32(np.nan), values.astype(np.float32))
    bits = canonical.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), bits)


def _bfloat16_of(halves: np.ndarray) -> Tensor:
    return torch.from_numpy(halves.astype(np.uint16).view(np.int16)).view(BF16)


def memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, one-dimensional, in the order of memory."""
    return tensor.detach().as_strided([tensor.numel()], [1])


def to_fp32(weight: Tensor, low: Tensor | None = None) -> np.ndarray:
    """The weight that is meant, one-dimensional, in the order of memory."""
    flat = memory_order(weight).cpu()
    if low is None:
        return np.asarray(flat.float().numpy())
    high = flat.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16)
    rest = memory_order(low).cpu().numpy().astype(np.int32).view(np.uint32)
    return np.asarray((high + rest).view(np.float32))


def rounded(
    values: np.ndarray,
    dtype: torch.dtype,
    *,
    seed: int = -1,
    is_split: bool = False,
    first_elem: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Float32 values as a weight of `dtype` and, split, its `low`; both one-dimensional."""
    bits = _bits_of(values)
    if is_split:
        high = (bits + np.uint32(0x8000)) >> np.uint32(16)
        low = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
        return _bfloat16_of(high), torch.from_numpy(low.copy())
    if seed >= 0:
        elems = np.arange(values.size, dtype=np.uint64) + np.uint64(first_elem)
        return _bfloat16_of((bits + random_bits(seed, elems)) >> np.uint32(16)), None
    if dtype == BF16:  # not by torch, which has several kinds of NaN
        to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return _bfloat16_of((bits + to_even) >> np.uint32(16)), None
    return torch.from_numpy(bits.view(np.float32).copy()).to(dtype), None


# ---- SGD, to the last bit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The arguments that the updates have in common."""

    lr: float
    weight_decay: float = 0.0
    scale: float = 1.0
    rounding_seed: int = -1
    clip_value: float | None = None
    first_elem: int = 0

    def gradient(self, grad: np.ndarray) -> np.ndarray:
        """Scaled and clamped, in float32."""
        with np.errstate(all="ignore"):
            scaled = grad.astype(np.float32) * np.float32(self.scale)
        if self.clip_value is None:
            return np.asarray(scaled)
        limit = np.float32(self.clip_value)
        return np.where(np.isnan(scaled), scaled, np.clip(scaled, -limit, limit))

    def descend(self, weight: np.ndarray, update: np.ndarray) -> np.ndarray:
        """The new weight in float32, before it is rounded."""
        with np.errstate(all="ignore"):
            decayed = weight * np.float32(1 - self.lr * self.weight_decay)
        return exact_fma(update, np.full_like(update, -self.lr), decayed)


def sgd(
    weight: Tensor, grad: Tensor, step: Step, low: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The new weight and low, of the weight's shape and strides; nothing is written."""
    laid_out = torch.empty_strided(weight.shape, weight.stride(), dtype=grad.dtype)
    laid_out.copy_(grad.cpu())
    update = step.gradient(memory_order(laid_out).float().numpy())
    new, new_low = rounded(
        step.descend(to_fp32(weight, low), update),
        weight.dtype,
        seed=step.rounding_seed,
        is_split=low is not None,
        first_elem=step.first_elem,
    )
    shape = (weight.shape, weight.stride())
    return new.as_strided(*shape), None if new_low is None else new_low.as_strided(*shape)


# ---- products and gathers, in float64


def linear_gradient(x: Tensor, grad_out: Tensor) -> Tensor:
    """The gradient of a linear layer's weight, (out, in), in float64."""
    num_tokens = x.shape[:-1].numel()
    tokens, grads = (
        tensor.detach().cpu().double().reshape(num_tokens, tensor.shape[-1])
        for tensor in (x, grad_out)
    )
    return grads.T @ tokens


def embedding_gradient(
    num_rows: int, indices: Tensor, grad_out: Tensor, padding_idx: int = -1
) -> Tensor:
    """The dense gradient of an embedding's weight: sums in float32, in the order of tokens."""
    dim = grad_out.shape[-1]
    sums = np.zeros([num_rows, dim], dtype=np.float32)
    rows = grad_out.detach().cpu().float().reshape(-1, dim).numpy()
    for row, idx in zip(rows, indices.cpu().reshape(-1).tolist(), strict=True):
        if idx != padding_idx:
            sums[idx] += row
    return torch.from_numpy(sums)
