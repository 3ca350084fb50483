"""A barrier that says who is missing."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringcomm.backend import resolve_group

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier after which, if it fails, rank 0 knows which ranks did not come.

    As torch.distributed.monitored_barrier, which takes groups of backend "gloo" only. It uses
    messages of its own: a failure leaves the group as it is, and a rank that comes late is told.

    Args:
        group: None for the default group.
        timeout: how long rank 0 waits for the others; None takes the group's. The others wait for
            rank 0 as long as the group's time-out says, or twice this one if that is longer.
        wait_all_ranks: whether rank 0 names all missing ranks, or the first of them only.

    Raises:
        TypeError: the timeout is no timedelta.
        ValueError: this rank is not in the group, or there is none.
        CollectiveTimeoutError: on rank 0, "Rank 2 failed to pass monitoredBarrier in 1000 ms"; on
            the ranks that came, that rank 0 failed, and why. Its `rank` is the first that was
            missing.

    Collective over the group; blocks until rank 0 has heard from all ranks.
    """
    resolved: Any = resolve_group(group)
    if timeout is None:
        resolved.monitored_barrier(wait_all_ranks=wait_all_ranks)
    elif isinstance(timeout, timedelta):
        resolved.monitored_barrier(timeout, wait_all_ranks)
    else:
        raise TypeError(f"timeout of monitored_barrier is a timedelta, got {timeout!r}")
