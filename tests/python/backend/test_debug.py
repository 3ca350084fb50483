"""What one sees of ringcomm: TORCH_DISTRIBUTED_DEBUG=DETAIL, and the profiler's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, make_model, single_process, train, weights_of
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

WORLD = 2


# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL: torch wraps the group, and compares calls over a Gloo group


def init_in_detail(rank: int, folder: str) -> None:
    """The variable is read when torch is imported; this is what it would set."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=WORLD)
    wrapper: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert "Wrapper" in type(wrapper).__name__
    assert wrapper.wrapped_pg.name() == "ringcomm"


def train_in_detail(rank: int, folder: str) -> Run:
    init_in_detail(rank, folder)
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    losses = train(model, rank, WORLD)
    group = dist.new_group([1, 0])
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2] * 3
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    dist.barrier()
    return Run(losses, weights_of(model))


def test_detail_trains(tmp_path: Any) -> None:
    results = run_ranks(WORLD, train_in_detail, str(tmp_path), backend=None, fresh=True)
    assert_same_run(results, single_process())


def differ_in_detail(rank: int, folder: str) -> str:
    """torch's own check comes before ringcomm's; nothing has been exchanged, the group lives."""
    init_in_detail(rank, folder)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(2 + rank))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2] * 3
    return str(caught.value)


def test_detail_names_both_calls(tmp_path: Any) -> None:
    for text in run_ranks(WORLD, differ_in_detail, str(tmp_path), backend=None, fresh=True):
        assert "running collective: CollectiveFingerPrint" in text
        assert "TensorShape=[2]" in text
        assert "TensorShape=[3]" in text


def check_sequence_numbers(rank: int) -> None:
    """They count calls when they are made: here before the other rank has made any."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    first = backend._get_sequence_number_for_group()
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    works: list[Any] = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(20)]
    assert backend._get_sequence_number_for_group() == first + 20
    if rank == 0:
        dist.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    dist.all_reduce(torch.ones(1))
    assert backend._get_sequence_number_for_group() == first + 21


def test_sequence_numbers() -> None:
    run_ranks(WORLD, check_sequence_numbers)


# ---- profiler

Call = Callable[[int], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(4)),
    "broadcast": lambda rank: dist.broadcast(torch.ones(4), 0),
    "reduce": lambda rank: dist.reduce(torch.ones(4), 0),
    "all_gather": lambda rank: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4)),
    "_all_gather_base": lambda rank: dist.all_gather_into_tensor(torch.ones(8), torch.ones(4)),
    "reduce_scatter": lambda rank: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * WORLD),
    "_reduce_scatter_base": lambda rank: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
    "barrier": lambda rank: dist.barrier(),
    "send": lambda rank: dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(4), 0),
    "recv": lambda rank: dist.recv(torch.ones(4), 0) if rank == 1 else dist.send(torch.ones(4), 1),
    "recvAnySource": lambda rank: (
        dist.recv(torch.ones(4)) if rank == 1 else dist.send(torch.ones(4), 1)
    ),
    "gather": lambda rank: dist.gather(
        torch.ones(4), [torch.ones(4), torch.ones(4)] if rank == 0 else None
    ),
    "scatter": lambda rank: dist.scatter(
        torch.ones(4), [torch.ones(4), torch.ones(4)] if rank == 0 else None
    ),
    "all_to_all": lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
}
ONE_SIDED = {"send": 0, "recv": 1, "recvAnySource": 1}


def profiled(rank: int, name: str) -> list[str]:
    """The names of ringcomm's events of two calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            CALLS[name](rank)
    events: Any = profiler.events()
    return [event.name for event in events if event.name.startswith("ringcomm:")]


@pytest.mark.parametrize("name", CALLS)
def test_profiler(name: str) -> None:
    results = run_ranks(WORLD, profiled, name)
    for rank in [ONE_SIDED[name]] if name in ONE_SIDED else range(WORLD):
        assert results[rank] == [f"ringcomm:{name}"] * 2
