"""What a parameter server is told, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringcomm.loss_scale import LossScale

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Of ParameterServer, which documents them; the same on all ranks."""

    servers: tuple[int, ...]
    is_dedicated: bool
    staleness: int | None
    updates_at: str
    is_lockstep: bool
    schedule: tuple[tuple[str, int], ...] | None
    wire_dtype: torch.dtype | None
    loss_scale: float | str | None

    def workers(self, world_size: int) -> tuple[int, ...]:
        """Their ranks."""
        ranks = range(world_size)
        return tuple(rank for rank in ranks if not (self.is_dedicated and rank in self.servers))

    @classmethod
    def checked(
        cls,
        world_size: int,
        servers: str | Sequence[int],
        dedicated: bool,
        staleness: int | None,
        updates_at: str,
        lockstep: bool,
        schedule: Sequence[tuple[str, int]] | None,
        wire_dtype: torch.dtype | None,
        loss_scale: float | str | None,
    ) -> Options:
        """Raises ValueError or TypeError where they cannot be."""
        options = cls(
            servers=_checked_servers(servers, world_size),
            is_dedicated=dedicated,
            staleness=staleness,
            updates_at=updates_at,
            is_lockstep=lockstep,
            schedule=None if schedule is None else tuple((kind, w) for kind, w in schedule),
            wire_dtype=wire_dtype,
            loss_scale=loss_scale,
        )
        if dedicated and len(options.servers) == world_size:
            raise ValueError("dedicated=True leaves no worker: give fewer servers, or more ranks")
        is_number = isinstance(staleness, int) and not isinstance(staleness, bool)
        if staleness is not None and not (is_number and staleness >= 0):
            raise ValueError(f"staleness is None or a number of steps >= 0, got {staleness!r}")
        if updates_at not in ("server", "worker"):
            raise ValueError(f'updates_at is "server" or "worker", got {updates_at!r}')
        if lockstep and staleness is None:
            raise ValueError("lockstep=True wants a bound: give staleness a number of steps")
        is_dtype = isinstance(wire_dtype, torch.dtype)
        if wire_dtype is not None and not (is_dtype and wire_dtype.is_floating_point):
            raise ValueError(f"wire_dtype is a floating dtype such as bfloat16, got {wire_dtype}")
        if loss_scale is not None:
            LossScale(loss_scale)
            if updates_at != "server":
                raise ValueError("loss_scale is for updates_at='server', which leaves steps out")
        options._check_schedule(world_size)
        return options

    def _check_schedule(self, world_size: int) -> None:
        if self.schedule is None:
            return
        if self.staleness is not None:
            raise ValueError(
                "a schedule says itself who waits for whom: give staleness=None with it"
            )
        workers = self.workers(world_size)
        for event in self.schedule:
            if event[0] not in ("pull", "push") or event[1] not in workers:
                raise ValueError(
                    f'an event of a schedule is ("pull" or "push", one of the workers {workers}),'
                    f" got {event!r}"
                )


def _checked_servers(servers: str | Sequence[int], world_size: int) -> tuple[int, ...]:
    if servers == "all":
        return tuple(range(world_size))
    is_list = not isinstance(servers, str) and all(isinstance(rank, int) for rank in servers)
    if not is_list or not servers or len(set(servers)) < len(servers):
        raise ValueError(f'servers is "all" or a list of different ranks, got {servers!r}')
    ranks = tuple(sorted(int(rank) for rank in servers))
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"servers are ranks of a group of {world_size}, got {list(ranks)}")
    return ranks
