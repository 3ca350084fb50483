"""What a worker does: gradients to all servers, and what is new from them into its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ringcomm.errors import RingcommError
from ringcomm.loss_scale import LossScale
from ringcomm.parallel.parameter_server.keys import Key
from ringcomm.parallel.parameter_server.messages import Header, Kind
from ringcomm.parallel.parameter_server.ports import Port
from ringcomm.parallel.parameter_server.replicas import Replicas
from ringcomm.parallel.parameter_server.serving import Serving

__all__ = ["Worker"]


class Worker:
    """The working part of a rank.

    Args:
        ports: to every server with keys.
        optimizer: of the first replica's parameters, where workers make the updates; else None.
        serving: the server of this rank, whose own errors are raised here.
        scale: of the loss, if there is one.

    Attributes:
        num_pushes: steps that are over.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        replicas: Replicas,
        keys: Sequence[Key],
        optimizer: torch.optim.Optimizer | None,
        serving: Serving | None,
        scale: LossScale | None,
    ) -> None:
        self.num_pushes = 0
        self.scale = scale
        self.optimizer = optimizer
        self._ports, self._replicas, self._serving = ports, replicas, serving
        self._names = [[keys[index].name for index in port.key_indices] for port in ports]

    @property
    def version(self) -> int:
        """How many updates the weights have had, of every key."""
        return min(port.version for port in self._ports)

    def pull(self, wanted: int) -> None:
        """Waits for a version, at least, and takes it."""
        with self._own_error_first():
            for port in self._ports:
                port.ask(Header(Kind.PULL, max(0, wanted), port.version))
            versions = [port.begin_answer().version for port in self._ports]
            updates: dict[int, dict[str, Tensor]] = {}
            for port, version, names in zip(self._ports, versions, self._names, strict=True):
                for place, buffer in enumerate(port.end_answer()):
                    values = zip(names, port.packing.views(buffer), strict=True)
                    updates.setdefault(port.version + place, {}).update(values)
                port.version = version
        for _, values_by_name in sorted(updates.items()):
            if self.optimizer is None:
                self._replicas.write(values_by_name)
            else:
                self._replicas.step(self.optimizer, values_by_name)

    def push(self) -> None:
        """Sends the gradients, and clears them."""
        self._replicas.check_unchanged()
        gradients = self._replicas.gradients()
        factor = self._factor_of(gradients)
        with self._own_error_first():
            for port, names in zip(self._ports, self._names, strict=True):
                header = Header.push(port.version, factor)
                port.push(header, [gradients[name] for name in names])
        self._replicas.clear_gradients()
        self.num_pushes += 1

    def _factor_of(self, gradients: Mapping[str, Tensor | None]) -> float:
        """What takes the loss scale away again; 0 where a gradient is not finite."""
        if self.scale is None:
            return 1.0
        factor = 1 / self.scale.value
        present = [gradient for gradient in gradients.values() if gradient is not None]
        has_overflow = not all(bool(gradient.isfinite().all()) for gradient in present)
        self.scale.update(has_overflow)
        return 0.0 if has_overflow else factor

    def states(self) -> list[Tensor]:
        """Of the servers' optimizers, packed."""
        with self._own_error_first():
            for port in self._ports:
                port.ask(Header(Kind.STATE))
            for port in self._ports:
                port.begin_answer()
            return [port.end_answer()[0] for port in self._ports]

    def close(self) -> None:
        """Says so to the servers; waits for the one of this rank, which waits for all workers."""
        with self._own_error_first():
            for port in self._ports:
                port.close()
            if self._serving is not None:
                self._serving.join()

    @contextmanager
    def _own_error_first(self) -> Iterator[None]:
        """The cause, where this rank's server has ended the group."""
        try:
            yield
        except RingcommError:
            if self._serving is not None:
                self._serving.raise_cause()
            raise
