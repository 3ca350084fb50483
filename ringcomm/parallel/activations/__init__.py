"""What autograd keeps for the backward pass, in less memory: ZeRO-R (Rajbhandari et al. 2020)."""

from ringcomm.parallel.activations.arena import Arena, arena
from ringcomm.parallel.activations.partition import Partitioned, partition

__all__ = ["Arena", "Partitioned", "arena", "partition"]
