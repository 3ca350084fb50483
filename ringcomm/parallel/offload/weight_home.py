"""The large shards of a model's units in a tier, read ahead of the unit that needs them next."""

from __future__ import annotations

import torch
from torch import Tensor

from ringcomm.parallel.offload.tiers import Loan, Tier
from ringcomm.parallel.shards.sharded_unit import ShardedUnit

Loans = dict[Tensor, Loan]


class WeightHome:
    """A ShardHome (ringcomm.parallel.shards.sharded_unit); `is_filled`: `tier` has the shards.

    Which unit is next is what it was in the step before, as long as the model does the same.
    """

    def __init__(self, tier: Tier, *, is_filled: bool) -> None:
        self._tier, self._is_filled = tier, is_filled
        self._keys: dict[Tensor, str] = {}
        self._shapes: dict[Tensor, torch.Size] = {}
        self._lent: dict[ShardedUnit, Loans] = {}
        self._ahead: tuple[ShardedUnit, Loans] | None = None
        self._order: list[ShardedUnit] = []  # of the last step
        self._came: list[ShardedUnit] = []  # of this one

    def key_of(self, shard: Tensor) -> str | None:
        """The row of a shard; None of a small one."""
        return self._keys.get(shard)

    def shape_of(self, shard: Tensor) -> torch.Size:
        """Of a shard, in memory or not."""
        return self._shapes.get(shard, shard.shape)

    def keep(self, unit: ShardedUnit) -> None:
        """See ShardHome."""
        for param in unit.large:
            shard = unit.shards[param]
            key = f"weight.{len(self._keys)}"
            self._keys[shard], self._shapes[shard] = key, shard.shape
            if not self._is_filled:
                loan = self._tier.new(key, shard.numel(), shard.dtype)
                loan.wait().copy_(shard)
                self._tier.give_back(loan, is_written=True)
            _empty(shard)

    def bring(self, unit: ShardedUnit) -> None:
        """See ShardHome; starts reading the next."""
        if self._ahead is not None and self._ahead[0] is unit:
            loans = self._ahead[1]
            self._ahead = None
        else:
            self.forget_ahead()
            loans = self._fetch(unit)
        self._came.append(unit)
        for shard, loan in loans.items():
            shard.data = loan.wait()
        self._lent[unit] = loans
        num_came = len(self._came)
        if self._came == self._order[:num_came] and num_came < len(self._order):
            following = self._order[num_came]
            if following not in self._lent:
                self._ahead = following, self._fetch(following)

    def let_go(self, unit: ShardedUnit) -> None:
        """See ShardHome."""
        for shard, loan in self._lent.pop(unit).items():
            self._tier.give_back(loan, is_written=False)
            _empty(shard)

    def read(self, shard: Tensor) -> Tensor:
        """See ShardHome."""
        self.forget_ahead()
        loan = self._tier.fetch(self._keys[shard])
        value = loan.wait().clone()
        self._tier.give_back(loan, is_written=False)
        return value

    def write(self, shard: Tensor, value: Tensor) -> None:
        """See ShardHome."""
        self.forget_ahead()
        loan = self._tier.fetch(self._keys[shard])
        loan.wait().copy_(value)
        self._tier.give_back(loan, is_written=True)

    def step_begins(self) -> None:
        """Weights are going to be written, and then the model does again what it did."""
        self.forget_ahead()
        self._order, self._came = self._came, []

    def forget_ahead(self) -> None:
        """Gives back what was read ahead, and is not needed now."""
        if self._ahead is not None:
            for loan in self._ahead[1].values():
                self._tier.give_back(loan, is_written=False)
            self._ahead = None

    def _fetch(self, unit: ShardedUnit) -> Loans:
        return {
            unit.shards[param]: self._tier.fetch(self._keys[unit.shards[param]])
            for param in unit.large
        }


def _empty(shard: Tensor) -> None:
    shard.data = shard.new_empty(0)
