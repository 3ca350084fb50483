"""Sharded activation checkpoints: Pa and Pa+cpu of ZeRO-R (Rajbhandari et al. 2020, 6.1)."""

import logging
import zlib
from contextlib import nullcontext, suppress
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.activations.arena import Kept, SavedTensors, is_plain
from ringcomm.parallel.activations.arena import arena as Arena  # also an argument
from ringcomm.parallel.flat_collectives import all_gather_shards, gathered_rows, largest_of
from ringcomm.parallel.offload.device_copies import host_copy

_log = logging.getLogger("ringcomm")

# Elements that _digest() widens to 64 bits at a time.
_DIGEST_ELEMS = 1 << 18


class partition:  # noqa: N801  # a context, as torch's saved_tensors_hooks
    """Shards the tensors that autograd saves inside this context over a group: each rank keeps 1/N.

    The tensors must be equal on all ranks of the group. With tensor parallelism these are the
    inputs of its blocks, the only tensors that a checkpoint saves. A tensor that differs between
    the ranks is an error.

        with activations.partition(tensor_parallel_group):
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    The backward pass gathers each tensor again. This sends (N-1)/N of its bytes, 1/12 of the
    traffic of a tensor-parallel block with recomputation. The gathered bits are those that were
    saved. Parameters and their views, small tensors and tensors that are not floating point are not
    sharded. The context may be entered repeatedly and recursively.

    Args:
        group, mesh: the ranks, a group or a one-dimensional DeviceMesh; by default all.
        offload: "cpu" keeps the shards in host memory (pinned if the device is a GPU), also with a
            single rank, whose shard is the whole tensor.
        min_elems: smaller tensors are not sharded.
        check: compare a digest of all tensors between the ranks at the end of the context, or in a
            backward pass inside it: 16 bytes from each rank, for which the host waits. Without the
            check, tensors that differ are mixed silently.
        arena: memory for the shards that are kept on its device; enter only this context then, not
            the arena.

    Attributes:
        num_saved: tensors that were partitioned.

    Raises:
        ValueError: an option is out of range; or, at the end of the context on all ranks, a saved
            tensor differs between the ranks, or their number.
        RingcommError: in the backward pass, ranks gather different tensors because they ran
            different layers.
        RuntimeError: from torch: a saved tensor was modified in place before its backward pass.

    Collective at its end with `check`, unless gradients are disabled there, and also if nothing was
    saved; and in the backward pass, in autograd's order, which is the same on all ranks if the
    forward passes were. A dropped graph gathers nothing. The inputs of a
    checkpoint with use_reentrant=True are sharded too, if one of them requires grad.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: DeviceMesh | None = None,
        offload: Literal["cpu"] | None = None,
        min_elems: int = 1 << 14,
        check: bool = True,
        arena: Arena | None = None,
    ) -> None:
        if offload not in (None, "cpu"):
            raise ValueError(f'offload must be None or "cpu", got {offload!r}')
        if min_elems < 0:
            raise ValueError(f"min_elems must be 0 or more, got {min_elems}")
        self.num_saved, self._saved = 0, SavedTensors()
        self._on_device: WeakSet[Kept] = WeakSet()
        self._on_host: WeakSet[Kept] = WeakSet()
        self._group, self._min_elems, self._arena = resolve_group(group, mesh), min_elems, arena
        self._goes_to_host = offload is not None
        self._checks = check and self._group.size() > 1
        self._unchecked: list[tuple[Tensor, torch.Size]] = []  # digests and shapes

    @property
    def saved_bytes(self) -> int:
        """Bytes of the shards that this rank has on the device now."""
        return sum(kept.flat.nbytes for kept in self._on_device)

    @property
    def host_bytes(self) -> int:
        """Bytes of the shards that this rank has in host memory now."""
        return sum(kept.flat.nbytes for kept in self._on_host)

    def _takes(self, tensor: Tensor) -> bool:
        return (
            is_plain(tensor)
            and tensor.is_floating_point()
            and tensor.numel() >= self._min_elems
            and (self._group.size() > 1 or self._goes_to_host)
        )

    def __enter__(self) -> Self:
        self._saved.enter(self._takes, self._keep, self._restore)
        return self

    def __exit__(self, *error: Any) -> None:
        self._saved.leave(*error)
        if not self._saved.entered:
            unchecked, self._unchecked = self._unchecked, []
            if self._checks and torch.is_grad_enabled() and error[0] is None:
                self._check(unchecked)

    def _check(self, unchecked: list[tuple[Tensor, torch.Size]]) -> None:
        """Compares what was saved. Collective."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for digest, _ in unchecked:
            by_device.setdefault(digest.device, []).append(digest)
        numbers = {device: iter(torch.cat(own).tolist()) for device, own in by_device.items()}
        mine = [next(numbers[digest.device]) for digest, _ in unchecked]
        # Few bytes for all of them, also on a rank that has saved none.
        of_all = zlib.crc32(repr(mine).encode())
        counts, digests = zip(*self._gathered([len(mine), of_all]), strict=True)
        if len({*counts}) > 1:
            raise ValueError(
                "partition() shards saved tensors that are equal on all ranks, but ranks have saved"
                f" different numbers of them: {', '.join(map(str, counts))}"
            )
        if len({*digests}) == 1:
            return
        found = self._gathered(mine)
        for rank, theirs in enumerate(found):
            for (_, shape), number, first in zip(unchecked, theirs, found[0], strict=True):
                if number == first:
                    continue
                raise ValueError(
                    "partition() shards saved tensors that are equal on all ranks, but one of shape"
                    f" {tuple(shape)} differs between rank 0 and rank {rank}. Tensors differ"
                    " inside tensor-parallel layers and under sequence or data parallelism: put"
                    " torch.utils.checkpoint.checkpoint() around each block whose input is the same"
                    " on all ranks, or enter partition() for fewer layers"
                )

    def _gathered(self, mine: list[int]) -> list[list[int]]:
        """All ranks' numbers, of which each has as many. Collective."""
        row = torch.tensor(mine, dtype=torch.int64, device="cpu")
        found: list[list[int]] = gathered_rows(row, self._group).tolist()
        return found

    def _keep(self, kept: Kept) -> None:
        if self._checks:
            self._unchecked.append((_digest(kept), kept.shape))
        begin, end = shard_range(kept.flat.numel(), self._group.size(), self._group.rank())
        kept.flat, kept.is_shard = kept.flat[begin:end], True
        if self._goes_to_host:
            kept.flat, kept.is_there = host_copy(kept.flat)
        elif self._arena is not None and self._arena.device in (None, kept.device):
            self._arena._keep(kept)
        else:
            kept.flat = kept.flat.clone()
        self.num_saved += 1
        (self._on_host if self._goes_to_host else self._on_device).add(kept)

    def _restore(self, kept: Kept) -> Tensor:
        """Collective."""
        if self._unchecked:  # a backward pass inside the context
            unchecked, self._unchecked = self._unchecked, []
            self._check(unchecked)
        if kept.is_there is not None:
            torch.accelerator.current_stream(kept.device).wait_event(kept.is_there)
        num_elems = kept.shape.numel()
        flat = torch.empty(num_elems, dtype=kept.flat.dtype, device=kept.device)
        begin, end = shard_range(num_elems, self._group.size(), self._group.rank())
        flat[begin:end].copy_(kept.flat, non_blocking=True)
        all_gather_shards(flat, self._group)
        return kept.viewed(flat)


