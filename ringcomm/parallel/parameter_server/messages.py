"""How ranks agree on options, and the messages between workers and servers.

A message is a header of 32 bytes, and packed tensors behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.loss_scale import LossScale
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.parameter_server.keys import Key, Packing, assign

__all__ = ["Channel", "Header", "Kind", "Options", "Request", "Tag", "meet", "owned_keys"]


class Kind(IntEnum):
    """The request of a header."""

    PULL = 1  # answered with the weights, if the worker does not have them
    PUSH = 2  # a gradient follows; no answer
    STATE = 3  # answered with the server's optimizer state
    CLOSE = 4  # the worker's last message; no answer
    ANSWER = 5


class Tag(IntEnum):
    """Of sends and receives: a rank that works and serves keeps its two roles apart by them."""

    REQUEST = 1
    GRADIENT = 2
    ANSWER = 3
    ANSWERED = 4


@dataclass(frozen=True)
class Header:
    """Four 64-bit numbers: 32 bytes.

    Attributes:
        version: of a pull, the lowest acceptable one; of an answer, the one that is sent;
            of a push, its factor as bits.
        has_version: the worker's last pulled version.
        num_bytes: of the message behind an answer; 0 if there is none.
    """

    kind: Kind
    version: int = 0
    has_version: int = 0
    num_bytes: int = 0

    @staticmethod
    def push(has_version: int, factor: float) -> Header:
        """Of a gradient to be multiplied by a factor; 0.0 for a gradient that is not finite."""
        (bits,) = struct.unpack("<q", struct.pack("<d", factor))
        return Header(Kind.PUSH, bits, has_version)

    @property
    def factor(self) -> float:
        """The factor of push()."""
        (factor,) = struct.unpack("<d", struct.pack("<q", self.version))
        return float(factor)

    def encode(self) -> Tensor:
        """int64 [4]."""
        return torch.tensor([self.kind, self.version, self.has_version, self.num_bytes])

    @staticmethod
    def decode(words: Tensor) -> Header:
        """The header that encode() has made int64 [4] of."""
        kind, version, has_version, num_bytes = words.tolist()
        return Header(Kind(kind), version, has_version, num_bytes)


@dataclass(frozen=True)
class Request:
    """A worker's request to a server.

    Attributes:
        answer: sends a header, and a message unless None, to the worker; it does not wait.
        gradient: a push's, packed.
    """

    worker: int
    header: Header
    answer: Callable[[Header, Tensor | None], None]
    gradient: Tensor | None = None


class Channel:
    """Sends and receives of one group; peers are the group's ranks. Any thread may use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, peer: int, tag: Tag, message: Tensor | Header) -> Any:
        """Returns a Work at once; the message is sent, and its tensor kept, without a wait too."""
        tensor = message.encode() if isinstance(message, Header) else message
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def start_receive(self, peer: int, tag: Tag, tensor: Tensor) -> Any:
        """Returns a Work; the tensor is filled when it is done."""
        return dist.irecv(tensor, group=self.group, group_src=peer, tag=tag)

    def receive(self, peer: int, tag: Tag, tensor: Tensor) -> Tensor:
        """Fills a tensor, waits, and returns it."""
        self.start_receive(peer, tag, tensor).wait()
        return tensor

    def receive_header(self, peer: int, tag: Tag) -> Header:
        """Waits for one."""
        return Header.decode(self.receive(peer, tag, torch.empty(4, dtype=torch.int64)))

    def abort(self) -> None:
        """Ends the group: every wait of another rank in it raises."""
        self.group.abort()


# ---- before the first message


