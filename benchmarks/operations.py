"""The collectives that are compared: their buffers, calls and verification.

Bytes mean, as in nccl-tests, the larger of input and output on one rank. Bus bandwidth is bytes
over time, multiplied by the share of them that has to cross between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from groups import MPI, Communicator

import ringcomm
from ringcomm.measure.ranks import Team
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

Index = torch.Tensor
RINGCOMM = "ringcomm"
# The kind of records of collectives on devices.
DEVICE_KIND = "collective_on_device"
# Elements that are filled or compared at a time: the checks need little memory beside the buffers.
PIECE_ELEMS = 1 << 20
# In outputs before a call: no result is negative.
UNTOUCHED = -1


@dataclass(frozen=True)
class Place:
    """The place of a buffer: rank, world size, device and dtype.

    ``num_elems`` is a multiple of world_size where the collective divides it. ``group`` is
    ringcomm's, whose ranks share memory of GPUs; None is the default group.
    """

    rank: int
    world_size: int
    num_elems: int
    dtype: torch.dtype
    device: torch.device
    group: Any = None


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
        """Fills with zeros, so that repeated in-place sums do not grow."""
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
        memory_factor: bytes that the ranks together must read and write, over those of the larger
            buffer of a rank, by world_size.
        is_divided: whether each rank owns a part of the larger buffer.
        has_data: without, there is one point of 0 bytes.
    """

    setup: Callable[[Place], Buffers]
    call: Callable[[Buffers, dist.ProcessGroup], object]
    verify: Callable[[Callable[[], object], Buffers, Team], int]
    bus_factor: Callable[[int], float]
    memory_factor: Callable[[int], float]
    own_calls: Mapping[str, Callable[[Buffers, Any], object]] = field(default_factory=dict)
    is_divided: bool = False
    has_data: bool = True

    def bound(self, buffers: Buffers, group: Any) -> Callable[[], object]:
        """The call, ready to be made over a c10d group or a communicator of mpi4py.

        Raises:
            ValueError: the group is no c10d group, and the operation has no call for its backend.
        """
        if isinstance(group, dist.ProcessGroup):
            return partial(self.own_calls.get(dist.get_backend(group), self.call), buffers, group)
        if group.backend not in self.own_calls:
            raise ValueError(f"this operation is not supported with {group.backend}")
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


def _zeros(place: Place, num_elems: int, is_shared: bool) -> torch.Tensor:
    where: dict[str, Any] = {"dtype": place.dtype, "device": place.device}
    if is_shared:
        return ringcomm.empty_shared(num_elems, **where, group=place.group).zero_()
    return torch.zeros(num_elems, **where)


def in_place(place: Place, *, is_shared: bool = False) -> Buffers:
    """One buffer that is input and output."""
    buffer = _zeros(place, place.num_elems, is_shared)
    return Buffers(place, buffer, buffer)


