"""Activation checkpoints in shards: Pa and Pa+cpu of ZeRO-R (Rajbhandari et al. 2020, 6.1)."""

from __future__ import annotations

import logging
import weakref
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.activations.arena import Arena, Room
from ringcomm.parallel.activations.saved_tensors import Look, SavedTensors, flatten, is_plain
from ringcomm.parallel.flat_collectives import all_gather_shards
from ringcomm.parallel.offload.transfers import empty_aligned
from ringcomm.torch_names import all_gather_single

_log = logging.getLogger("ringcomm")

# Elements that _digest() widens to 64 bits at a time.
_DIGEST_ELEMS = 1 << 18


@dataclass(eq=False)
class _Part:
    """A saved tensor: this rank's shard, or all of it; how it looked, and where the shard is."""

    shard: Tensor
    look: Look
    device: torch.device
    place: Literal["whole", "device", "host"]
    room: Room | None = None


class Partitioned(SavedTensors):
    """What partition() returns: a context that counts; bytes of this rank.

    Attributes:
        num_saved: tensors that were partitioned.
        saved_bytes: of shards that are kept on the device now.
        host_bytes: of shards that are kept in host memory now.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        offload: str | None,
        min_elems: int,
        check: bool,
        arena: Arena | None,
    ) -> None:
        super().__init__()
        if offload not in (None, "cpu"):
            raise ValueError(f'offload is None or "cpu", got {offload!r}')
        if min_elems < 0:
            raise ValueError(f"min_elems is 0 or more, got {min_elems}")
        self.num_saved = self.saved_bytes = self.host_bytes = 0
        self._group, self._min_elems, self._arena = group, min_elems, arena
        self._goes_to_host = offload is not None
        self._checks = check and group.size() > 1

    def _takes(self, tensor: Tensor) -> bool:
        return (
            is_plain(tensor)
            and tensor.is_floating_point()
            and tensor.numel() >= self._min_elems
            and (self._group.size() > 1 or self._goes_to_host)
        )

    def _keep(self, tensor: Tensor) -> _Part:
        """Collective with `check`."""
        flat, look = flatten(tensor)
        if self._checks:
            self._check_equal(flat, look)
        begin, end = shard_range(flat.numel(), self._group.size(), self._group.rank())
        shard = flat[begin:end]
        if self._goes_to_host:
            part = _Part(host_copy(shard), look, tensor.device, "host")
        elif self._arena is not None and self._arena.device == tensor.device:
            room = self._arena.copy(shard, look)
            part = _Part(room.flat, look, tensor.device, "device", room)
        else:
            part = _Part(shard.clone(), look, tensor.device, "device")
        self.num_saved += 1
        self._count(part.place, shard.nbytes)
        weakref.finalize(part, self._count, part.place, -shard.nbytes).atexit = False
        return part

    def _restore(self, kept: _Part) -> Tensor:
        """Collective."""
        num_elems = kept.look.shape.numel()
        flat = torch.empty(num_elems, dtype=kept.look.dtype, device=kept.device)
        begin, end = shard_range(num_elems, self._group.size(), self._group.rank())
        flat[begin:end].copy_(kept.shard)
        all_gather_shards(flat, self._group)
        return kept.look.over(flat)

    def _count(self, place: str, num_bytes: int) -> None:
        if place == "host":
            self.host_bytes += num_bytes
        else:
            self.saved_bytes += num_bytes

    def _check_equal(self, flat: Tensor, look: Look) -> None:
        mine = _digest(flat, look)
        digests = mine.new_empty(self._group.size())
        all_gather_single(digests, mine, group=self._group)
        found = digests.tolist()
        other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
        if other is not None:
            raise ValueError(
                f"partition() keeps one copy of what all ranks have alike, and a tensor of shape"
                f" {tuple(look.shape)} is saved that rank {other} has otherwise than rank 0. Inside"
                " of tensor-parallel layers, sequence parallelism or data parallelism tensors"
                " differ: put torch.utils.checkpoint.checkpoint() around each block whose input is"
                " alike, or enter partition() for fewer layers"
            )


def _digest(flat: Tensor, look: Look) -> Tensor:
    """Of the bits, their order and the look: int64 [1], without a wait for the device."""
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    words = flat.view(word)
    weights = torch.arange(1, min(_DIGEST_ELEMS, flat.numel()) + 1, device=flat.device)
    digest = torch.full([1], zlib.crc32(repr(look).encode()), device=flat.device)
    for part in words.split(_DIGEST_ELEMS):
        digest = 31 * digest + (part * weights[: part.numel()]).sum()
    return digest


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, outside of torch's allocator for the tensor's device.

    Pinned where the device is a GPU, so that copies may run beside its work. For a tensor of the
    CPU, of one dimension, it is memory mapped for it alone, which is given back to the system with
    the last reference.
    """
    if tensor.is_cuda:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return copy
    mapped = empty_aligned(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype)
    return mapped.copy_(tensor)


