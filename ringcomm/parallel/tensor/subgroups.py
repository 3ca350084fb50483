"""Groups inside of a tensor-parallel group."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["ranks_in_a_row"]

_made: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def ranks_in_a_row(group: dist.ProcessGroup, num: int) -> dist.ProcessGroup:
    """The group of this rank and its neighbours: ranks 0 to num - 1, num to 2 num - 1, ...

    Args:
        group: whose size is a multiple of `num`.
        num: two at least.

    Collective the first time.
    """
    if num == group.size():
        return group
    made = _made.setdefault(group, {})
    if num not in made:
        first = group.rank() // num * num
        ranks = dist.get_process_group_ranks(group)[first : first + num]
        new = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
        assert isinstance(new, dist.ProcessGroup)
        made[num] = new
    return made[num]
