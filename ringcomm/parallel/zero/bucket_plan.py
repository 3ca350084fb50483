"""Which weights share a bucket, and in which order buckets are reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def plan_buckets(
    model: nn.Module,
    groups: Iterable[dict[str, Any]],
    stage: int,
    bucket_bytes: int,
    dtype: torch.dtype | None,
) -> list[list[nn.Parameter]]:
    """Weights of one dtype and device, of at most so many bytes; more only for one weight.

    A backward pass is expected to bring gradients in the reverse order of model.parameters(), and
    buckets are filled in this order. At stage 2 they may hold weights of several parameter groups,
    so that each bucket is complete, and freed, before the next begins to fill, however the groups
    are made. Stage 1 keeps all gradients until the step in any case: a bucket there has weights of
    one parameter group, which one fused operator updates.

    Returns:
        The buckets, in the order in which their last gradients are expected.
    """
    group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
    position = {param: i for i, param in enumerate(model.parameters())}
    buckets: list[list[nn.Parameter]] = []
    filling: dict[Any, tuple[list[nn.Parameter], int]] = {}
    for param in sorted(group_of, key=position.__getitem__, reverse=True):
        kind = param.dtype, param.device, group_of[param] if stage == 1 else None
        num_bytes = param.numel() * (dtype or param.dtype).itemsize
        bucket, filled = filling.get(kind, ([], 0))
        if not bucket or filled + num_bytes > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(param)
        filling[kind] = bucket, filled + num_bytes
    return sorted(buckets, key=lambda bucket: position[bucket[-1]], reverse=True)


def peak_elems(model: nn.Module, buckets: list[list[nn.Parameter]]) -> int:
    """The most elements of buckets that are in memory at once, if gradients come as expected."""
    bucket_of = {param: i for i, bucket in enumerate(buckets) for param in bucket}
    missing = [len(bucket) for bucket in buckets]
    sizes = [sum(param.numel() for param in bucket) for bucket in buckets]
    alive = peak = 0
    for param in reversed([param for param in model.parameters() if param in bucket_of]):
        i = bucket_of[param]
        if missing[i] == len(buckets[i]):
            alive += sizes[i]
            peak = max(peak, alive)
        missing[i] -= 1
        if missing[i] == 0:
            alive -= sizes[i]
    return peak
