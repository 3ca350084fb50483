"""ringcomm.kernels, imported by the first launch: importing ringcomm needs no Triton."""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


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
