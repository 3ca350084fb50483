"""ringcomm.kernels, imported by the first launch: importing ringcomm needs no Triton."""

import functools
from types import ModuleType
from typing import NamedTuple


class Kernels(NamedTuple):
    """The modules of kernels, once Triton is imported."""

    rows: ModuleType
    in_place: ModuleType
    tokens: ModuleType


@functools.cache
def kernels() -> Kernels:
    """Raises ImportError where there is no Triton."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "cross_entropy on CUDA tensors is made of Triton kernels, and `import triton`"
            f" failed ({error}): pip install triton"
        ) from error
    from ringcomm.kernels import cross_entropy, cross_entropy_in_place, token_losses

    return Kernels(cross_entropy, cross_entropy_in_place, token_losses)
