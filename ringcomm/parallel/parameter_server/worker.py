"""A worker: its gradients to all servers, and new weights from them into its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import RingcommError
from ringcomm.loss_scale import LossScale
from ringcomm.parallel.parameter_server.keys import Packing, trainable
from ringcomm.parallel.parameter_server.messages import Header, Kind, Tag, receive, send
from ringcomm.parallel.parameter_server.server import Serving

__all__ = ["Port", "Worker"]


class Port:
    """A worker's connection to one server, which has the keys of these names.

    Nothing is sent if `serving` is that server, in this process; values are rounded as if it were.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        server: int,
        names: list[str],
        packing: Packing,
        serving: Serving | None,
    ) -> None:
        self.names, self.packing, self.version = names, packing, 0  # of the last pull
        self._group, self._server, self._serving = group, server, serving
        self._pushed: Tensor | None = None
        self._pushing: Any = None
        self._received: Tensor | None = None  # reused

    def ask(self, header: Header) -> None:
        """Sends a request without a gradient; does not wait."""
        if self._serving is not None:
            self._serving.submit(self._server, header)
        else:
            send(self._group, self._server, Tag.REQUEST, header)

    def push(self, header: Header, gradient: Sequence[Tensor | None]) -> None:
        """Sends a gradient by key, None for zeros; it may be overwritten afterwards."""
        if self._serving is not None:
            self._serving.submit(self._server, header, self.packing.pack(gradient))
            return
        self.flush()
        self._pushed = self.packing.pack(gradient, self._pushed)
        send(self._group, self._server, Tag.REQUEST, header)
        self._pushing = send(self._group, self._server, Tag.GRADIENT, self._pushed)

    def flush(self) -> None:
        """Waits until the last push has been sent."""
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            pushing.wait()

    def answer(self) -> tuple[int, Tensor | None]:
        """Waits for a version, and the message sent with it, if any; valid until the next call."""
        if self._serving is not None:
            header, message = self._serving.next_answer()
            return int(header.version), message
        words = torch.empty(4, dtype=torch.float64)
        header = Header.decode(receive(self._group, self._server, Tag.ANSWER, words))
        version, num_bytes = int(header.version), header.num_bytes
        if not num_bytes:
            return version, None
        if self._received is None or self._received.numel() != num_bytes:
            self._received = torch.empty(num_bytes, dtype=torch.uint8)
        return version, receive(self._group, self._server, Tag.ANSWERED, self._received)

    def close(self) -> None:
        """Sends the last request, and waits until everything has been sent."""
        if self._serving is not None:
            self._serving.submit(self._server, Header(Kind.CLOSE))
            return
        self.flush()
        send(self._group, self._server, Tag.REQUEST, Header(Kind.CLOSE)).wait()


class Worker:
    """The working part of a rank: its ports, and the server in this process, if there is one."""

    def __init__(
        self,
        model: nn.Module,
        ports: Sequence[Port],
        serving: Serving | None,
        scale: LossScale | None,
    ) -> None:
        self.num_pushes = 0
        self.scale = scale
        self._model, self._params = model, trainable(model)
        self._ports, self._serving = ports, serving

    @property
    def version(self) -> int:
        """The number of updates that the weights of every key have had."""
        return min(port.version for port in self._ports)

    def pull(self, wanted: int) -> None:
        """Waits for a version, at least, and copies it into the model."""
        with self._own_error_first():
            for port in self._ports:
                port.ask(Header(Kind.PULL, max(0, wanted), port.version))
            answers = [port.answer() for port in self._ports]
        with torch.no_grad():
            for port, (version, message) in zip(self._ports, answers, strict=True):
                if message is not None:
                    values = port.packing.views(message)
                    for name, value in zip(port.names, values, strict=True):
                        self._params[name].copy_(value)
                port.version = version

    def push(self) -> None:
        """Sends the gradients, and clears them."""
        self._check_unchanged()
        gradients = {name: param.grad for name, param in self._params.items()}
        for name, gradient in gradients.items():
            if gradient is not None and gradient.is_sparse:
                raise ValueError(
                    f"the gradient of {name} is sparse, and a parameter server sends dense"
                    " ones: give the embedding sparse=False"
                )
        factor = self._factor_of(gradients)
        with self._own_error_first():
            for port in self._ports:
                header = Header(Kind.PUSH, factor, port.version)
                port.push(header, [gradients[name] for name in port.names])
        for param in self._params.values():
            param.grad = None
        self.num_pushes += 1

    def _check_unchanged(self) -> None:
        found = trainable(self._model)
        for name in self._params.keys() | found.keys():
            if found.get(name) is not self._params.get(name):
                raise ValueError(
                    f"{name} was added, replaced, frozen or thawed after the ParameterServer was"
                    " made: close() it, and make another one of the changed model"
                )

    def _factor_of(self, gradients: Mapping[str, Tensor | None]) -> float:
        """The inverse of the loss scale; 0 if a gradient is not finite."""
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
            messages = [port.answer()[1] for port in self._ports]
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """Tells the servers; waits for the one of this rank, which waits for all workers."""
        with self._own_error_first():
            for port in self._ports:
                port.close()
            if self._serving is not None:
                self._serving.join()

    @contextmanager
    def _own_error_first(self) -> Iterator[None]:
        """Raises the cause if this rank's server has ended the group."""
        try:
            yield
        except RingcommError:
            if self._serving is not None:
                self._serving.raise_cause()
            raise