def call_all_reduce(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Sums the output over the ranks, in place."""
    dist.all_reduce(buffers.output, group=group)


def _all_but_one(world_size: int) -> float:
    return (world_size - 1) / world_size


ALL_REDUCE = Operation(
    setup=in_place,
    call=call_all_reduce,
    verify=verify_elements(total_at),
    bus_factor=lambda world_size: 2 * _all_but_one(world_size),
    memory_factor=lambda world_size: 2 * world_size,
)


# How far apart the ranks enter a barrier that is verified.
BARRIER_STAGGER_S = 0.005


def _verify_barrier(call: Callable[[], object], buffers: Buffers, team: Team) -> int:
    """Returns 1 on a rank that left the barrier before the last rank, which comes later."""
    team.share(None)
    time.sleep(BARRIER_STAGGER_S * (team.world_size - team.rank))
    entered = time.monotonic_ns()
    call()
    left = time.monotonic_ns()
    return int(left < max(team.share(entered)))


def _apart(
    *, whole_input: bool, whole_output: bool, shared_input: bool = False
) -> Callable[[Place], Buffers]:
    """Two buffers, each of num_elems or of a rank's part of them."""

    def setup(place: Place) -> Buffers:
        part = place.num_elems // place.world_size
        input_ = _zeros(place, place.num_elems if whole_input else part, shared_input)
        output = _zeros(place, place.num_elems if whole_output else part, is_shared=False)
        return Buffers(place, input_, output)

    return setup


def _call_all_reduce_mpi(buffers: Buffers, communicator: Communicator) -> None:
    communicator.all_reduce(communicator.in_place, buffers.output_array)


def _call_all_reduce_apart(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """An all_reduce out of place as torch.distributed allows it: copy, then all_reduce."""
    buffers.output.copy_(buffers.input)
    dist.all_reduce(buffers.output, group=group)


def _call_sendrecv(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Each rank sends to the next and receives from the one before."""
    rank, world_size = buffers.place.rank, buffers.place.world_size
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    if buffers.place.device.type == "cuda":  # NCCL needs both in one group call
        pair = [
            dist.P2POp(dist.isend, buffers.input, after, group),
            dist.P2POp(dist.irecv, buffers.output, before, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return
    sending = dist.isend(buffers.input, after, group=group)
    dist.recv(buffers.output, before, group=group)
    assert sending is not None
    sending.wait()


def _call_round_trip(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Rank 0 sends to rank 1, which sends it back; the other ranks do nothing."""
    rank = buffers.place.rank
    if rank == 0:
        dist.send(buffers.input, 1, group=group)
        dist.recv(buffers.output, 1, group=group)
    elif rank == 1:
        dist.recv(buffers.output, 0, group=group)
        dist.send(buffers.output, 0, group=group)


def _expect_all(index: Index, place: Place) -> torch.Tensor:
    part = place.num_elems // place.world_size
    return value_at(index // part, index % part, place)


def _expect_transposed(index: Index, place: Place) -> torch.Tensor:
    part = place.num_elems // place.world_size
    return value_at(index // part, index % part + place.rank * part, place)


REDUCE_SCATTER = Operation(
    setup=_apart(whole_input=True, whole_output=False),
    call=lambda b, group: reduce_scatter_single(b.output, b.input, group=group),
    verify=verify_elements(
        lambda i, p: total_at(i + p.rank * (p.num_elems // p.world_size), p),
    ),
    bus_factor=_all_but_one,
    memory_factor=lambda world_size: world_size + 1,
    is_divided=True,
)
ALL_GATHER = Operation(
    setup=_apart(whole_input=False, whole_output=True),
    call=lambda b, group: all_gather_single(b.output, b.input, group=group),
    verify=verify_elements(_expect_all),
    bus_factor=_all_but_one,
    memory_factor=REDUCE_SCATTER.memory_factor,
    is_divided=True,
)
OPERATIONS: dict[str, Operation] = {
    "all_reduce": replace(ALL_REDUCE, own_calls={MPI: _call_all_reduce_mpi}),
    "all_reduce_apart": replace(
        ALL_REDUCE,
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_all_reduce_apart,
        own_calls={
            MPI: lambda b, communicator: communicator.all_reduce(b.input_array, b.output_array),
            RINGCOMM: lambda b, group: ringcomm.ops.all_reduce(b.input, group=group, out=b.output),
        },
    ),
    "all_reduce_shared": replace(
        ALL_REDUCE,
        setup=partial(in_place, is_shared=True),
        own_calls={MPI: _call_all_reduce_mpi},
    ),
    # Peers read only the inputs of these, not the outputs.
    "reduce_scatter": REDUCE_SCATTER,
    "reduce_scatter_shared": replace(
        REDUCE_SCATTER, setup=_apart(whole_input=True, whole_output=False, shared_input=True)
    ),
    "all_gather": ALL_GATHER,
    "all_gather_shared": replace(
        ALL_GATHER, setup=_apart(whole_input=False, whole_output=True, shared_input=True)
    ),
    "broadcast": Operation(
        setup=in_place,
        call=lambda b, group: dist.broadcast(b.output, src=0, group=group),
        verify=verify_elements(lambda index, place: value_at(0, index, place)),
        bus_factor=lambda world_size: 1.0,
        memory_factor=lambda world_size: world_size,
    ),
    "all_to_all": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=lambda b, group: dist.all_to_all_single(b.output, b.input, group=group),
        verify=verify_elements(_expect_transposed),
        bus_factor=_all_but_one,
        memory_factor=ALL_REDUCE.memory_factor,
        is_divided=True,
    ),
    "round_trip": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_round_trip,
        verify=verify_elements(
            lambda i, p: value_at(0, i, p) if p.rank < 2 else torch.full_like(i, UNTOUCHED)
        ),
        bus_factor=lambda world_size: 2.0,
        memory_factor=lambda world_size: 4.0,
    ),
    "sendrecv": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_sendrecv,
        verify=verify_elements(lambda i, p: value_at((p.rank - 1) % p.world_size, i, p)),
        bus_factor=lambda world_size: 1.0,
        memory_factor=ALL_REDUCE.memory_factor,
    ),
    "barrier": Operation(
        setup=in_place,
        call=lambda b, group: dist.barrier(group=group),
        verify=_verify_barrier,
        bus_factor=lambda world_size: 1.0,
        memory_factor=lambda world_size: 0.0,
        has_data=False,
    ),
}
