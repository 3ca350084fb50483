"""A verified operation: what it needs, how it is called, how its result is checked; all_reduce.

Bytes mean, as in nccl-tests, the larger of input and output on one rank. Bus bandwidth is bytes
over time, multiplied by the share of them that has to cross between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.measure.ranks import Team
from ringcomm.measure.timing import Contender

Index = torch.Tensor
RINGCOMM = "ringcomm"
# Elements that are filled or compared at a time: the checks need little memory beside the buffers.
PIECE_ELEMS = 1 << 20
# In outputs before a call: no result is negative.
UNTOUCHED = -1


@dataclass(frozen=True)
class Place:
    """Where a buffer lives: the rank, how many there are, and the tensors' kind.

    ``num_elems`` is a multiple of world_size where the collective divides it.
    """

    rank: int
    world_size: int
    num_elems: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Buffers:
    """A rank's tensors, used by all backends in turn; in-place collectives have one twice."""

    place: Place
    input: torch.Tensor
    output: torch.Tensor

    @cached_property
    def input_array(self) -> Any:
        """The input as numpy's, for libraries that know no tensors."""
        return self.input.numpy()

    @cached_property
    def output_array(self) -> Any:
        """The same of the output."""
        return self.output.numpy()

    def clear(self) -> None:
        """Zeros, so that sums which are made again and again in place neither grow nor end."""
        self.input.zero_()
        self.output.zero_()


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        setup: makes a rank's buffers.
        call: runs the collective once; blocks until this rank's part is done (on a GPU: enqueued).
        verify: runs it once, as its first argument, on known integers; returns how many elements
            of this rank are wrong.
        own_calls: the same as `call` by backend, for those that have a better way or, as a
            communicator of mpi4py, another one.
        bus_factor: bus bandwidth over algorithm bandwidth, by world_size.
        is_divided: whether each rank owns a part of the larger buffer.
        has_data: without, there is one point of 0 bytes.
    """

    setup: Callable[[Place], Buffers]
    call: Callable[[Buffers, dist.ProcessGroup], None]
    verify: Callable[[Callable[[], object], Buffers, Team], int]
    bus_factor: Callable[[int], float]
    own_calls: Mapping[str, Callable[[Buffers, Any], None]] = field(default_factory=dict)
    is_divided: bool = False
    has_data: bool = True

    def bound(self, buffers: Buffers, group: Any) -> Callable[[], None]:
        """The call, ready to be made over a c10d group or a communicator of mpi4py.

        Raises:
            ValueError: the group is no c10d group, and the operation has no call for its backend.
        """
        if isinstance(group, dist.ProcessGroup):
            return partial(self.own_calls.get(dist.get_backend(group), self.call), buffers, group)
        if group.backend not in self.own_calls:
            raise ValueError(f"this operation is not measured over {group.backend}")
        return partial(self.own_calls[group.backend], buffers, group)

    def num_elems(self, num_bytes: int, dtype: torch.dtype, world_size: int) -> int:
        """Elements of the larger buffer for about ``num_bytes``: at least 1, or 1 per rank."""
        if not self.has_data:
            return 0
        unit = world_size if self.is_divided else 1
        return max(unit, num_bytes // dtype.itemsize // unit * unit)


def _modulus(place: Place) -> int:
    """Values below it are exact in the dtype, and so is their sum over the ranks."""
    if place.dtype.is_floating_point:
        largest = round(2 / torch.finfo(place.dtype).eps)
    else:
        largest = torch.iinfo(place.dtype).max
    return max(2, min(largest, 1 << 22) // place.world_size)


def value_at(rank: int | Index, index: Index, place: Place) -> torch.Tensor:
    """The integer at ``index`` of ``rank``'s data: neighbours differ, and so do ranks."""
    scattered = (index * 40503 + 12289) * (2 * rank + 3) + index // 64
    return scattered % 1048573 % _modulus(place)


def total_at(index: Index, place: Place) -> torch.Tensor:
    """The sum over the ranks of ``value_at``."""
    values = [value_at(rank, index, place) for rank in range(place.world_size)]
    return torch.stack(values).sum(0)


def _indices(buffer: torch.Tensor) -> Iterator[tuple[slice, Index]]:
    """Pieces of a buffer, with their positions, which are where it is."""
    for begin in range(0, buffer.numel(), PIECE_ELEMS):
        end = min(begin + PIECE_ELEMS, buffer.numel())
        yield slice(begin, end), torch.arange(begin, end, device=buffer.device)


def verify_elements(expected: Callable[[Index, Place], torch.Tensor]) -> Callable[..., int]:
    """A verify for data: ``expected`` gives the output's integers at the given positions."""

    def verify(call: Callable[[], object], buffers: Buffers, team: Team) -> int:
        place = buffers.place
        buffers.output.fill_(UNTOUCHED)
        for piece, index in _indices(buffers.input):
            buffers.input[piece] = value_at(place.rank, index, place).to(buffers.input)
        team.share(None)  # a call that does not wait for the others would read stale inputs
        call()
        return sum(
            int((buffers.output[piece] != expected(index, place).to(place.dtype)).sum())
            for piece, index in _indices(buffers.output)
        )

    return verify


def in_place(place: Place) -> Buffers:
    """One buffer that is input and output."""
    buffer = torch.zeros(place.num_elems, dtype=place.dtype, device=place.device)
    return Buffers(place, buffer, buffer)


def call_all_reduce(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Sums the output over the ranks, in place."""
    dist.all_reduce(buffers.output, group=group)


ALL_REDUCE = Operation(
    setup=in_place,
    call=call_all_reduce,
    verify=verify_elements(total_at),
    bus_factor=lambda world_size: 2 * (world_size - 1) / world_size,
)


def make_contender(operation: Operation, buffers: Buffers, group: Any) -> Contender:
    """One operation over one group; on a GPU a call includes waiting for the device."""
    on_cpu = operation.bound(buffers, group)
    device = buffers.place.device

    def on_device() -> None:
        on_cpu()
        torch.get_device_module(device).synchronize(device)

    call = on_cpu if device.type == "cpu" else on_device
    align = partial(dist.barrier, group) if isinstance(group, dist.ProcessGroup) else group.barrier
    return Contender(call, align)


def num_calls(group: Any) -> dict[tuple[str, str], int]:
    """Calls of a ringcomm group by collective and algorithm; nothing of another backend."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_backend(group) != RINGCOMM:
        return {}
    return {key: entry["num_calls"] for key, entry in ringcomm.stats(group).items()}


def algorithms_used(
    before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]
) -> list[str]:
    """Names of ringcomm's algorithms that ran between two counts; barriers align every block."""
    used = {key for key, count in after.items() if count > before.get(key, 0)}
    apart_from_barriers = {key for key in used if key[0] != "barrier"}
    return sorted({algorithm for _, algorithm in apart_from_barriers or used})
