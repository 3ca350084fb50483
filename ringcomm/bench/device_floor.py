"""What a collective on devices cannot go below: their memory's speed, and that between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.bench.placement import Placement
from ringcomm.bench.quantiles import median
from ringcomm.bench.ranks import Team

GB = 1e9
# Many times the caches of a GPU; an emulated one has the host's memory, and its patience.
COPY_BYTES = {"cuda": 512 << 20}
OTHER_COPY_BYTES = 1 << 20
NUM_COPIES = 7
# Bytes that the ranks together must read and write, over those of the larger buffer of a rank.
MEMORY_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda world_size: 2.0 * world_size,
    "all_reduce_apart": lambda world_size: 2.0 * world_size,
    "all_reduce_shared": lambda world_size: 2.0 * world_size,
    "reduce_scatter": lambda world_size: world_size + 1.0,
    "all_gather": lambda world_size: world_size + 1.0,
    "broadcast": lambda world_size: 1.0 * world_size,
    "all_to_all": lambda world_size: 2.0 * world_size,
    "round_trip": lambda world_size: 4.0,
    "sendrecv": lambda world_size: 2.0 * world_size,
    "barrier": lambda world_size: 0.0,
}


@dataclass(frozen=True)
class Speeds:
    """Bytes per second.

    Attributes:
        memory: of one device, read and written, of the slowest one.
        links: into one device from another while all others do the same; None with one device.
    """

    memory: float
    links: float | None

    def floor_us(self, num_memory_bytes: float, num_link_bytes: float) -> float:
        """The least µs for bytes that pass through a device's memory and that arrive over a link.

        With one device nothing comes over links.
        """
        links_s = num_link_bytes / self.links if self.links is not None else 0.0
        return 1e6 * max(num_memory_bytes / self.memory, links_s)

    def record(self) -> dict[str, float | None]:
        """The fields of a record."""
        links = None if self.links is None else self.links / GB
        return {"copy_gb_per_s": self.memory / GB, "link_gb_per_s": links}


def _seconds(device: torch.device, copy: Callable[[], object]) -> float:
    module: Any = torch.get_device_module(device)
    copy()
    times = []
    for _ in range(NUM_COPIES):
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        module.synchronize(device)
        times.append(begin.elapsed_time(end) / 1e3)
    return max(1e-9, median(times))


def memory_bytes(name: str, num_bytes: int, placement: Placement, world_size: int) -> float:
    """What an operation on ``num_bytes`` reads and writes on the device with the most ranks."""
    share = placement.max_ranks(world_size) / world_size
    return MEMORY_FACTORS[name](world_size) * num_bytes * share


def measure_speeds(team: Team, placement: Placement) -> Speeds:
    """Copies within each device, then from each to the next, all devices at once. Collective.

    Of the ranks on a device one copies, and the others wait.
    """
    device = placement.device_of(team.rank)
    num_used = placement.num_used(team.world_size)
    num_bytes = COPY_BYTES.get(placement.kind, OTHER_COPY_BYTES)
    copies = team.rank < num_used
    source = torch.zeros(num_bytes if copies else 0, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    torch.get_device_module(device).synchronize(device)
    team.share(None)
    mine = 2 * num_bytes / _seconds(device, lambda: target.copy_(source)) if copies else None
    memory = min(filter(None, team.share(mine)))
    if num_used == 1:
        return Speeds(memory, None)
    if copies:
        source = source.to(placement.device_of((team.rank + 1) % num_used))
    team.share(None)
    mine = num_bytes / _seconds(device, lambda: target.copy_(source)) if copies else None
    return Speeds(memory, min(filter(None, team.share(mine))))
