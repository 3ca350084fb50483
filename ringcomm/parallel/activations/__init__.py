"""Less memory for the tensors that autograd saves: ZeRO-R (Rajbhandari et al. 2020)."""

from ringcomm.parallel.activations.arena import arena, gradient_arena
from ringcomm.parallel.activations.partition import auto, partition

__all__ = ["arena", "auto", "gradient_arena", "partition"]
