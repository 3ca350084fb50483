"""How much of a device's speed is left when its data come from elsewhere.

Rajbhandari et al. 2021 (arXiv 2104.07857), section 4: work per byte moved against bandwidth.
"""

from __future__ import annotations

import math

__all__ = ["checkpoint_intensity", "efficiency", "optimizer_intensity", "weight_intensity"]


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The share of time that a device computes, where moving and computing take turns.

    intensity * bandwidth / (intensity * bandwidth + peak); what overlaps makes it better.

    Args:
        intensity: FLOP per byte moved: one of the functions here.
        bandwidth: bytes per second and device.
        peak: FLOP per second that the device reaches on such work.

    Raises:
        ValueError: one of them is not a positive number.
    """
    for name, value in (("intensity", intensity), ("bandwidth", bandwidth), ("peak", peak)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is a positive number, got {value!r}")
    return intensity * bandwidth / (intensity * bandwidth + peak)


def weight_intensity(num_tokens: int, itemsize: int = 2) -> float:
    """Of weights and gradients: tokens of a step on a device, seq * bsz, at 2 bytes an element.

    A weight takes 8 FLOP per token with recomputation, and moves four times: for the forward pass,
    the recomputation, the backward pass, and as a gradient.
    """
    return 8 * num_tokens / (4 * itemsize)


def optimizer_intensity(num_tokens: int, state_bytes: int = 16) -> float:
    """Of an optimizer's state: seq * bsz / 4 with 16 bytes per weight, each read and written."""
    return 8 * num_tokens / (2 * state_bytes)


def checkpoint_intensity(hidden_size: int, layers_per_checkpoint: int = 1) -> float:
    """Of activation checkpoints in 16 bits, out and back: 24 * hd * ci."""
    return 24.0 * hidden_size * layers_per_checkpoint
