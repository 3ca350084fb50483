"""ZeRO-Infinity's storage of weights and gradients not in use: rows of tiers, prefetched."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import RowHandle, Tier
from ringcomm.parallel.shards.sharded_unit import ShardedUnit


class ShardStore(Operands):
    """Large shards are rows of the tier `weights`, gradients of `grads`; small ones stay in memory.

    `is_filled`: whether the tier has the shards. Units are prefetched in the order of the previous
    step, as long as the model repeats it.

    Attributes:
        replacing: a context for replacing shards outside a step.
        small_grads: by shard, the gradients in memory.
    """

    def __init__(
        self,
        weights: Tier,
        grads: Tier,
        replacing: Callable[[], AbstractContextManager[None]],
        *,
        is_filled: bool,
    ) -> None:
        self.replacing = replacing
        self._weights, self._grads, self._is_filled = weights, grads, is_filled
        self._keys: dict[Tensor, str] = {}
        self._shapes: dict[Tensor, torch.Size] = {}
        self._order: list[ShardedUnit] = []  # of the last step
        self._used: list[ShardedUnit] = []  # of this one
        self._ahead: tuple[ShardedUnit, dict[Tensor, RowHandle]] | None = None
        self._fresh: set[Tensor] = set()  # shards that have a gradient
        self.small_grads: dict[Tensor, Tensor] = {}
        self._of_update: dict[Tensor, tuple[RowHandle, RowHandle | None]] = {}

    # ---- weights

    def keep(self, shards: Iterable[Tensor]) -> None:
        """Takes the large shards of a new unit."""
        for shard in shards:
            key = f"weight.{len(self._keys)}"
            self._keys[shard], self._shapes[shard] = key, shard.shape
            if not self._is_filled:
                self._weights.put(key, shard)
            shard.data = shard.new_empty(0)

    @contextmanager
    def in_memory(self, unit: ShardedUnit) -> Iterator[None]:
        """A context in which a unit's shards are in memory; prefetches those of the next unit."""
        if self._ahead is not None and self._ahead[0] is unit:
            handles, self._ahead = self._ahead[1], None
        else:
            self.forget_ahead()
            handles = self._fetch(unit)
        self._used.append(unit)
        for shard, handle in handles.items():
            shard.data = handle.wait()
        num_used = len(self._used)
        if self._used == self._order[:num_used] and num_used < len(self._order):
            following = self._order[num_used]
            self._ahead = following, self._fetch(following)
        try:
            yield
        finally:
            for shard, handle in handles.items():
                self._weights.release(handle, is_written=False)
                shard.data = shard.new_empty(0)

    def row(self, shard: Tensor, *, is_written: bool) -> AbstractContextManager[Tensor]:
        """A context with the values of a large shard, to read or write."""
        self.forget_ahead()
        return self._weights.row(self._keys[shard], is_written=is_written)

    def step_begins(self) -> None:
        """Called before weights are written, after which the model repeats its order of units."""
        self.forget_ahead()
        self._order, self._used = self._used, []

    def forget_ahead(self) -> None:
        """Releases prefetched rows that are not needed now."""
        if self._ahead is not None:
            for handle in self._ahead[1].values():
                self._weights.release(handle, is_written=False)
            self._ahead = None

    def _fetch(self, unit: ShardedUnit) -> dict[Tensor, RowHandle]:
        shards = (unit.shards[param] for param in unit.large)
        return {shard: self._weights.fetch(self._keys[shard]) for shard in shards}

    # ---- gradients

    def gradient(
        self, shard: Tensor, *, is_written: bool = False
    ) -> AbstractContextManager[Tensor]:
        """A context with an accumulated gradient, to read or write."""
        if shard not in self._keys:
            return nullcontext(self.small_grads[shard])
        return self._grads.row(self._keys[shard], is_written=is_written)

    def add_grad(self, shard: Tensor, grad: Tensor) -> None:
        """Stores a gradient, or adds it to the stored one."""
        if shard in self._fresh:
            with self.gradient(shard, is_written=True) as before:
                before.add_(grad)
        elif shard not in self._keys:
            self.small_grads[shard] = grad
        else:
            self._grads.put(self._keys[shard], grad)
        self._fresh.add(shard)

    def drop_grad(self, shard: Tensor) -> None:
        """Drops a gradient."""
        self._fresh.discard(shard)
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
        if (key := self._keys.get(param)) is not None:
            grad = self._grads.fetch(key) if param in self._fresh else None
            self._of_update[param] = self._weights.fetch(key), grad

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
            self._weights.release(weights, is_written=True)
            if grads is not None:
                self._grads.release(grads, is_written=False)
