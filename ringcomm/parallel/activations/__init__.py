"""Less memory for the tensors that autograd saves: ZeRO-R (Rajbhandari et al. 2020)."""

from typing import TYPE_CHECKING

from ringcomm._renamed import getattr_of
from ringcomm.parallel.activations.arena import arena, gradient_arena
from ringcomm.parallel.activations.partition import auto, partition

__all__ = ["arena", "auto", "gradient_arena", "partition"]

if not TYPE_CHECKING:
    __getattr__ = getattr_of(__name__)
