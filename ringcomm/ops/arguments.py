"""Checks of weight updates' arguments on CUDA: those that the CPU operators do in C++."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MASK = (1 << 32) - 1


def want(
    is_right: bool, op: str, what: str, got: object, error: type[Exception] = ValueError
) -> None:
    """Raises unless `is_right`."""
    if not is_right:
        raise error(f"ringcomm: {op} wants {what}, got {got}")


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

    @property
    def numbers(self) -> tuple[float | int, ...]:
        """All that kernels take at run time."""
        return self[:5]


def step_of(
    op: str,
    clip_value: float | None,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = -1,
) -> Step:
    """The numbers that kernels take; ValueError where one is out of its range."""
    want(0 <= lr < math.inf, op, "lr to be a finite number from 0 on", lr)
    want(0 <= weight_decay < math.inf, op, "weight_decay finite and from 0 on", weight_decay)
    want(math.isfinite(scale), op, "scale to be a finite number", scale)
    want(rounding_seed >= -1, op, "a rounding_seed from 0 on, or -1 for none", rounding_seed)
    limit = math.inf if clip_value is None else clip_value
    want(limit > 0, op, "clip_value to be positive or None", clip_value)
    key = rounding_key(rounding_seed)
    return Step(1.0 - lr * weight_decay, -lr, scale, limit, key, rounding_seed >= 0)


# ---- the weight


def _has_strides_of(tensor: Tensor, other: Tensor) -> bool:
    strides = zip(tensor.stride(), other.stride(), other.shape, strict=True)
    return all(size <= 1 or own == wanted for own, wanted, size in strides)


def check_weight(
    op: str, weight: Tensor, low: Tensor | None, step: Step, *, is_matrix: bool = True
) -> None:
    """TypeError or ValueError where a weight cannot be kept as is asked."""
    check_float(op, "weight", weight, weight.device)
    is_plain = low is None and not step.is_stochastic
    is_split_or_plain = is_plain or weight.dtype == torch.bfloat16
    want(is_split_or_plain, op, "low and rounding_seed for weights of bfloat16 only", weight.dtype)
    want(low is None or not step.is_stochastic, op, "low or a rounding_seed", "both")
    if is_matrix:
        is_laid_out = weight.dim() == 2 and weight.is_contiguous()
    else:  # a new tensor keeps the strides of what fills its memory, in whichever order
        is_laid_out = _has_strides_of(torch.empty_like(weight, device="meta"), weight)
    layout = "of two dimensions, contiguous" if is_matrix else "whose elements lie side by side"
    got = f"shape {tuple(weight.shape)} with strides {weight.stride()}"
    want(is_laid_out or weight.numel() == 0, op, f"a weight {layout}", got)
    if low is not None:
        check_tensor(op, "low", low, weight, torch.int16, tuple(weight.shape))
        want(_has_strides_of(low, weight), op, "low with the weight's strides", low.stride())


def _span_of(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins and ends."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in dims)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def check_writable(op: str, weight: Tensor, low: Tensor | None, *read: Tensor) -> None:
    """No gradient is to come of what is overwritten, and what is read is elsewhere."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"ringcomm: {op} writes into its input, which requires grad; use torch.no_grad()"
        )
    written = [weight] if low is None else [weight, low]
    for i, own in enumerate(written):
        begin, end = _span_of(own)
        for other in (*written[i + 1 :], *read):
            if own.numel() and other.numel():
                other_begin, other_end = _span_of(other)
                if begin < other_end and other_begin < end:
                    raise ValueError(
                        f"ringcomm: {op} got tensors that share memory; what is written must be"
                        " apart"
                    )


# ---- what it is updated by


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Its device, dtype and shape."""
    _check_device(op, name, tensor, weight.device)
    dtype_name = str(dtype).removeprefix("torch.")
    want(tensor.dtype == dtype, op, f"{name} in {dtype_name}", tensor.dtype, TypeError)
    _check_shape(op, name, tensor, shape)


def _check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    is_there = tensor.layout == torch.strided and tensor.device == device
    got = f"{tensor.layout} on {tensor.device}"
    want(is_there, op, f"{name} dense and on {device}, as the weight is", got)


def _check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    want(tensor.shape == shape, op, f"{name} of shape {list(shape)}", list(tensor.shape))


def check_float(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """One of the three dtypes, on the weight's device."""
    _check_device(op, name, tensor, device)
    is_float = tensor.dtype in DTYPES
    want(is_float, op, f"{name} in float32, float16 or bfloat16", tensor.dtype, TypeError)


def gradient_of(op: str, weight: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the weight's strides."""
    check_float(op, "grad", grad, weight.device)
    _check_shape(op, "grad", grad, tuple(weight.shape))
    if _has_strides_of(grad, weight):
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def tokens_of(op: str, weight: Tensor, x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer's input and output gradient as rows of adjacent elements, one for a token."""
    rows = []
    for name, tensor, width in (("x", x, weight.shape[1]), ("grad_out", grad_out, weight.shape[0])):
        check_float(op, name, tensor, weight.device)
        is_wide = tensor.shape[-1:] == (width,)
        want(is_wide, op, f"{name} of shape (..., {width})", tuple(tensor.shape))
        flat = tensor.detach().reshape(math.prod(tensor.shape[:-1]), width)
        rows.append(flat if flat.stride(1) == 1 or width <= 1 else flat.contiguous())
    tokens, grads = rows
    dtypes = f"{x.dtype} and {grad_out.dtype}"
    want(x.dtype == grad_out.dtype, op, "x and grad_out of one dtype", dtypes, TypeError)
    sizes = f"{len(tokens)} and {len(grads)}"
    want(len(tokens) == len(grads), op, "x and grad_out of as many tokens", sizes)
    return tokens, grads


def check_indices(op: str, indices: Tensor, grad_out: Tensor, weight: Tensor) -> None:
    """One index for each row of grad_out, which is (*indices.shape, width)."""
    _check_device(op, "indices", indices, weight.device)
    is_index = indices.dtype in (torch.int64, torch.int32)
    want(is_index, op, "indices in int64 or int32", indices.dtype, TypeError)
    check_float(op, "grad_out", grad_out, weight.device)
    _check_shape(op, "grad_out", grad_out, (*indices.shape, weight.shape[1]))
