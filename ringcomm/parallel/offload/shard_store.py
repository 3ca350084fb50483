"""ZeRO-Infinity's storage of weights and gradients not in use: rows of tiers, prefetched."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ringcomm.parallel.offload.sharded_unit import ShardedUnit
from ringcomm.parallel.offload.state_rows import Operands
from ringcomm.parallel.offload.tiers import RowHandle, Tier


class ShardStore(Operands):
    """Large shards and their gradients are rows of a tier; small ones stay in memory.

    Units are prefetched in the order of the previous step, as long as the model repeats it.

    Attributes:
        small_grads: by shard, the gradients in memory.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._numbers: dict[Tensor, int] = {}  # of large shards, in their keys
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
            self._numbers[shard], self._shapes[shard] = len(self._numbers), shard.shape
            self._tier.put(self._weight_key(shard), shard)
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
                self._tier.release(handle, is_written=False)
                shard.data = shard.new_empty(0)

    def row(self, shard: Tensor, *, is_written: bool) -> AbstractContextManager[Tensor]:
        """A context with the values of a large shard, to read or write."""
        self.forget_ahead()
        return self._tier.row(self._weight_key(shard), is_written=is_written)

    def step_begins(self) -> None:
        """Called before weights are written, after which the model repeats its order of units."""
        self.forget_ahead()
        self._order, self._used = self._used, []

    def forget_ahead(self) -> None:
        """Releases prefetched rows that are not needed now."""
        if self._ahead is not None:
            for handle in self._ahead[1].values():
                self._tier.release(handle, is_written=False)
            self._ahead = None

    def _fetch(self, unit: ShardedUnit) -> dict[Tensor, RowHandle]:
        shards = (unit.shards[param] for param in unit.large)
        return {shard: self._tier.fetch(self._weight_key(shard)) for shard in shards}

    def _weight_key(self, shard: Tensor) -> str:
        return f"weight.{self._numbers[shard]}"

    def _grad_key(self, shard: Tensor) -> str:
        return f"gradient.{self._numbers[shard]}"

    # ---- gradients

    def gradient(
        self, shard: Tensor, *, is_written: bool = False
    ) -> AbstractContextManager[Tensor]:
        """A context with an accumulated gradient, to read or write."""
        if shard not in self._numbers:
            return nullcontext(self.small_grads[shard])
        return self._tier.row(self._grad_key(shard), is_written=is_written)

    def add_grad(self, shard: Tensor, grad: Tensor) -> None:
        """Stores a gradient, or adds it to the stored one."""
        if shard in self._fresh:
            with self.gradient(shard, is_written=True) as before:
                before.add_(grad)
        elif shard not in self._numbers:
            self.small_grads[shard] = grad
        else:
            self._tier.put(self._grad_key(shard), grad)
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
