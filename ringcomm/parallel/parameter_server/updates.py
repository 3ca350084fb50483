"""What an update does at a server, and what a worker that pulls is given of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from ringcomm.parallel.parameter_server.keys import Packing
from ringcomm.parallel.parameter_server.optimizer import ServerOptimizer
from ringcomm.parallel.parameter_server.rounds import Gradient

__all__ = ["SumsForWorkers", "Updates", "UpdatesForWorkers", "Weights", "mean_of"]


def mean_of(gradients: Sequence[Gradient]) -> list[Tensor]:
    """By key, summed in the order given, 16-bit ones in float32, and divided by their number."""
    if len(gradients) == 1 and gradients[0].factor == 1:
        return gradients[0].tensors
    means = []
    for parts in zip(*(gradient.tensors for gradient in gradients), strict=True):
        total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
        total.mul_(gradients[0].factor)
        for part, gradient in zip(parts[1:], gradients[1:], strict=True):
            total.add_(part, alpha=gradient.factor)
        means.append(total.div_(len(gradients)))
    return means


class Updates(Protocol):
    """Versions are numbers of updates: version v is what v updates have made."""

    def apply(self, gradient: Sequence[Tensor]) -> None:
        """The next update: a gradient by key."""

    def news(self, worker: int, has_version: int, version: int) -> list[Tensor]:
        """Packed buffers that bring a worker from one version to another, without copies."""

    def leave(self, worker: int) -> None:
        """The worker pulls no more."""


class Weights(Updates):
    """updates_at="server": an optimizer here, and workers pull weights.

    Args:
        num_kept: versions before the last that workers may still pull.
    """

    def __init__(self, optimizer: ServerOptimizer, packing: Packing, num_kept: int) -> None:
        self._optimizer, self._packing, self._num_kept = optimizer, packing, num_kept
        self._version = 0
        self._packed: dict[int, Tensor] = {}

    @override
    def apply(self, gradient: Sequence[Tensor]) -> None:
        self._begin_version()
        self._optimizer.step(gradient)

    def skip(self) -> None:
        """The next update changes nothing."""
        self._begin_version()

    def _begin_version(self) -> None:
        if self._num_kept:
            self._pack()  # while these weights are there
        self._version += 1
        oldest = self._version - self._num_kept
        self._packed = {
            version: packed for version, packed in self._packed.items() if version >= oldest
        }

    def _pack(self) -> None:
        if self._version not in self._packed:
            self._packed[self._version] = self._packing.pack(self._optimizer.weights)

    @override
    def news(self, worker: int, has_version: int, version: int) -> list[Tensor]:
        if has_version == version:
            return []
        if version == self._version:
            self._pack()
        return [self._packed[version]]

    @override
    def leave(self, worker: int) -> None:
        """Nothing is kept for it."""


class UpdatesForWorkers(Updates):
    """updates_at="worker" in rounds: each worker pulls every mean gradient once."""

    def __init__(self, packing: Packing, workers: Sequence[int]) -> None:
        self._packing = packing
        self._has = dict.fromkeys(workers, 0)
        self._version = 0
        self._packed: dict[int, Tensor] = {}  # by the version that the update starts from

    @override
    def apply(self, gradient: Sequence[Tensor]) -> None:
        self._packed[self._version] = self._packing.pack(gradient)
        self._version += 1

    @override
    def news(self, worker: int, has_version: int, version: int) -> list[Tensor]:
        found = [self._packed[update] for update in range(has_version, version)]
        self._has[worker] = version
        self._drop()
        return found

    @override
    def leave(self, worker: int) -> None:
        self._has.pop(worker, None)
        self._drop()

    def _drop(self) -> None:
        oldest = min(self._has.values(), default=self._version)
        self._packed = {
            update: packed for update, packed in self._packed.items() if update >= oldest
        }


class SumsForWorkers(Updates):
    """updates_at="worker" without rounds: a worker pulls the sum of what it has not had.

    One sum a worker is kept, however slow it is.
    """

    def __init__(self, packing: Packing, workers: Sequence[int]) -> None:
        self._packing = packing
        self._sums: dict[int, list[Tensor] | None] = dict.fromkeys(workers)

    @override
    def apply(self, gradient: Sequence[Tensor]) -> None:
        for worker, sums in self._sums.items():
            if sums is None:
                self._sums[worker] = [
                    part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
                    for part in gradient
                ]
            else:
                for total, part in zip(sums, gradient, strict=True):
                    total.add_(part)

    @override
    def news(self, worker: int, has_version: int, version: int) -> list[Tensor]:
        sums, self._sums[worker] = self._sums[worker], None
        return [] if sums is None else [self._packing.pack(sums)]

    @override
    def leave(self, worker: int) -> None:
        self._sums.pop(worker, None)
