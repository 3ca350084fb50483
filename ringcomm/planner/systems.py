"""The systems that keep weights, gradients and states in different places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SYSTEMS", "System"]

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class System:
    """How data-parallel ranks keep a model.

    Attributes:
        name: as in docs/systems.md.
        stage: of ZeRO; 0 where each rank has all.
        states: where the optimizer's states are.
        weights: where shards of weights and gradients are.
        is_lomo: whether an update inside the backward pass leaves no gradients and no states.
    """

    name: str
    stage: int
    states: Tier = "device"
    weights: Tier = "device"
    is_lomo: bool = False

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is elsewhere."""
        return self.states != "device"

    def fault(self, dp: int, pp: int, tp: int, *, is_host: bool) -> str | None:
        """Why it does not go with such axes, or on a device that is its host; None if it does."""
        if self.name == "single":
            return None if dp == pp == tp == 1 else "single is one rank"
        if self.name == "ddp" and dp == pp == tp == 1:
            return "one rank has no replicas: it is single"
        if "host" in (self.states, self.weights) and is_host:
            return "the device is the host: there is no other memory to offload to"
        if self.stage in (2, 3) and pp > 1:
            return (
                f"{self.name} with a pipeline would communicate for every micro-batch in place of"
                " once a step: zero1 does not"
            )
        if (self.is_lomo or self.weights != "device") and (pp > 1 or tp > 1):
            return f"{self.name} is for data-parallel ranks alone"
        if self.name != "ddp" and dp == 1 and not (self.is_lomo or self.is_offloaded):
            return f"{self.name} shares over data-parallel ranks: it needs dp > 1"
        return None


_KNOWN = (
    System("single", 0),
    System("ddp", 0),
    System("zero1", 1),
    System("zero2", 2),
    System("zero3", 3),
    System("offload-cpu", 2, "host"),
    System("offload-nvme", 2, "disk"),
    System("infinity-cpu", 3, "host", "host"),
    System("infinity-nvme", 3, "disk", "disk"),
    System("lomo", 0, is_lomo=True),
    System("lomo-shards", 3, is_lomo=True),
)
SYSTEMS = {system.name: system for system in _KNOWN}