def partition(
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    offload: Literal["cpu"] | None = None,
    min_elems: int = 1 << 14,
    check: bool = True,
    arena: Arena | None = None,
) -> Partitioned:
    """Has tensors that autograd saves inside of it kept in shards over a group, 1/N on each rank.

    For what all ranks of the group have alike: under tensor parallelism the inputs of its blocks,
    which are all that a checkpoint saves. A tensor that differs between the ranks is an error.

        with activations.partition(tensor_parallel_group):
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    The backward pass gathers each again: (N-1)/N of its bytes, 1/12 of what a block of tensor
    parallelism moves with recomputation. Parameters and their views stay as they are, so do tensors
    that are not floating point or small; the bits that come back are those that were saved.

    Args:
        group: None for the default group.
        mesh: of one dimension, in place of a group.
        offload: "cpu" keeps the shards in host memory, outside of the device's (pinned where that
            is a GPU); also those of a single rank, which are whole.
        min_elems: smaller tensors stay whole.
        check: compare a digest of each tensor over the ranks when it is saved: 8 bytes from each
            rank, for which the host waits. Without it tensors that differ are mixed up silently.
        arena: where shards go that are kept on its device; this context alone is entered then.

    Returns:
        A context, which may be entered again and again, and counts.

    Raises:
        ValueError: an option is out of its range. When a tensor is saved that differs between the
            ranks: on all of them.
        RingcommError: in the backward pass, ranks gather different tensors: they ran other layers.
        RuntimeError: torch's own, of a tensor that is written before its backward pass.

    Collective with `check`, and in the backward pass, in autograd's order, which is the same on all
    ranks if the forward passes were. A graph that is dropped gathers nothing. A checkpoint with
    use_reentrant=True saves its inputs here as well, as long as one of them requires grad.
    """
    return Partitioned(resolve_group(group, mesh), offload, min_elems, check, arena)


# ---- by itself


class Auto(Partitioned):
    """What auto() returns: partition()'s context, which decides after the first forward pass.

    Attributes:
        limit_bytes: the lowest of the ranks'.
        whole_bytes: what the first forward pass would save without partition(); the highest of the
            ranks'.
        choice: "whole", "partition" or "partition+cpu"; None before the first forward pass.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        limit_bytes: int,
        device: torch.device,
        min_elems: int,
        arena: Arena | None,
    ) -> None:
        super().__init__(group, "cpu", min_elems, True, arena)
        self.limit_bytes, self._device = limit_bytes, device
        self.whole_bytes = 0
        self.choice: Literal["whole", "partition", "partition+cpu"] | None = None

    def __enter__(self) -> Self:
        if self.choice == "whole":
            self._entered.append(nullcontext())
            return self
        if self.choice is None and not self._entered:
            self.whole_bytes = 0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.choice is None and error[0] is None and not self._entered:
            self._choose()

    def _keep(self, tensor: Tensor) -> _Part:
        if self.choice is None:
            # What has room depends on sizes and their order alone, so that all ranks do the same.
            self.whole_bytes += tensor.nbytes
            if self.whole_bytes <= self.limit_bytes:
                look = Look(tensor.shape, tensor.stride(), tensor.dtype)
                return _Part(tensor, look, tensor.device, "whole")
        return super()._keep(tensor)

    def _restore(self, kept: _Part) -> Tensor:
        return kept.shard if kept.place == "whole" else super()._restore(kept)

    def _choose(self) -> None:
        plan = self.whole_bytes = _highest(self.whole_bytes, self._group, self._device)
        shard_bytes = -(-plan // self._group.size())
        if plan <= self.limit_bytes:
            self.choice = "whole"
            return
        self._goes_to_host = shard_bytes > self.limit_bytes
        self.choice = "partition+cpu" if self._goes_to_host else "partition"
        if self._group.rank() == 0:
            _log.warning(
                "checkpoints of %d bytes have no room in %d: activations.auto() keeps 1/%d of them"
                " on each rank, %d bytes%s",
                plan,
                self.limit_bytes,
                self._group.size(),
                shard_bytes,
                ", in host memory" if self._goes_to_host else "",
            )


def _highest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Of the ranks'. Collective."""
    found = torch.tensor([number], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


def auto(
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    limit_bytes: int | None = None,
    device: torch.device | str | None = None,
    min_elems: int = 1 << 14,
    arena: Arena | None = None,
) -> Auto:
    """partition(), where checkpoints have no room otherwise, and only there (ZeRO-R, 6.1).

        room = activations.auto(tensor_parallel_group, limit_bytes=8 << 30)
        for batch in batches:
            with room:
                loss = loss_of(model, batch)
            loss.backward()

    The first forward pass is measured, and keeps within the limit: tensors that have no room are in
    shards in host memory already. If it saves more than the limit, shards are kept on the device
    from then on; if these exceed it as well, in host memory. Rank 0 says so once, as a warning of
    the logger "ringcomm".

    Args:
        group: as partition()'s.
        mesh: as partition()'s.
        limit_bytes: that checkpoints may take on a device, the least of all ranks' counts; None on
            CUDA for what is free now, once model and optimizer are there. What a backward pass
            takes besides is to be left out of it.
        device: of the activations; None for torch.get_default_device().
        min_elems: as partition()'s.
        arena: as partition()'s.

    Returns:
        A context, which may be entered again and again, and gives partition()'s counters.

    Raises:
        ValueError: an argument is out of its range, also another rank's; a CPU has no limit.

    Collective: an all_reduce of 8 bytes, another one after the first forward pass; in it as
    partition() is. The ranks decide alike.
    """
    resolved = resolve_group(group, mesh)
    where = torch.device(device or torch.get_default_device())
    if limit_bytes is None and where.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(where)
        unused = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        limit_bytes = free_bytes + unused
    # A rank without a limit tells the others, which do not wait for it.
    lowest = -_highest(
        1 if limit_bytes is None or limit_bytes < 0 else -limit_bytes, resolved, where
    )
    if lowest < 0:
        raise ValueError(
            f"limit_bytes is 0 or more on every rank, and has no default for {where.type}; got"
            f" {limit_bytes} here"
        )
    return Auto(resolved, lowest, where, min_elems, arena)
