"""Partitioned activation checkpoints: Pa and Pa+cpu of ZeRO-R (Rajbhandari et al. 2020, 6.1)."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ringcomm.backend import resolve_group
from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.activations.host_memory import HostMemory
from ringcomm.parallel.flat_collectives import all_gather_shards


class Partitioned:
    """What a partition() holds, and has moved; bytes of this rank.

    Attributes:
        num_saved: tensors that were partitioned.
        saved_bytes: of shards that are kept on the device now.
        host_bytes: of shards that are kept in host memory now.
        to_host_bytes, to_device_bytes: moved so far.
        gathered_bytes: of whole tensors that came back so far.
    """

    def __init__(self) -> None:
        self.num_saved = 0
        self.saved_bytes = self.host_bytes = 0
        self.to_host_bytes = self.to_device_bytes = self.gathered_bytes = 0

    def add(self, num_bytes: int, *, in_host: bool) -> None:
        """So much more is kept, or less."""
        if in_host:
            self.host_bytes += num_bytes
        else:
            self.saved_bytes += num_bytes


@contextmanager
def partition(
    group: dist.ProcessGroup | None = None,
    *,
    offload: Literal["cpu"] | None = None,
    min_elems: int = 1 << 14,
    check: bool = False,
) -> Iterator[Partitioned]:
    """Has tensors that autograd saves inside of it kept in shards over a group, 1/N on each rank.

    For what all ranks of the group have alike: under tensor parallelism the inputs of its blocks,
    which are all that a checkpoint saves.

        with activations.partition(tensor_parallel_group):
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    The backward pass gathers each again: (N-1)/N of its bytes, 1/12 of what a block of tensor
    parallelism moves with recomputation. Parameters and their views stay as they are, so do tensors
    that are not floating point or small; the bits that come back are those that were saved.

    Args:
        group: None for the default group.
        offload: "cpu" keeps the shards in host memory, outside of the device's (pinned where that
            is a GPU).
        min_elems: smaller tensors stay whole.
        check: compare a digest of each tensor over the ranks, one small all_gather each, and raise
            where it is not the same on all.

    Yields:
        Counters.

    Raises:
        ValueError: an option is out of its range; with `check`, a tensor differs between the ranks.
        RingcommError: in the backward pass, ranks gather different tensors: they ran other layers.

    Collective with `check`, and in the backward pass, in autograd's order, which is the same on all
    ranks if the forward passes were. A graph that is dropped gathers nothing. A checkpoint with
    use_reentrant=True saves its inputs here as well, as long as one of them requires grad.
    """
    if offload not in (None, "cpu"):
        raise ValueError(f'offload is None or "cpu", got {offload!r}')
    if min_elems < 0:
        raise ValueError(f"min_elems is 0 or more, got {min_elems}")
    resolved = resolve_group(group)
    saver = _Saver(resolved, offload is not None, min_elems, check)
    with torch.autograd.graph.saved_tensors_hooks(saver.pack, saver.unpack):
        yield saver.counters


class _Part:
    """One saved tensor: this rank's shard, and how the whole looked."""

    def __init__(self, whole: Tensor, shard: Tensor, host: HostMemory | None) -> None:
        self.shape, self.stride = whole.shape, whole.stride()
        self.dtype, self.device = whole.dtype, whole.device
        self.shard, self.host = shard, host
        self.num_bytes = shard.nbytes


class _Saver:
    def __init__(
        self, group: dist.ProcessGroup, offloads: bool, min_elems: int, checks: bool
    ) -> None:
        self.counters = Partitioned()
        self._group, self._offloads = group, offloads
        self._min_elems, self._checks = min_elems, checks
        # What is saved twice is kept once: weakly, by what makes it the same tensor.
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_Part]]] = {}

    def pack(self, tensor: Tensor) -> Any:
        if not self._takes(tensor):
            return tensor
        key = self._key(tensor)
        self._known = {k: v for k, v in self._known.items() if not v[0].expired() and v[1]()}
        known = self._known.get(key)
        if known is not None and (part := known[1]()) is not None:
            return part
        part = self._cut(tensor.detach())
        self._known[key] = StorageWeakRef(tensor.untyped_storage()), weakref.ref(part)
        return part

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return self._gather(packed)

    def _takes(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._base is not None else tensor
        return (
            type(tensor) is Tensor
            and not isinstance(base, nn.Parameter)
            and tensor.is_floating_point()
            and tensor.layout == torch.strided
            and tensor.numel() >= max(1, self._min_elems)
            and self._group.size() > 1
        )

    def _key(self, tensor: Tensor) -> Any:
        place = tensor.untyped_storage()._cdata, tensor.storage_offset()
        return *place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version

    def _cut(self, tensor: Tensor) -> _Part:
        # Torch keeps the strides of what is dense, in any order of dimensions.
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor = tensor.contiguous()
        flat = tensor.as_strided([tensor.numel()], [1])
        if self._checks:
            self._check_equal(flat, tensor.shape)
        begin, end = shard_range(flat.numel(), self._group.size(), self._group.rank())
        mine = flat[begin:end]
        counters = self.counters
        counters.num_saved += 1
        if self._offloads:
            host = HostMemory(mine)
            part = _Part(tensor, host.tensor, host)
            counters.to_host_bytes += part.num_bytes
        else:
            part = _Part(tensor, mine.clone(), None)
        counters.add(part.num_bytes, in_host=self._offloads)
        weakref.finalize(part, counters.add, -part.num_bytes, in_host=self._offloads)
        return part

    def _gather(self, part: _Part) -> Tensor:
        num_elems = part.shape.numel()
        flat = torch.empty(num_elems, dtype=part.dtype, device=part.device)
        begin, end = shard_range(num_elems, self._group.size(), self._group.rank())
        flat[begin:end].copy_(part.shard)
        if part.host is not None:
            self.counters.to_device_bytes += part.num_bytes
        all_gather_shards(flat, self._group)
        self.counters.gathered_bytes += flat.nbytes
        return flat.as_strided(part.shape, part.stride)

    def _check_equal(self, flat: Tensor, shape: torch.Size) -> None:
        mine = hashlib.sha256(flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()).digest()
        digests: list[Any] = [None] * self._group.size()
        dist.all_gather_object(digests, mine, group=self._group)
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} is saved that rank {different[0]} has otherwise"
                " than rank 0: only what is replicated can be partitioned. Leave it outside of"
                " partition(), or checkpoint what makes it"
            )
