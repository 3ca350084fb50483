"""What weight updates on CUDA tensors are called with, checked as the CPU operators do."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringcomm.ops.losses.options import LOGIT_DTYPES

# One vector of 16-bit elements a thread: 32 to 40 registers, so that an SM has 2048 threads with
# 64 KB on their way, where 23 KB keep its memory busy (see triton_plans.py).
SGD_BLOCK, SGD_WARPS = 2048, 8
# A row of an embedding goes to few warps, since most rows are of one token or two.
EMBEDDING_BLOCK, EMBEDDING_WARPS, EMBEDDING_UNROLL = 1024, 4, 4
# Two vectors a thread; the sums of a tile's columns are 1/16 of its bytes, those of rows 1/32.
MATRIX_ROWS, MATRIX_COLS, MATRIX_WARPS = 32, 128, 8


class Machine(NamedTuple):
    """What plans depend on. Descriptors are TMA's, with the 227 KiB of Hopper and Blackwell."""

    has_descriptors: bool
    num_sms: int


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Of a CUDA device; nothing waits for it."""
    found = torch.cuda.get_device_properties(device)
    return Machine(found.major in (9, 10), found.multi_processor_count)


class LinearPlan(NamedTuple):
    """A tile of the gradient, tokens at a time, and who works on it."""

    block_out: int
    block_in: int
    block_tokens: int
    num_warps: int
    num_stages: int


# The largest first. 128 x 256 is what 8 warps have registers for, and 4 stages take 197 KB.
DESCRIBED = (
    LinearPlan(128, 256, 64, 8, 4),
    LinearPlan(128, 128, 64, 8, 4),
    LinearPlan(64, 64, 64, 4, 4),
)
# 64 KB of shared memory, so that GPUs with 99 have room.
ADDRESSED = (LinearPlan(128, 128, 32, 8, 4), LinearPlan(64, 64, 32, 4, 4))
# Of fp32, multiplied without tensor cores.
ADDRESSED_FP32 = (LinearPlan(128, 128, 16, 8, 3), LinearPlan(64, 64, 16, 8, 3))


def num_tiles(num_rows: int, num_cols: int, block_rows: int, block_cols: int) -> int:
    """Tiles of a matrix, those at its edges included."""
    return -(-num_rows // block_rows) * -(-num_cols // block_cols)


def linear_plan(
    num_out: int, num_in: int, element_bytes: int, machine: Machine, is_described: bool
) -> LinearPlan:
    """The largest tile of which three quarters of the SMs have one; else the smallest."""
    plans = DESCRIBED if is_described else ADDRESSED
    if element_bytes == 4:
        plans = ADDRESSED_FP32
    for plan in plans[:-1]:
        if 4 * num_tiles(num_out, num_in, plan.block_out, plan.block_in) >= 3 * machine.num_sms:
            return plan
    return plans[-1]


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
    op: str,
    scale: float,
    clip_value: float | None,
    rounding_seed: int = -1,
    lr: float = 0.0,
    weight_decay: float = 0.0,
) -> Step:
    """The numbers that kernels take; ValueError where one is out of its range."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(
                f"ringcomm: {op} wants {name} to be a finite number from 0 on, got {value}"
            )
    if not math.isfinite(scale):
        raise ValueError(f"ringcomm: {op} wants scale to be a finite number, got {scale}")
    limit = math.inf if clip_value is None else clip_value
    if not limit > 0:
        raise ValueError(f"ringcomm: {op} wants clip_value to be positive or None, got {limit}")
    key = rounding_key(rounding_seed)
    return Step(1.0 - lr * weight_decay, -lr, scale, limit, key, rounding_seed >= 0)


def check_first_elem(op: str, first_elem: int) -> None:
    """The number of a weight's first element, in what it is a part of."""
    if first_elem < 0:
        raise ValueError(f"ringcomm: {op} wants first_elem from 0 on, got {first_elem}")


# ---- the weight


