"""What ranks must have alike before they begin something together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def check_agreement(mine: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks where they disagree. Collective."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise ValueError(
                    f"ranks disagree on the {name}: rank 0 has {value}, rank {rank} has"
                    f" {theirs[name]}"
                )
