"""What a group's backend object offers beside collectives: options, splits, numbers, its end."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ringcomm import _C, Options, RingcommError

CPU = torch.device("cpu")


def backend_of(group: Any = None) -> Any:
    world: Any = dist.group.WORLD
    return (group or world)._get_backend(CPU)


def check_options(rank: int) -> None:
    group: Any = dist.new_group(
        backend="ringcomm",
        pg_options=Options(algorithm="ring", num_slots=3, deterministic="rank_order"),
        timeout=datetime.timedelta(seconds=17),
    )
    options = backend_of(group).options
    copied = copy.deepcopy(options)
    assert copied is not options
    for each in (options, copied):
        assert (each.algorithm, each.num_slots, each.is_rank_ordered) == ("ring", 3, True)
        assert each._timeout == datetime.timedelta(seconds=17)
        assert each.global_ranks_in_group == [0, 1, 2]
        assert each.backend == "ringcomm"
    # They make groups too.
    again: Any = dist.new_group(backend="ringcomm", pg_options=copied)
    assert backend_of(again).options.algorithm == "ring"
    backend_of(again).set_timeout(datetime.timedelta(seconds=5))
    assert backend_of(again).options._timeout == datetime.timedelta(seconds=5)
    for each in (group, again):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=each)
        assert (tensor == 3).all()
        dist.destroy_process_group(each)


def test_options() -> None:
    run_ranks(3, check_options)


def check_split(rank: int) -> None:
    """ProcessGroup.split_group. dist.split_group wants a group bound to an accelerator."""
    with pytest.raises(RuntimeError, match="No device associated"):
        dist.split_group(split_ranks=[[0, 2], [1]])
    world: Any = dist.group.WORLD
    assert backend_of().supports_splitting
    for turn in range(2):
        mine = [0, 2] if rank in (0, 2) else [1]
        part = world.split_group(mine, group_name=f"part{turn}{mine}", group_desc="a part")
        assert (part.size(), part.rank()) == (len(mine), mine.index(rank))
        assert isinstance(backend_of(part), _C.ProcessGroupRingcomm)
        assert backend_of(part).options.global_ranks_in_group == mine
        tensor = torch.full((4,), float(rank))
        part.allreduce([tensor]).wait()
        assert (tensor == sum(mine)).all()
        part.barrier().wait()
        part.shutdown()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (tensor == 3).all()


def test_split() -> None:
    run_ranks(3, check_split)


def check_sequence(rank: int) -> None:
    """Numbers are given when calls are made, also to those that wait for their turn."""
    backend = backend_of()
    first = backend._get_sequence_number_for_group()
    works: list[Any] = [
        dist.all_reduce(torch.ones(300_000), async_op=True),
        dist.all_reduce(torch.ones(3), async_op=True),
        dist.barrier(async_op=True),
    ]
    assert backend._get_sequence_number_for_group() == first + 3
    for work in works:
        work.wait()
    with pytest.raises(ValueError, match="band"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    assert backend._get_sequence_number_for_group() == first + 3


def test_sequence_numbers() -> None:
    run_ranks(2, check_sequence)


def check_end(rank: int) -> None:
    """abort() and shutdown() may be called again and in any order."""
    error_type = torch._C._distributed_c10d.ErrorType
    for order in (("abort", "abort", "shutdown"), ("shutdown", "abort", "shutdown")):
        group: Any = dist.new_group(backend="ringcomm")
        backend = backend_of(group)
        dist.barrier(group)
        assert backend.get_error() == error_type.SUCCESS
        for name in order:
            getattr(backend, name)()
            if name == "abort" and order[0] == "abort":
                assert backend.get_error() == error_type.COMM_ERROR
                with pytest.raises(RingcommError, match="aborted"):
                    dist.barrier(group)
        with pytest.raises(ValueError, match="has been destroyed"):
            dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group(group)


def test_end() -> None:
    run_ranks(2, check_end)


def time_out(rank: int) -> str:
    if rank == 0:
        with pytest.raises(RingcommError):
            dist.barrier()
    else:
        import time

        time.sleep(1.0)
    return str(backend_of().get_error()) if rank == 0 else ""


def test_get_error_after_a_time_out() -> None:
    assert "TIMEOUT" in run_ranks(2, time_out, fresh=True, group_timeout_s=0.3)[0]
