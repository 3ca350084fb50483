"""What autograd keeps for the backward pass, in less memory: ZeRO-R (Rajbhandari et al. 2020)."""

from ringcomm.parallel.activations.arena import Arena, arena
from ringcomm.parallel.activations.auto import Auto, auto, predict_saved_bytes
from ringcomm.parallel.activations.fragmentation import (
    Allocation,
    DeviceFragmentation,
    Replay,
    device_fragmentation,
    record_allocations,
    replay,
)
from ringcomm.parallel.activations.gradient_arena import GradientArena, gradient_arena
from ringcomm.parallel.activations.partition import Partitioned, partition

__all__ = [
    "Allocation",
    "Arena",
    "Auto",
    "DeviceFragmentation",
    "GradientArena",
    "Partitioned",
    "Replay",
    "arena",
    "auto",
    "device_fragmentation",
    "gradient_arena",
    "partition",
    "predict_saved_bytes",
    "record_allocations",
    "replay",
]
