"""Which weights are in a bucket together, and how ranks share it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.flat_collectives import place_in, shard_sizes
from ringcomm.parallel.model.describe import Model
from ringcomm.parallel.zero.inner import ShardOptions


class BucketPlan(NamedTuple):
    """The weights of a bucket in the order of its buffer, and how ranks share it.

    Attributes:
        sizes: the elements of each rank's shard.
        is_whole: whether each weight is in one rank's shard, that of its owner.
        experts: the sharded experts that the weights belong to; ranks with the same ones share it.
    """

    params: list[nn.Parameter]
    sizes: list[int]
    is_whole: bool
    experts: LocalExperts | None


def plan_buckets(
    model: Model,
    by_optimizer: Sequence[Iterable[dict[str, Any]]],
    stage: int,
    options: ShardOptions,
    owners: Mapping[nn.Parameter, int],
    world_size: int,
) -> list[BucketPlan]:
    """Groups weights of one dtype and device, up to the maximum size; a larger weight is alone.

    The order is that of expected gradients: the reverse of model.parameters(). At stage 2 a bucket
    may have several parameter groups of an optimizer, so that each is complete before the next
    begins to fill. Weights of optimizers that need full ones have buckets of their own.
    """
    group_of = {
        param: (i, j if stage == 1 else None)
        for i, groups in enumerate(by_optimizer)
        for j, group in enumerate(groups)
        for param in group["params"]
    }
    position = {param: i for i, param in enumerate(model.weights)}
    experts_of = {param: weight.experts for param, weight in model.weights.items()}

    buckets: list[list[nn.Parameter]] = []
    filling: dict[Any, tuple[list[nn.Parameter], int]] = {}
    for param in sorted(group_of, key=position.__getitem__, reverse=True):
        experts = experts_of[param]
        shared = experts and (experts.group, experts.replica_group)
        kind = param.dtype, param.device, group_of[param], param in owners, shared
        num_bytes = param.numel() * (options.param_dtype or param.dtype).itemsize
        bucket, filled = filling.get(kind, ([], 0))
        if not bucket or filled + num_bytes > options.bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(param)
        filling[kind] = bucket, filled + num_bytes
    buckets.sort(key=lambda bucket: position[bucket[-1]], reverse=True)
    plans = []
    for bucket in buckets:
        is_whole, experts = bucket[0] in owners, experts_of[bucket[0]]
        num_ranks = world_size if experts is None else place_in(experts.replica_group)[1]
        if is_whole:
            bucket.sort(key=owners.__getitem__)
            sizes = [sum(p.numel() for p in bucket if owners[p] == r) for r in range(num_ranks)]
        else:
            sizes = shard_sizes(sum(param.numel() for param in bucket), num_ranks)
        plans.append(BucketPlan(bucket, sizes, is_whole, experts))
    return plans
