"""Weights and gradients of a step that are fetched for it: for ZeroInfinity."""

from __future__ import annotations

import torch
from torch import Tensor

from ringcomm.parallel.offload.operands import Operands
from ringcomm.parallel.offload.tiers import Loan, Tier
from ringcomm.parallel.offload.weight_home import WeightHome


class FetchedOperands(Operands):
    """Large shards and their gradients are rows of tiers, small ones stay in memory.

    Args:
        home: has the large shards of weights.
        weights: the tier behind it.
        grads: another tier, for gradients of large shards.
    """

    def __init__(self, home: WeightHome, weights: Tier, grads: Tier) -> None:
        self._home, self._weights, self._grads = home, weights, grads
        self._fresh: set[Tensor] = set()
        self._small: dict[Tensor, Tensor] = {}
        self._loans: dict[Tensor, tuple[Loan, Loan]] = {}

    # ---- gradients

    def add_grad(self, shard: Tensor, grad: Tensor) -> None:
        """Takes a gradient, or adds it to the one that is there."""
        key = self._home.key_of(shard)
        if key is None:
            before = self._small.get(shard)
            self._small[shard] = grad if before is None else before.add_(grad)
        elif shard in self._fresh:
            loan = self._grads.fetch(key)
            loan.wait().add_(grad)
            self._grads.give_back(loan, is_written=True)
        else:
            loan = self._grads.new(key, grad.numel(), grad.dtype)
            loan.wait().copy_(grad)
            self._grads.give_back(loan, is_written=True)
        self._fresh.add(shard)

    def forget_grads(self) -> None:
        """Waits for new ones."""
        self._fresh.clear()
        self._small.clear()

    def drop_grad(self, shard: Tensor) -> None:
        """Forgets one."""
        self._fresh.discard(shard)
        self._small.pop(shard, None)

    def scale_grads(self, factor: float) -> None:
        """Multiplies all of them."""
        for shard in self._fresh:
            key = self._home.key_of(shard)
            if key is None:
                self._small[shard].mul_(factor)
            else:
                loan = self._grads.fetch(key)
                loan.wait().mul_(factor)
                self._grads.give_back(loan, is_written=True)

    @property
    def has_grads(self) -> bool:
        """Whether any has come."""
        return bool(self._fresh)

    @property
    def small_grads(self) -> list[Tensor]:
        """Those in memory."""
        return list(self._small.values())

    # ---- see Operands

    def shape(self, param: Tensor) -> torch.Size:
        """See Operands."""
        return self._home.shape_of(param)

    def has_grad(self, param: Tensor) -> bool:
        """See Operands."""
        return param in self._fresh

    def start(self, param: Tensor) -> None:
        """See Operands."""
        key = self._home.key_of(param)
        if key is not None:
            self._loans[param] = self._weights.fetch(key), self._grads.fetch(key)

    def get(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """See Operands."""
        if param in self._loans:
            weights, grads = self._loans[param]
            return weights.wait(), grads.wait()
        return param.view(-1), self._small[param].view(-1)

    def done(self, param: Tensor) -> None:
        """See Operands; weights go back as they are now."""
        self._give_back(param, is_written=True)

    def read(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and gradient, to be looked at until give_back()."""
        self.start(param)
        return self.get(param)

    def give_back(self, param: Tensor) -> None:
        """Ends read()."""
        self._give_back(param, is_written=False)

    def _give_back(self, param: Tensor, *, is_written: bool) -> None:
        if param in self._loans:
            weights, grads = self._loans.pop(param)
            self._weights.give_back(weights, is_written=is_written)
            self._grads.give_back(grads, is_written=False)
