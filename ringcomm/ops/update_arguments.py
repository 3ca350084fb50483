"""What weight updates on CUDA tensors are called with, checked as the CPU operators do."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringcomm.ops.loss_options import LOGIT_DTYPES

_MASK = (1 << 32) - 1


# ---- numbers


def _mix(x: int) -> int:
    """`mix` of kernels/stored_weights.py."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def rounding_key(seed: int) -> int:
    """The seed's part of the random bits, as a signed 32-bit number."""
    key = _mix((seed + 0x9E3779B9) & _MASK) ^ (seed >> 32 & _MASK)
    return key - (key >> 31 << 32)


class Step(NamedTuple):
    """w <- w * decay + g * minus_lr, with g = scale * G within +-limit; and how w is rounded."""

    decay: float
    minus_lr: float
    scale: float
    limit: float
    key: int
    is_stochastic: bool


def step_of(
    lr: float, weight_decay: float, scale: float, clip_value: float | None, rounding_seed: int
) -> Step:
    """The numbers that kernels take."""
    limit = limit_of(clip_value)
    is_stochastic = rounding_seed >= 0
    key = rounding_key(rounding_seed) if is_stochastic else 0
    return Step(1.0 - lr * weight_decay, -lr, scale, limit, key, is_stochastic)


def limit_of(clip_value: float | None) -> float:
    """The largest gradient; ValueError where there is none."""
    if clip_value is None:
        return math.inf
    if not clip_value > 0:
        raise ValueError(f"ringcomm: clip_value is positive or None, got {clip_value}")
    return clip_value


# ---- tensors


def _is_dense(tensor: Tensor) -> bool:
    """One element behind the other, in whichever order."""
    wanted = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((dim for dim in dims if dim[1] != 1), key=lambda dim: dim[0]):
        if stride != wanted:
            return tensor.numel() == 0
        wanted *= size
    return True


def _check_device(name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.device != weight.device:
        raise ValueError(f"ringcomm: weight is on {weight.device}, and {name} on {tensor.device}")


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in LOGIT_DTYPES:
        raise TypeError(f"ringcomm: {name} is float32, float16 or bfloat16, got {tensor.dtype}")


def check_weight(
    op: str, weight: Tensor, low: Tensor | None, rounding_seed: int, *, is_matrix: bool
) -> None:
    """TypeError or ValueError where a weight cannot be written as is asked."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"ringcomm: {op} writes into its input, which requires grad; use torch.no_grad()"
        )
    _check_dtype("weight", weight)
    check_layout(weight, low, is_matrix=is_matrix)
    if rounding_seed < -1:
        raise ValueError(
            f"ringcomm: rounding_seed is -1 or a number from 0 on, got {rounding_seed}"
        )
    if rounding_seed >= 0 and (low is not None or weight.dtype != torch.bfloat16):
        what = "split weights" if low is not None else f"weights of {weight.dtype}"
        raise ValueError(f"ringcomm: only bfloat16 is rounded stochastically, got {what}")


def check_layout(weight: Tensor, low: Tensor | None, *, is_matrix: bool) -> None:
    """The places of a weight's elements."""
    if is_matrix and (weight.dim() != 2 or not weight.is_contiguous()):
        raise ValueError(
            f"ringcomm: weight is a contiguous matrix, got shape {tuple(weight.shape)} with strides"
            f" {weight.stride()}"
        )
    if not _is_dense(weight):
        raise ValueError(
            f"ringcomm: weight is dense, got shape {tuple(weight.shape)} with strides"
            f" {weight.stride()}"
        )
    if low is None:
        return
    _check_device("low", low, weight)
    if low.dtype != torch.int16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"ringcomm: low is int16 beside bfloat16 weights, got {low.dtype} beside {weight.dtype}"
        )
    if low.shape != weight.shape or low.stride() != weight.stride():
        raise ValueError(
            f"ringcomm: low has the weight's shape and strides, {tuple(weight.shape)} and"
            f" {weight.stride()}; got {tuple(low.shape)} and {low.stride()}"
        )


def gradient_of(weight: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the weight's strides."""
    _check_device("grad", grad, weight)
    _check_dtype("grad", grad)
    if grad.shape != weight.shape:
        raise ValueError(
            f"ringcomm: grad has the weight's shape {tuple(weight.shape)}, got {tuple(grad.shape)}"
        )
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def matrix_of(grad: Tensor) -> Tensor:
    """A contiguous gradient of a matrix."""
    _check_dtype("grad", grad)
    if grad.dim() != 2:
        raise ValueError(f"ringcomm: grad is a matrix, got shape {tuple(grad.shape)}")
    return grad.contiguous()


def tokens_of(name: str, tensor: Tensor, width: int, weight: Tensor) -> Tensor:
    """(..., width) as rows whose elements stand side by side."""
    _check_device(name, tensor, weight)
    _check_dtype(name, tensor)
    if tensor.dim() < 1 or tensor.shape[-1] != width:
        raise ValueError(
            f"ringcomm: {name} ends in the weight's {width} features, got shape"
            f" {tuple(tensor.shape)}"
        )
    num_tokens = math.prod(tensor.shape[:-1])
    rows = tensor.reshape(num_tokens, width)
    return rows if rows.stride(1) == 1 or width <= 1 else rows.contiguous()


def check_factors(grad: Tensor, row_factor: Tensor, col_factor: Tensor) -> None:
    """One float32 number for each row, and one for each column."""
    for name, factor, size in zip(
        ("row_factor", "col_factor"), (row_factor, col_factor), grad.shape, strict=True
    ):
        _check_device(name, factor, grad)
        check_numbers(name, factor, size)


def check_numbers(name: str, numbers: Tensor, size: int) -> None:
    """So many float32 numbers side by side."""
    if numbers.dtype != torch.float32:
        raise TypeError(f"ringcomm: {name} is float32, got {numbers.dtype}")
    if numbers.shape != (size,) or not numbers.is_contiguous():
        raise ValueError(
            f"ringcomm: {name} is {size} numbers, got shape {tuple(numbers.shape)} with strides"
            f" {numbers.stride()}"
        )
