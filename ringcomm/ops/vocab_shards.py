"""Which classes of a vocabulary a rank has."""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ringcomm.backend import resolve_group


class VocabShard(NamedTuple):
    """This rank's part of the classes."""

    start: int
    size: int  # of the whole vocabulary, without padding; -1 where only the exchange tells
    group_name: str | None  # None: this rank has them all


# A float counts the classes in the exchange.
MAX_VOCAB_SIZE = 1 << 24


def find_shard(
    num_columns: int,
    group: dist.ProcessGroup | None,
    vocab_start: int | None,
    vocab_size: int | None,
    weight: Tensor | None,
) -> VocabShard:
    """The shard of a rank with logits of `num_columns` classes, padding included.

    Collective where there is a group and no vocab_start: shards then follow rank order.

    Raises:
        ValueError: the arguments do not fit each other.
    """
    if vocab_size is None and weight is not None:
        vocab_size = weight.numel()
    if vocab_size is not None:
        _check_size(vocab_size)
    if group is None:
        if vocab_start not in (None, 0):
            raise ValueError(f"vocab_start={vocab_start} without a group of the others' shards")
        size = num_columns if vocab_size is None else vocab_size
        if not 0 < size <= num_columns:
            raise ValueError(f"logits of {num_columns} columns for a vocabulary of {size}")
        _check_size(size)
        return VocabShard(0, size, None)
    name = resolve_group(group).group_name
    if vocab_start is not None:
        if vocab_start < 0:
            raise ValueError(f"vocab_start is a number from 0 on, got {vocab_start}")
        _check_size(max(1, vocab_start + num_columns) if vocab_size is None else vocab_size)
        return VocabShard(vocab_start, -1 if vocab_size is None else vocab_size, name)
    sizes = column_counts(num_columns, group)
    size = sum(sizes) if vocab_size is None else vocab_size
    _check_size(size)
    return VocabShard(sum(sizes[: group.rank()]), size, name)


def _check_size(vocab_size: int) -> None:
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")


def column_counts(num_columns: int, group: dist.ProcessGroup) -> list[int]:
    """Every rank's number of columns, in rank order. Collective."""
    counts: list[Any] = [None] * resolve_group(group).size()
    dist.all_gather_object(counts, num_columns, group)  # on whatever devices the group has
    return counts


def shard_of_dtensor(
    logits: DTensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    vocab_start: int | None,
) -> tuple[Tensor, Tensor, dist.ProcessGroup | None, int | None]:
    """Local logits and target, group and first class of logits sharded by class.

    Raises:
        ValueError: they are sharded otherwise as well, or a group is given besides.
    """
    if group is not None or vocab_start is not None:
        raise ValueError("logits that are a DTensor bring their group and vocab_start along")
    mesh, last = logits.device_mesh, logits.dim() - 1
    sharding = [
        dim for dim, p in enumerate(logits.placements) if isinstance(p, Shard) and p.dim == last
    ]
    others = [p for dim, p in enumerate(logits.placements) if dim not in sharding]
    if len(sharding) > 1 or not all(isinstance(p, Replicate) for p in others):
        raise ValueError(
            f"logits are sharded in their last dimension, over one dimension of the mesh, and"
            f" replicated over others; got {logits.placements}"
        )
    if isinstance(target, DTensor):
        if not all(isinstance(p, Replicate) for p in target.placements):
            raise ValueError(f"targets are replicated, got {target.placements}")
        target = target.to_local()
    if not sharding:
        return logits.to_local(), target, None, None
    rank, world_size = mesh.get_local_rank(sharding[0]), mesh.size(sharding[0])
    longest = -(-logits.shape[last] // world_size)  # torch.chunk's: the last shards are shorter
    start = min(rank * longest, logits.shape[last])
    return logits.to_local(), target, mesh.get_group(sharding[0]), start
