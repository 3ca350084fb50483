"""Argument checks of weight updates on CUDA; the CPU operators do the same checks in C++."""

import math
from collections.abc import Sequence
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
        raise error(f"ringcomm: {op} needs {what}, got {got}")


# ---- numbers


def rounding_key(seed: int) -> int:
    """The seed's part of the random bits, as a signed 32-bit number."""
    x = (seed + 0x9E3779B9) & _MASK
    x ^= x >> 16  # as mix() of kernels/updates/weight_update.py
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    key = x ^ (x >> 16) ^ (seed >> 32 & _MASK)
    return key - (key >> 31 << 32)


class Step(NamedTuple):
    """w <- w * decay + g * minus_lr, with g = scale * G within +-limit; and how w is rounded."""

    decay: float
    minus_lr: float
    scale: float
    limit: float
    key: int | None  # of the random bits; None rounds to nearest


def step_of(
    op: str,
    clip_value: float | None,
    lr: float,
    weight_decay: float,
    scale: float,
    rounding_seed: int = -1,
) -> Step:
    """The arguments of the kernels; raises ValueError if one is out of range."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        want(0 <= value < math.inf, op, f"{name} to be a finite number, 0 or more", value)
    want(math.isfinite(scale), op, "scale to be a finite number", scale)
    want(rounding_seed >= -1, op, "rounding_seed to be 0 or more, or -1 for none", rounding_seed)
    limit = math.inf if clip_value is None else clip_value
    want(limit > 0, op, "clip_value to be positive or None", clip_value)
    key = rounding_key(rounding_seed) if rounding_seed >= 0 else None
    return Step(1.0 - lr * weight_decay, -lr, scale, limit, key)


# ---- the weight


def _has_strides_of(tensor: Tensor, other: Tensor) -> bool:
    strides = zip(tensor.stride(), other.stride(), other.shape, strict=True)
    return all(size <= 1 or own == wanted for own, wanted, size in strides)


def check_weight(
    op: str, weight: Tensor, low: Tensor | None, step: Step, *, is_matrix: bool = True
) -> None:
    """Raises TypeError or ValueError if the weight does not support the rounding or `low`."""
    check_tensor(op, "weight", weight, weight)
    is_plain = low is None and step.key is None
    is_split_or_plain = is_plain or weight.dtype == torch.bfloat16
    want(is_split_or_plain, op, "low and rounding_seed for weights of bfloat16 only", weight.dtype)
    want(low is None or step.key is None, op, "at most one of low and rounding_seed", "both")
    if is_matrix:
        layout = "of two dimensions, contiguous"
        is_laid_out = weight.dim() == 2 and weight.is_contiguous()
    else:  # empty_like() keeps the strides of a dense tensor, in any order of dimensions
        layout = "whose elements are contiguous in any order of dimensions"
        is_laid_out = _has_strides_of(torch.empty_like(weight, device="meta"), weight)
    got = f"shape {tuple(weight.shape)} with strides {weight.stride()}"
    want(is_laid_out or weight.numel() == 0, op, f"a weight {layout}", got)
    if low is not None:
        check_tensor(op, "low", low, weight, (torch.int16,), weight.shape)
        want(_has_strides_of(low, weight), op, "low with the weight's strides", low.stride())


def _span_of(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins and ends."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in dims)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def check_writable(op: str, weight: Tensor, low: Tensor | None, *read: Tensor) -> None:
    """Checks that overwritten tensors need no gradient and do not overlap tensors that are read."""
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
                        f"ringcomm: {op} got tensors that share memory; a tensor that is written"
                        " must not overlap another"
                    )


# ---- gradients and their factors


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    weight: Tensor,
    dtypes: Sequence[torch.dtype] = DTYPES,
    shape: Sequence[int] | None = None,
) -> None:
    """Checks for the weight's device, for one of the dtypes, and for a shape."""
    is_there = tensor.layout == torch.strided and tensor.device == weight.device
    got = f"{tensor.layout} on {tensor.device}"
    want(is_there, op, f"{name} dense and on {weight.device}, as the weight is", got)
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    wanted = f"{', '.join(names)} or {last}" if names else last
    want(tensor.dtype in dtypes, op, f"{name} in {wanted}", tensor.dtype, TypeError)
    if shape is not None:
        is_right = tensor.shape == torch.Size(shape)
        want(is_right, op, f"{name} of shape {[*shape]}", [*tensor.shape])


def gradient_of(op: str, weight: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the weight's strides."""
    check_tensor(op, "grad", grad, weight, shape=weight.shape)
    if _has_strides_of(grad, weight):
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def tokens_of(op: str, weight: Tensor, x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer's input and output gradient as rows of adjacent elements, one for a token."""
    rows = []
    for name, tensor, width in (("x", x, weight.shape[1]), ("grad_out", grad_out, weight.shape[0])):
        check_tensor(op, name, tensor, weight)
        is_wide = tensor.shape[-1:] == (width,)
        want(is_wide, op, f"{name} of shape (..., {width})", tuple(tensor.shape))
        flat = tensor.detach().reshape(math.prod(tensor.shape[:-1]), width)
        rows.append(flat if flat.stride(1) == 1 or width <= 1 else flat.contiguous())
    tokens, grads = rows
    dtypes = f"{x.dtype} and {grad_out.dtype}"
    want(x.dtype == grad_out.dtype, op, "x and grad_out of the same dtype", dtypes, TypeError)
    sizes = f"{len(tokens)} and {len(grads)}"
    want(len(tokens) == len(grads), op, "x and grad_out with as many tokens", sizes)
    return tokens, grads
