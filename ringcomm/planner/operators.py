"""Puts operators on devices that are too small for all of them, or for one.

An operator that fits stays whole, one that does not is split over as few devices as hold it, and
what no longer fits beside the ones before begins the next stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm.planner.sizes import in_gb

__all__ = ["Placed", "place_operators"]


@dataclass(frozen=True)
class Placed:
    """Where an operator is.

    Attributes:
        operator: its number, from 0.
        num_bytes: of the whole.
        devices: on which it is, an equal share on each.
        stage: of the pipeline, from 0.
    """

    operator: int
    num_bytes: int
    devices: tuple[int, ...]
    stage: int

    @property
    def is_split(self) -> bool:
        """Whether it is on more than one device."""
        return len(self.devices) > 1

    def __str__(self) -> str:
        names = ", ".join(map(str, self.devices))
        where = f"split over devices {names}" if self.is_split else f"whole on device {names}"
        share = f", {in_gb(self.num_bytes / len(self.devices))} each" if self.is_split else ""
        return f"operator {self.operator + 1}, {in_gb(self.num_bytes)}: {where}{share}"


def place_operators(
    sizes: Sequence[int], device_bytes: int, num_devices: int = 0
) -> tuple[Placed, ...]:
    """Places operators in the order in which they run.

    Args:
        sizes: bytes of each.
        device_bytes: of a device.
        num_devices: that there are; 0 for as many as it takes.

    Raises:
        ValueError: a size is not positive, or it takes more devices.
    """
    if device_bytes < 1 or num_devices < 0 or not sizes or min(sizes) < 1:
        raise ValueError("operators and devices have a positive number of bytes")
    placed: list[Placed] = []
    free: list[float] = []  # of every device in use
    first = stage = 0  # the stage's first device, and its number
    for i, size in enumerate(sizes):
        ways = -(-size // device_bytes)
        share = size / ways
        # The stage's devices with most room, the first of equals.
        roomy = sorted(range(first, len(free)), key=lambda device: (-free[device], device))[:ways]
        if len(roomy) < ways or any(free[device] < share for device in roomy):
            stage += bool(free)
            first = len(free)
            free += [float(device_bytes)] * ways
            roomy = list(range(first, first + ways))
        for device in roomy:
            free[device] -= share
        placed.append(Placed(i, size, tuple(sorted(roomy)), stage))
    if num_devices and len(free) > num_devices:
        raise ValueError(
            f"these operators take {len(free)} devices of {in_gb(device_bytes)}, got {num_devices}"
        )
    return tuple(placed)
