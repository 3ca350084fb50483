"""ZeRO-Infinity's storage of weights and gradients not in use: rows of tiers, prefetched."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ringcomm.parallel.offload.device_copies import Upload, bytes_for, copy_down
from ringcomm.parallel.offload.sharded_unit import ShardedUnit
from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import RowHandle, Tier
from ringcomm.parallel.offload.transfers import empty_row

# Bytes of gradients that may be on their way from a device; then the host waits for the oldest.
MAX_COMING_BYTES = 64 << 20


class _Coming(NamedTuple):
    """A gradient on its way to a row in host memory."""

    shard: Tensor
    grad: Tensor
    handle: RowHandle | None  # if it is the first one of a large shard, of its row
    is_there: torch.Event


class _Fetched:
    """A unit's pieces on their way to its device: large ones, and the packed row.

    `upload` is None before copy_to().
    """

    def __init__(self, unit: ShardedUnit, handles: list[RowHandle], tier: Tier) -> None:
        self.unit, self._handles, self._tier = unit, handles, tier
        self.upload: Upload | None = None
        self._copies: list[Tensor] = []

    def copy_to(self, upload: Upload) -> None:
        """Starts copying to the device, after the host has waited for files."""
        self.upload, self._copies = upload, upload.start(self._rows())

    def begin_use(self) -> list[Tensor]:
        """The pieces, for calls on the current stream."""
        if self.upload is None:
            return self._rows()
        self.upload.begin_use()
        return self._copies

    def end_use(self) -> None:
        if self.upload is not None:
            self.upload.end_use()

    def release(self) -> None:
        """Gives rows back. The host waits for copies of rows whose memory others may then use."""
        if self.upload is not None and not self._tier.keeps_memory:
            self.upload.wait()
        handles, self._handles = self._handles, []
        for handle in handles:
            self._tier.release(handle, is_written=False)

    def _rows(self) -> list[Tensor]:
        return [*(handle.wait() for handle in self._handles), self.unit.packed_row]


class ShardStore(Operands):
    """Large shards and their gradients are rows of a tier; small ones stay in memory.

    Units are prefetched in the order of the previous step, as long as the model repeats it. For a
    model on an accelerator rows are pinned, and copied on streams beside its kernels.

    Attributes:
        small_grads: by shard, the gradients in memory.
    """

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self._device, self._is_device = device, device.type != "cpu"
        self._tier = tier.pinned() if self._is_device else tier
        # Of the last two units, with what they have copied.
        self._uploads: deque[tuple[Upload, _Fetched]] = deque(maxlen=2)
        self._upload_bytes = 0
        self._numbers: dict[Tensor, int] = {}  # of large shards, in their keys
        self._shapes: dict[Tensor, torch.Size] = {}
        self._order: list[ShardedUnit] = []  # of the last step
        self._used: list[ShardedUnit] = []  # of this one
        self._ahead: _Fetched | None = None
        self._fresh: set[Tensor] = set()  # shards that have a gradient
        self._coming: deque[_Coming] = deque()
        self.small_grads: dict[Tensor, Tensor] = {}
        self._of_update: dict[Tensor, tuple[RowHandle, RowHandle | None]] = {}

    # ---- weights

    def keep(self, shards: Mapping[Tensor, Tensor], packed_row: Tensor) -> None:
        """Takes the values of the large shards of a new unit."""
        self._upload_bytes = max(self._upload_bytes, bytes_for([*shards.values(), packed_row]))
        for shard, values in shards.items():
            self._numbers[shard], self._shapes[shard] = len(self._numbers), values.shape
            self._tier.put(self._weight_key(shard), values)

    @contextmanager
    def in_memory(self, unit: ShardedUnit) -> Iterator[list[Tensor]]:
        """A context with a unit's pieces on its device: large ones, and the packed row.

        Prefetches those of the next unit.
        """
        if self._ahead is not None and self._ahead.unit is unit:
            fetched, self._ahead = self._ahead, None
        else:
            self.forget_ahead()
            fetched = self._fetch(unit)
        self._used.append(unit)
        if self._is_device and fetched.upload is None:
            self._begin_copy(fetched)
        pieces = fetched.begin_use()
        num_used = len(self._used)
        if self._used == self._order[:num_used] and num_used < len(self._order):
            self._ahead = self._fetch(self._order[num_used])
            if self._is_device and self._tier.keeps_memory:  # else when files have been read
                self._begin_copy(self._ahead)
        try:
            yield pieces
        finally:
            fetched.end_use()
            if not self._is_device:
                fetched.release()

    def row(self, shard: Tensor, *, is_written: bool) -> AbstractContextManager[Tensor]:
        """A context with the values of a large shard, to read or write."""
        self.settle()
        return self._tier.row(self._weight_key(shard), is_written=is_written)

    def step_begins(self) -> None:
        """Called before weights are written, after which the model repeats its order of units."""
        self.settle()
        self._order, self._used = self._used, []

    def forget_ahead(self) -> None:
        """Releases prefetched rows that are not needed now."""
        if self._ahead is not None:
            self._ahead.release()
            self._ahead = None

    def settle(self) -> None:
        """Waits until no copy reads a row or brings a gradient."""
        self.forget_ahead()
        for upload, fetched in self._uploads:
            upload.wait()
            fetched.release()
        self._receive()

    def close(self) -> None:
        """Releases memory and files."""
        self.settle()
        self._uploads.clear()
        self._tier.close()

    def _fetch(self, unit: ShardedUnit) -> _Fetched:
        keys = [self._weight_key(unit.shards[param]) for param in unit.large]
        return _Fetched(unit, [self._tier.fetch(key) for key in keys], self._tier)

    def _begin_copy(self, fetched: _Fetched) -> None:
        """Starts copying to the device, into the memory of the unit before the last."""
        if len(self._uploads) < 2:
            upload = Upload(self._device, self._upload_bytes)
        else:
            upload, before = self._uploads.popleft()
            before.release()
        self._uploads.append((upload, fetched))
        fetched.copy_to(upload)

    def _weight_key(self, shard: Tensor) -> str:
        return f"weight.{self._numbers[shard]}"

    def _grad_key(self, shard: Tensor) -> str:
        return f"gradient.{self._numbers[shard]}"

    # ---- gradients

    def gradient(
        self, shard: Tensor, *, is_written: bool = False
    ) -> AbstractContextManager[Tensor]:
        """A context with an accumulated gradient, to read or write."""
        self._receive()
        return self._grad(shard, is_written=is_written)

    def _grad(self, shard: Tensor, *, is_written: bool) -> AbstractContextManager[Tensor]:
        if shard not in self._numbers:
            return nullcontext(self.small_grads[shard])
        return self._tier.row(self._grad_key(shard), is_written=is_written)

    def add_grad(self, shard: Tensor, grad: Tensor) -> None:
        """Stores a gradient, or adds it to the stored one; that of a device when it has come."""
        target, handle = grad, None
        if shard in self._numbers and shard not in self._fresh:
            handle = self._tier.new(self._grad_key(shard), grad.numel(), grad.dtype)
            target = handle.wait()
        elif self._is_device:
            target = empty_row(grad.numel(), grad.dtype, is_pinned=True)
        self._fresh.add(shard)
        if self._is_device:
            is_there = copy_down(grad, target)
            self._coming.append(_Coming(shard, target, handle, is_there))
            self._receive(MAX_COMING_BYTES)
        else:
            if target is not grad:
                target.copy_(grad)
            self._store(shard, target, handle)

    def _receive(self, max_bytes: int = 0) -> None:
        """The host waits for gradients until so many bytes may be on their way."""
        while sum(coming.grad.nbytes for coming in self._coming) > max_bytes:
            shard, grad, handle, is_there = self._coming.popleft()
            is_there.synchronize()
            self._store(shard, grad, handle)

    def _store(self, shard: Tensor, grad: Tensor, handle: RowHandle | None) -> None:
        if handle is not None:
            self._tier.release(handle, is_written=True)
        elif shard in self._numbers or shard in self.small_grads:
            with self._grad(shard, is_written=True) as before:
                before.add_(grad)
        else:
            self.small_grads[shard] = grad

    def drop_grad(self, shard: Tensor) -> None:
        """Drops a gradient."""
        self._fresh.discard(shard)
        if any(coming.shard is shard for coming in self._coming):
            self._coming = deque(each for each in self._coming if each.shard is not shard)
        self.small_grads.pop(shard, None)

    # ---- the update: see Operands

    def shape(self, param: Tensor) -> torch.Size:
        """The shape of a shard, in memory or not."""
        return self._shapes.get(param, param.shape)

    def has_grad(self, param: Tensor) -> bool:
        """Whether a gradient has arrived."""
        return param in self._fresh

    def start(self, param: Tensor) -> None:
        """Starts reading a large shard and its gradient."""
        if param in self._numbers:
            grad = self._tier.fetch(self._grad_key(param)) if param in self._fresh else None
            self._of_update[param] = self._tier.fetch(self._weight_key(param)), grad

    def get(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        """Waits for them."""
        if param in self._of_update:
            weights, grads = self._of_update[param]
            return weights.wait(), None if grads is None else grads.wait()
        return param, self.small_grads.get(param)

    def done(self, param: Tensor) -> None:
        """Writes the current weights back."""
        if param in self._of_update:
            weights, grads = self._of_update.pop(param)
            self._tier.release(weights, is_written=True)
            if grads is not None:
                self._tier.release(grads, is_written=False)