def _digest(kept: Kept) -> Tensor:
    """A digest of bits, their order, shape and strides: int64 [1]; does not wait for the device."""
    flat = kept.flat
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    weights = torch.arange(1, min(_DIGEST_ELEMS, flat.numel()) + 1, device=flat.device)
    look = repr((kept.shape, kept.stride, flat.dtype)).encode()
    digest = torch.full([1], zlib.crc32(look), dtype=torch.int64, device=flat.device)
    for part in flat.view(word).split(_DIGEST_ELEMS):
        digest = 31 * digest + (part * weights[: part.numel()]).sum()
    return digest


class auto(partition):  # noqa: N801
    """Applies partition() only if checkpoints do not fit otherwise (ZeRO-R, 6.1).

        saved = activations.auto(tensor_parallel_group, limit_bytes=8 << 30)
        for batch in batches:
            with saved:
                loss = loss_of(model, batch)
            loss.backward()

    The first forward pass is measured. It stays within the limit, because tensors that do not fit
    are sharded to host memory. If it saves more than the limit, later passes keep shards on the
    device; if these exceed the limit too, in host memory. Rank 0 logs this once, as a warning of
    the logger "ringcomm".

    Args:
        limit_bytes: the memory for checkpoints on a device; the smallest value of all ranks is
            used. None on an accelerator means the memory that is free now: make model and optimizer
            before. Subtract the other memory that a backward pass needs.
        device: where limit_bytes is None, the device whose free memory is the limit; None for the
            current accelerator, or the CPU where there is none.
        group, mesh, min_elems, arena: as partition()'s.

    Attributes:
        limit_bytes: the smallest value of the ranks.
        whole_bytes: the bytes that the first forward pass would save without partition(); the
            largest value of the ranks.
        choice: "whole", "partition" or "partition+cpu"; None before the first forward pass.

    Raises:
        ValueError: an argument is out of range, on this or another rank; limit_bytes is None on a
            CPU; or, in the forward pass, activations are on another device than that.

    Collective: an all_reduce of 8 bytes, another one after the first forward pass, and the
    collectives of partition(). All ranks make the same choice.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: DeviceMesh | None = None,
        limit_bytes: int | None = None,
        device: torch.device | str | None = None,
        min_elems: int = 1 << 14,
        arena: Arena | None = None,
    ) -> None:
        super().__init__(group, mesh=mesh, offload="cpu", min_elems=min_elems, arena=arena)
        found = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
        place = torch.device(found)
        self._limit_of = place.type if limit_bytes is None else None
        if limit_bytes is None and place.type != "cpu":
            with suppress(RuntimeError):  # there is no such device: the other ranks wait
                free_bytes, _ = torch.accelerator.get_memory_info(place)
                kept_bytes = torch.accelerator.memory_reserved(place)
                limit_bytes = free_bytes + kept_bytes - torch.accelerator.memory_allocated(place)
        # A rank without a limit reports this to the others, so they do not wait for it.
        mine = 1 if limit_bytes is None or limit_bytes < 0 else -limit_bytes
        self.limit_bytes = -self._highest(mine)
        if self.limit_bytes < 0:
            raise ValueError(
                "limit_bytes must be 0 or more on every rank, and has no default for"
                f" {place.type}; got {limit_bytes} here"
            )
        self.whole_bytes = 0
        self.choice: Literal["whole", "partition", "partition+cpu"] | None = None

    def __enter__(self) -> Self:
        if self.choice == "whole":
            self._saved.entered.append(nullcontext())
            return self
        if self.choice is None and not self._saved.entered:
            self.whole_bytes = 0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.choice is not None or error[0] is not None or self._saved.entered:
            return
        plan = self.whole_bytes = self._highest(self.whole_bytes)
        if plan == 0:  # a pass without gradients tells nothing
            return
        shard_bytes = -(-plan // self._group.size())
        if plan <= self.limit_bytes:
            self.choice, self._checks = "whole", False
            return
        self._goes_to_host = shard_bytes > self.limit_bytes
        self.choice = "partition+cpu" if self._goes_to_host else "partition"
        if self._group.rank() == 0:
            _log.warning(
                "checkpoints of %d bytes do not fit in %d: activations.auto() keeps 1/%d of them"
                " on each rank, %d bytes%s",
                plan,
                self.limit_bytes,
                self._group.size(),
                shard_bytes,
                ", in host memory" if self._goes_to_host else "",
            )

    def _keep(self, kept: Kept) -> None:
        if self._limit_of not in (None, kept.device.type):
            raise ValueError(
                f"activations.auto() has the memory of {self._limit_of} as its limit, and got a"
                f" tensor on {kept.device}: pass limit_bytes or device={kept.device.type!r}"
            )
        if self.choice is None:
            # The choice depends only on sizes and their order, so it is the same on all ranks.
            self.whole_bytes += kept.flat.nbytes
            if self.whole_bytes <= self.limit_bytes:
                return
        super()._keep(kept)

    def _restore(self, kept: Kept) -> Tensor:
        return super()._restore(kept) if kept.is_shard else kept.viewed(kept.flat)

    def _highest(self, number: int) -> int:
        """The largest value of the ranks. Collective."""
        return largest_of([number], [self._group], torch.int64)[0]
