"""A step of an optimizer on the CPU (csrc/bindings/ops/optimizer_update_ops.cc): wrapper, fakes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringcomm.ops.fused_update import SGD, AdamW, overload_arguments

_ops: Any = torch.ops.ringcomm


def optimizer_update_(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    optimizer: SGD | AdamW,
    step: int,
    grad_scale: float = 1.0,
) -> Tensor:
    """Updates parameters of the CPU with their gradient, in place, by all of torch's threads.

    The arithmetic is that of `reduce_scatter_update_all_gather_`, within 2 ulp of torch.optim in
    every step, and the same to the last bit for any number of threads, and however the parameters
    are cut into parts.

    Args:
        param: contiguous, float32, float16 or bfloat16. It may require grad: this counts as a step
            of an optimizer.
        grad: of as many elements, contiguous; one of the three dtypes.
        state: float32 and contiguous, of as many elements; updated in place: the optimizer's
            `state_names`, and "master" for weights of 16 bits that are kept there in fp32.
        optimizer: the update and its hyper-parameters.
        step: the number of this update, from 1 on.
        grad_scale: multiplies the gradient: the inverse of a loss scale, a factor that clips.

    Returns:
        `param`.

    Raises:
        ValueError: a tensor has another size, strides or device, shares memory with another, is
            missing or not wanted; a hyper-parameter is out of range. Nothing has been written.
        TypeError: a dtype is another one.
    """
    overload, states, numbers = overload_arguments(optimizer, state, step)
    with torch.no_grad():
        getattr(_ops.optimizer_update_, overload)(
            param, grad, *states, grad_scale=grad_scale, **numbers
        )
    return param


def _fake(*args: Any, **kwargs: Any) -> None:
    return None


for _overload in ("sgd", "adamw"):
    torch.library.register_fake(f"ringcomm::optimizer_update_.{_overload}", _fake)