@dataclass(frozen=True)
class Options:
    """Those of ParameterServer that are the same on all ranks; documented there."""

    servers: tuple[int, ...]
    is_dedicated: bool
    staleness: int | None
    wire_dtype: torch.dtype | None
    loss_scale: float | str | None

    def workers(self, world_size: int) -> tuple[int, ...]:
        """Their ranks."""
        ranks = range(world_size)
        return tuple(rank for rank in ranks if not (self.is_dedicated and rank in self.servers))

    @classmethod
    def checked(
        cls,
        world_size: int,
        servers: str | Sequence[int],
        dedicated: bool,
        staleness: int | None,
        wire_dtype: torch.dtype | None,
        loss_scale: float | str | None,
    ) -> Options:
        """Raises ValueError or TypeError for an argument out of range."""
        ranks = _checked_servers(servers, world_size)
        if dedicated and len(ranks) == world_size:
            raise ValueError("dedicated=True leaves no worker: give fewer servers, or more ranks")
        is_number = isinstance(staleness, int) and not isinstance(staleness, bool)
        if staleness is not None and not (is_number and staleness >= 0):
            raise ValueError(f"staleness is None or a number of steps >= 0, got {staleness!r}")
        is_dtype = isinstance(wire_dtype, torch.dtype)
        if wire_dtype is not None and not (is_dtype and wire_dtype.is_floating_point):
            raise ValueError(f"wire_dtype is a floating dtype such as bfloat16, got {wire_dtype}")
        if loss_scale is not None:
            LossScale(loss_scale)
        return cls(ranks, dedicated, staleness, wire_dtype, loss_scale)


def _checked_servers(servers: str | Sequence[int], world_size: int) -> tuple[int, ...]:
    if servers == "all":
        return tuple(range(world_size))
    is_list = not isinstance(servers, str) and all(isinstance(rank, int) for rank in servers)
    if not is_list or not servers or len(set(servers)) < len(servers):
        raise ValueError(f'servers is "all" or a list of different ranks, got {servers!r}')
    ranks = tuple(sorted(int(rank) for rank in servers))
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"servers are ranks of a group of {world_size}, got {list(ranks)}")
    return ranks


def owned_keys(keys: Sequence[Key], servers: Sequence[int]) -> dict[int, list[int]]:
    """By server with keys, their indices; the same on all ranks."""
    owned: dict[int, list[int]] = {}
    for index, place in enumerate(assign([key.num_bytes for key in keys], len(servers))):
        owned.setdefault(servers[place], []).append(index)
    return dict(sorted(owned.items()))


def meet(
    group: dist.ProcessGroup,
    model: nn.Module,
    options: Options,
    keys: Sequence[Key],
    groups: Sequence[Mapping[str, Any]],
) -> dist.ProcessGroup:
    """A new group for the messages, in which all ranks have rank 0's weights. Collective.

    Raises:
        ValueError: the ranks disagree; nothing has been changed.
    """
    own = _group_of_its_own(group)
    mine = {
        "options": options,
        "parameters": {key.name: (tuple(key.shape), str(key.dtype)) for key in keys},
        "parameter groups": [indices["params"] for indices in groups],
    }
    try:
        check_agreement(mine, own)
    except ValueError:
        dist.destroy_process_group(own)
        raise
    values = [*model.parameters(), *model.buffers()]
    packing = Packing([value.shape for value in values], [value.dtype for value in values])
    buffer = packing.pack([value.detach() for value in values])
    if buffer.numel():
        dist.broadcast(buffer, group=own, group_src=0)
    with torch.no_grad():
        for value, sent in zip(values, packing.views(buffer), strict=True):
            value.copy_(sent)
    return own


def _group_of_its_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks over ringcomm, so that messages meet no others. Collective."""
    backend: Any = group._get_backend(torch.device("cpu"))
    is_whole = group.size() == dist.get_world_size()
    return dist.new_group(
        dist.get_process_group_ranks(group),
        backend="ringcomm",
        timeout=backend.options._timeout,
        pg_options=backend.options if backend.name() == "ringcomm" else None,
        use_local_synchronization=not is_whole,
        group_desc="ringcomm parameter server",
    )
