"""Weights that stages on several ranks share, such as an embedding and the head behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["TiedWeights", "find_tied"]


class TiedWeights:
    """The weights that this rank has, and others as well: by weight the ranks that have it."""

    def __init__(
        self, ranks_of: Mapping[nn.Parameter, Sequence[int]], group: dist.ProcessGroup
    ) -> None:
        self._ranks_of = dict(ranks_of)
        self._group = group

    @property
    def params(self) -> frozenset[nn.Parameter]:
        """This rank's weights that others have as well."""
        return frozenset(self._ranks_of)

    def replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Goes on with other parameters, such as the DTensors that fully_shard makes of them."""
        self._ranks_of = {new[param]: ranks for param, ranks in self._ranks_of.items()}

    def is_counted_elsewhere(self, param: nn.Parameter) -> bool:
        """Whether a rank before this one has it."""
        return param in self._ranks_of and self._ranks_of[param][0] != self._group.rank()

    def copy_from_first(self) -> None:
        """Makes all ranks' values those of the first that has them."""
        for param, ranks in self._ranks_of.items():
            values = self._exchange(param.detach(), ranks)
            with torch.no_grad():
                param.copy_(values[0])

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Gradients that are made inside become sums over all ranks; those before are sums."""
        before = {param: param.grad for param in self._ranks_of}
        for param in before:
            param.grad = None
        try:
            yield
        except BaseException:
            for param, grad in before.items():
                param.grad = grad
            raise
        for param, ranks in self._ranks_of.items():
            if not param.requires_grad:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            # Data-parallel ranks of other stages have the same part of a DTensor.
            mine = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            first, *others = self._exchange(mine, ranks)
            mine.copy_(sum(others, start=first.clone()))
            if (earlier := before[param]) is not None:
                param.grad = earlier.add_(param.grad)

    def _exchange(self, mine: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Everybody's, in the order of ranks."""
        mine = mine.contiguous()
        found = [mine if r == self._group.rank() else torch.empty_like(mine) for r in ranks]
        ops = []
        for rank, theirs in zip(ranks, found, strict=True):
            if rank != self._group.rank():
                ops.append(dist.P2POp(dist.isend, mine, group=self._group, group_peer=rank))
                ops.append(dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=rank))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return found


def find_tied(
    blocks_of_ranks: Sequence[Sequence[nn.Module]], rank: int
) -> dict[nn.Parameter, list[int]]:
    """This rank's parameters that are in blocks of other ranks, too, and which ranks those are."""
    ranks_of: dict[nn.Parameter, list[int]] = {}
    for owner, blocks in enumerate(blocks_of_ranks):
        for param in dict.fromkeys(p for block in blocks for p in block.parameters()):
            ranks_of.setdefault(param, []).append(owner)
    return {param: ranks for param, ranks in ranks_of.items() if len(ranks) > 1 and rank in ranks}
