"""Partitioned activation checkpoints: Pa and Pa+cpu of ZeRO-R (Rajbhandari et al. 2020, 6.1)."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.backend import resolve_group
from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.activations.arena import Arena, Room
from ringcomm.parallel.activations.saved_tensors import Look, SavedTensors, flatten, is_plain
from ringcomm.parallel.flat_collectives import all_gather_shards
from ringcomm.parallel.offload.transfers import empty_aligned


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
    arena: Arena | None = None,
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
            is a GPU); also those of a single rank, which are whole.
        min_elems: smaller tensors stay whole.
        check: compare a digest of each tensor over the ranks, one small all_gather each, and raise
            where it is not the same on all.
        arena: where shards go that are kept on its device; this context alone is entered then.

    Yields:
        Counters.

    Raises:
        ValueError: an option is out of its range; with `check`, a tensor differs between the ranks.
        RingcommError: in the backward pass, ranks gather different tensors: they ran other layers.
        RuntimeError: torch's own, of a tensor that is written before its backward pass.

    Collective with `check`, and in the backward pass, in autograd's order, which is the same on all
    ranks if the forward passes were. A graph that is dropped gathers nothing. A checkpoint with
    use_reentrant=True saves its inputs here as well, as long as one of them requires grad.
    """
    saver = PartitionSaver(group, offload, min_elems=min_elems, check=check, arena=arena)
    with saver.hooks():
        yield saver.counters


class HostMemory:
    """A copy of a tensor in host memory, outside of torch's allocator for the tensor's device.

    Pinned where the device is a GPU, so that copies may run beside its work. For tensors of the CPU
    it is memory mapped for them alone, which is given back to the system with the last reference.

    Attributes:
        tensor: the copy, of one dimension.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Copies a tensor of one dimension."""
        if tensor.is_cuda:
            self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
            return
        self.tensor = empty_aligned(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype)
        self.tensor.copy_(tensor)


class Part:
    """One saved tensor: this rank's shard, and how the whole looked."""

    def __init__(self, shard: Tensor, look: Look, device: torch.device, memory: Any) -> None:
        self.shard, self.look, self.device = shard, look, device
        self.is_in_host = isinstance(memory, HostMemory)
        # Lives as long as the shard.
        self._memory = memory


class PartitionSaver(SavedTensors[Part]):
    """What partition() does, of which it has the arguments."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        offload: str | None,
        *,
        min_elems: int,
        check: bool = False,
        arena: Arena | None = None,
    ) -> None:
        super().__init__()
        if offload not in (None, "cpu"):
            raise ValueError(f'offload is None or "cpu", got {offload!r}')
        if min_elems < 0:
            raise ValueError(f"min_elems is 0 or more, got {min_elems}")
        self.counters = Partitioned()
        self.offload = offload
        self._group = resolve_group(group)
        self._min_elems, self._checks, self._arena = min_elems, check, arena

    def takes(self, tensor: Tensor) -> bool:
        """See SavedTensors."""
        return (
            is_plain(tensor)
            and tensor.is_floating_point()
            and tensor.numel() >= self._min_elems
            and (self._group.size() > 1 or self.offload is not None)
        )

    def keep(self, tensor: Tensor) -> Part:
        """See SavedTensors."""
        flat, look = flatten(tensor)
        if self._checks:
            self._check_equal(flat, tensor.shape)
        begin, end = shard_range(flat.numel(), self._group.size(), self._group.rank())
        shard, memory = self._copy(flat[begin:end])
        part = Part(shard, look, tensor.device, memory)
        counters = self.counters
        counters.num_saved += 1
        counters.to_host_bytes += shard.nbytes if part.is_in_host else 0
        counters.add(shard.nbytes, in_host=part.is_in_host)
        forget = weakref.finalize(part, counters.add, -shard.nbytes, in_host=part.is_in_host)
        forget.atexit = False
        return part

    def _copy(self, shard: Tensor) -> tuple[Tensor, HostMemory | Room | None]:
        """A copy, and what holds its memory if that is not torch."""
        if self.offload is not None:
            host = HostMemory(shard)
            return host.tensor, host
        if self._arena is not None and self._arena.device == shard.device:
            room = self._arena.copy(shard)
            return room.flat, room
        return shard.clone(), None

    def restore(self, part: Part) -> Tensor:
        """Collective; see SavedTensors."""
        num_elems = part.look.shape.numel()
        flat = torch.empty(num_elems, dtype=part.look.dtype, device=part.device)
        begin, end = shard_range(num_elems, self._group.size(), self._group.rank())
        flat[begin:end].copy_(part.shard)
        if part.is_in_host:
            self.counters.to_device_bytes += part.shard.nbytes
        all_gather_shards(flat, self._group)
        self.counters.gathered_bytes += flat.nbytes
        return part.look.over(flat)

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
