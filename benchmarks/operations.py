"""The collectives that are compared, all_reduce of `ringcomm.measure` among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from groups import MPI, Communicator

import ringcomm
from ringcomm.measure.operations import (
    ALL_REDUCE,
    UNTOUCHED,
    Buffers,
    Index,
    Operation,
    Place,
    in_place,
    total_at,
    value_at,
    verify_elements,
)
from ringcomm.measure.ranks import Team
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

# How far apart the ranks enter a barrier that is verified.
BARRIER_STAGGER_S = 0.005


def _verify_barrier(call: Callable[[], object], buffers: Buffers, team: Team) -> int:
    """1 on a rank that left before the last one came, which comes milliseconds late."""
    team.share(None)
    time.sleep(BARRIER_STAGGER_S * (team.world_size - team.rank))
    entered = time.monotonic_ns()
    call()
    left = time.monotonic_ns()
    return int(left < max(team.share(entered)))


def _in_place_shared(place: Place) -> Buffers:
    buffer = ringcomm.empty_shared(place.num_elems, dtype=place.dtype, device=place.device).zero_()
    return Buffers(place, buffer, buffer)


def _apart(*, whole_input: bool, whole_output: bool) -> Callable[[Place], Buffers]:
    """Two buffers, each of num_elems or of a rank's part of them."""

    def setup(place: Place) -> Buffers:
        part = place.num_elems // place.world_size
        input_, output = (
            torch.zeros(place.num_elems if whole else part, dtype=place.dtype, device=place.device)
            for whole in (whole_input, whole_output)
        )
        return Buffers(place, input_, output)

    return setup


def _call_all_reduce_mpi(buffers: Buffers, communicator: Communicator) -> None:
    communicator.all_reduce(communicator.in_place, buffers.output_array)


def _call_all_reduce_apart(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """As users of torch.distributed have to do it."""
    buffers.output.copy_(buffers.input)
    dist.all_reduce(buffers.output, group=group)


def _call_all_reduce_apart_ringcomm(buffers: Buffers, group: dist.ProcessGroup) -> None:
    ringcomm.ops.all_reduce(buffers.input, group=group, out=buffers.output)


def _call_all_reduce_apart_mpi(buffers: Buffers, communicator: Communicator) -> None:
    communicator.all_reduce(buffers.input_array, buffers.output_array)


def _call_reduce_scatter(buffers: Buffers, group: dist.ProcessGroup) -> None:
    reduce_scatter_single(buffers.output, buffers.input, group=group)


def _call_all_gather(buffers: Buffers, group: dist.ProcessGroup) -> None:
    all_gather_single(buffers.output, buffers.input, group=group)


def _call_broadcast(buffers: Buffers, group: dist.ProcessGroup) -> None:
    dist.broadcast(buffers.output, src=0, group=group)


def _call_all_to_all(buffers: Buffers, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(buffers.output, buffers.input, group=group)


def _call_barrier(buffers: Buffers, group: dist.ProcessGroup) -> None:
    dist.barrier(group=group)


def _call_sendrecv(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Each rank sends to the next and receives from the one before."""
    rank, world_size = buffers.place.rank, buffers.place.world_size
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    if buffers.place.device.type == "cuda":  # NCCL wants the two in one group of calls
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
    """Rank 0 sends to rank 1, which sends it back; the others look on."""
    rank = buffers.place.rank
    if rank == 0:
        dist.send(buffers.input, 1, group=group)
        dist.recv(buffers.output, 1, group=group)
    elif rank == 1:
        dist.recv(buffers.output, 0, group=group)
        dist.send(buffers.output, 0, group=group)


def _expect_part_of_total(index: Index, place: Place) -> torch.Tensor:
    return total_at(index + place.rank * (place.num_elems // place.world_size), place)


def _expect_all(index: Index, place: Place) -> torch.Tensor:
    part = place.num_elems // place.world_size
    return value_at(index // part, index % part, place)


def _expect_first(index: Index, place: Place) -> torch.Tensor:
    return value_at(0, index, place)


def _expect_transposed(index: Index, place: Place) -> torch.Tensor:
    part = place.num_elems // place.world_size
    return value_at(index // part, index % part + place.rank * part, place)


def _expect_round_trip(index: Index, place: Place) -> torch.Tensor:
    return value_at(0, index, place) if place.rank < 2 else torch.full_like(index, UNTOUCHED)


def _expect_previous(index: Index, place: Place) -> torch.Tensor:
    return value_at((place.rank - 1) % place.world_size, index, place)


def _one(world_size: int) -> float:
    return 1.0


def _twice(world_size: int) -> float:
    return 2.0


def _all_but_one(world_size: int) -> float:
    return (world_size - 1) / world_size


OPERATIONS: dict[str, Operation] = {
    "all_reduce": replace(ALL_REDUCE, own_calls={MPI: _call_all_reduce_mpi}),
    "all_reduce_apart": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_all_reduce_apart,
        verify=verify_elements(total_at),
        bus_factor=ALL_REDUCE.bus_factor,
        own_calls={
            MPI: _call_all_reduce_apart_mpi,
            "ringcomm": _call_all_reduce_apart_ringcomm,
        },
    ),
    "all_reduce_shared": replace(
        ALL_REDUCE, setup=_in_place_shared, own_calls={MPI: _call_all_reduce_mpi}
    ),
    "reduce_scatter": Operation(
        setup=_apart(whole_input=True, whole_output=False),
        call=_call_reduce_scatter,
        verify=verify_elements(_expect_part_of_total),
        bus_factor=_all_but_one,
        is_divided=True,
    ),
    "all_gather": Operation(
        setup=_apart(whole_input=False, whole_output=True),
        call=_call_all_gather,
        verify=verify_elements(_expect_all),
        bus_factor=_all_but_one,
        is_divided=True,
    ),
    "broadcast": Operation(
        setup=in_place,
        call=_call_broadcast,
        verify=verify_elements(_expect_first),
        bus_factor=_one,
    ),
    "all_to_all": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_all_to_all,
        verify=verify_elements(_expect_transposed),
        bus_factor=_all_but_one,
        is_divided=True,
    ),
    "round_trip": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_round_trip,
        verify=verify_elements(_expect_round_trip),
        bus_factor=_twice,
    ),
    "sendrecv": Operation(
        setup=_apart(whole_input=True, whole_output=True),
        call=_call_sendrecv,
        verify=verify_elements(_expect_previous),
        bus_factor=_one,
    ),
    "barrier": Operation(
        setup=in_place,
        call=_call_barrier,
        verify=_verify_barrier,
        bus_factor=_one,
        has_data=False,
    ),
}
