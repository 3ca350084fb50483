"""How ranks share the heads of attention: all kinds, from multi-head to multi-query."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["HeadShares", "ranks_in_a_row", "share_heads"]

_made: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


class HeadShares(NamedTuple):
    """What ColumnParallelLinear and RowParallelLinear are told of heads.

    Attributes:
        num_together: query heads that stay together, those of one key and value head; 1 where
            these are copied.
        num_replicas: ranks in a row that have the same key and value head.
    """

    num_together: int
    num_replicas: int


def share_heads(num_heads: int, num_kv_heads: int, world_size: int) -> HeadShares:
    """Shares query heads, and key and value heads, of which each serves several (GQA) or all (MQA).

        shares = share_heads(32, 8, group.size())
        q = ColumnParallelLinear(dim, 32 * width, shard_multiple=shares.num_together * width)
        k = ColumnParallelLinear(
            dim, 8 * width, shard_multiple=width, num_replicas=shares.num_replicas
        )
        o = RowParallelLinear(32 * width, dim, shard_multiple=shares.num_together * width)

    Raises:
        ValueError: the heads are no multiple, or the ranks cannot share them.
    """
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} for keys")
    if num_kv_heads >= world_size:
        return HeadShares(num_heads // num_kv_heads, 1)
    if world_size % num_kv_heads or num_heads % world_size:
        raise ValueError(
            f"{world_size} ranks cannot share {num_heads} query heads over {num_kv_heads} key and"
            f" value heads: take at most {num_kv_heads} ranks, or a multiple of {num_kv_heads}"
            f" that divides {num_heads}"
        )
    return HeadShares(1, world_size // num_kv_heads)


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