def _is_dense(tensor: Tensor) -> bool:
    """One element behind the other, in whichever order."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    wanted = 1
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != wanted:
            return tensor.numel() == 0
        wanted *= size
    return True


def _has_strides_of(tensor: Tensor, other: Tensor) -> bool:
    strides = zip(tensor.stride(), other.stride(), other.shape, strict=True)
    return all(size <= 1 or own == wanted for own, wanted, size in strides)


def _ends_of(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins and ends."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in dims)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def check_weight(
    op: str, weight: Tensor, low: Tensor | None, rounding_seed: int = -1, *, is_matrix: bool
) -> None:
    """TypeError or ValueError where a weight cannot be kept as is asked."""
    check_float(op, "weight", weight, weight.device)
    if rounding_seed < -1:
        raise ValueError(
            f"ringcomm: {op} wants a rounding_seed from 0 on, or -1 for none, got {rounding_seed}"
        )
    if weight.dtype != torch.bfloat16 and (rounding_seed >= 0 or low is not None):
        what = "low" if low is not None else "a rounding_seed"
        raise ValueError(
            f"ringcomm: {op} takes {what} for weights of bfloat16 only, got it for {weight.dtype}"
        )
    if low is not None and rounding_seed >= 0:
        raise ValueError(
            f"ringcomm: {op} got both low and a rounding_seed; with low nothing is rounded off"
        )
    is_laid_out = weight.dim() == 2 and weight.is_contiguous() if is_matrix else _is_dense(weight)
    if not is_laid_out:
        layout = "of two dimensions, contiguous" if is_matrix else "whose elements lie side by side"
        raise ValueError(
            f"ringcomm: {op} wants a weight {layout}, got shape {tuple(weight.shape)} with strides"
            f" {weight.stride()}"
        )
    if low is not None:
        _check_low(op, low, weight)


def _check_low(op: str, low: Tensor, weight: Tensor) -> None:
    _check_device(op, "low", low, weight.device)
    if low.dtype != torch.int16:
        raise TypeError(f"ringcomm: {op} wants low in int16, got {low.dtype}")
    _check_shape(op, "low", low, tuple(weight.shape))
    if not _has_strides_of(low, weight):
        raise ValueError(
            f"ringcomm: {op} wants low with the weight's strides, {weight.stride()}, got"
            f" {low.stride()}"
        )


def check_writable(op: str, weight: Tensor, low: Tensor | None, *read: Tensor) -> None:
    """No gradient is to come of what is overwritten; and what is read is elsewhere."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"ringcomm: {op} writes into its input, which requires grad; use torch.no_grad()"
        )
    written = [weight] if low is None else [weight, low]
    for i, own in enumerate(written):
        begin, end = _ends_of(own)
        for other in (*written[i + 1 :], *read):
            if own.numel() and other.numel():
                other_begin, other_end = _ends_of(other)
                if begin < other_end and other_begin < end:
                    raise ValueError(
                        f"ringcomm: {op} got tensors that share memory; what is written must be"
                        " apart"
                    )


# ---- what it is updated by


def _check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.layout != torch.strided or tensor.device != device:
        raise ValueError(
            f"ringcomm: {op} wants {name} dense and on {device}, as the weight is, got a"
            f" {tensor.layout} tensor on {tensor.device}"
        )


def _check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"ringcomm: {op} wants {name} of shape {shape}, got {tuple(tensor.shape)}")


def check_float(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """One of the three dtypes, on the weight's device."""
    _check_device(op, name, tensor, device)
    if tensor.dtype not in LOGIT_DTYPES:
        raise TypeError(
            f"ringcomm: {op} wants {name} in float32, float16 or bfloat16, got {tensor.dtype}"
        )


def gradient_of(op: str, weight: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the weight's strides."""
    check_float(op, "grad", grad, weight.device)
    _check_shape(op, "grad", grad, tuple(weight.shape))
    if _has_strides_of(grad, weight):
        return grad
    ordered = torch.empty_strided(
        weight.shape, weight.stride(), dtype=grad.dtype, device=grad.device
    )
    return ordered.copy_(grad)


def tokens_of(op: str, name: str, tensor: Tensor, width: int, weight: Tensor) -> Tensor:
    """(..., width) as rows whose elements stand side by side."""
    check_float(op, name, tensor, weight.device)
    if tensor.dim() < 1 or tensor.shape[-1] != width:
        raise ValueError(
            f"ringcomm: {op} wants {name} of shape (..., {width}), as the weight is, got"
            f" {tuple(tensor.shape)}"
        )
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), width)
    return rows if rows.stride(1) == 1 or width <= 1 else rows.contiguous()


def check_tokens(op: str, x: Tensor, grad_out: Tensor) -> None:
    """Rows of one dtype, and as many."""
    if x.dtype != grad_out.dtype:
        raise TypeError(
            f"ringcomm: {op} wants x and grad_out of one dtype, got {x.dtype} and {grad_out.dtype}"
        )
    if x.shape[0] != grad_out.shape[0]:
        raise ValueError(
            f"ringcomm: {op} wants x and grad_out of as many tokens, got {x.shape[0]} and"
            f" {grad_out.shape[0]}"
        )


def check_indices(op: str, indices: Tensor, grad_out: Tensor, weight: Tensor) -> None:
    """One index for each row of grad_out, which is (*indices.shape, width)."""
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ringcomm: {op} wants indices in int64 or int32, got {indices.dtype}")
    _check_device(op, "indices", indices, weight.device)
    check_float(op, "grad_out", grad_out, weight.device)
    _check_shape(op, "grad_out", grad_out, (*indices.shape, weight.shape[1]))


def numbers_of(op: str, name: str, numbers: Tensor, size: int, device: torch.device) -> Tensor:
    """So many float32 numbers, side by side."""
    _check_device(op, name, numbers, device)
    if numbers.dtype != torch.float32:
        raise TypeError(f"ringcomm: {op} wants {name} in float32, got {numbers.dtype}")
    _check_shape(op, name, numbers, (size,))
    return numbers.contiguous()
