"""ZeroRedundancyOptimizer over ringcomm: the loss curve of one process, with sharded states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, make_model, single_process, train, weights_of
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def make(bucket_cap_mb: float = 0.001, **options: Any) -> tuple[Any, Any]:
    """Several buckets, and the optimizer's states in shards."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_cap_mb)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9, **options
    )
    return model, optimizer


def num_momenta(optimizer: Any) -> int:
    """Momentum buffers that this rank holds."""
    return sum("momentum_buffer" in state for state in optimizer.optim.state.values())


def run_zero(rank: int, options: dict[str, Any]) -> tuple[Run, int]:
    model, optimizer = make(**options)
    losses = train(model, rank, WORLD, optimizer)
    return Run(losses, weights_of(model)), num_momenta(optimizer)


@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}], ids=str)
def test_zero(options: dict[str, Any]) -> None:
    results = run_ranks(WORLD, run_zero, options)
    assert_same_run([run for run, _ in results], single_process())
    assert sum(count for _, count in results) == len(list(make_model().parameters()))


def run_overlapped(rank: int, is_interleaved: bool) -> Run:
    """Each bucket's update runs in the backward pass, when its gradients are reduced."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    # The interleaved hook broadcasts from the callback of a bucket's all_reduce. With several
    # buckets the order of the calls would depend on each rank's timing.
    model, optimizer = make(25.0 if is_interleaved else 0.001, overlap_with_ddp=True)
    name = "hook_with_zero_step" + ("_interleaved" if is_interleaved else "")
    wrap = getattr(ddp_zero_hook, name)
    model.register_comm_hook(None, wrap(allreduce_hook, model, optimizer))
    # The first two steps build DDP's buckets and the optimizer, and update nothing.
    train(model, rank, WORLD, optimizer, steps=[9, 9])
    losses = train(model, rank, WORLD, optimizer)
    return Run(losses, weights_of(model))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_overlap_with_ddp(is_interleaved: bool) -> None:
    assert_same_run(run_ranks(WORLD, run_overlapped, is_interleaved), single_process())


def run_resumed(rank: int, to: int) -> Run:
    """The states gathered on one rank, given to a new optimizer on all."""
    model, optimizer = make()
    losses = train(model, rank, WORLD, optimizer, steps=range(3))
    optimizer.consolidate_state_dict(to=to)
    states: list[Any] = [optimizer.state_dict() if rank == to else None]
    dist.broadcast_object_list(states, to)
    resumed, other = make()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(states[0])
    assert num_momenta(other) > 0
    losses += train(resumed, rank, WORLD, other, steps=range(3, 5))
    return Run(losses, weights_of(resumed))


@pytest.mark.parametrize("to", [0, 1])
def test_resumes_from_a_consolidated_state(to: int) -> None:
    assert_same_run(run_ranks(WORLD, run_resumed, to), single_process())
