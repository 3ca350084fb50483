"""torch's ZeroRedundancyOptimizer over ringcomm: the losses of one process, states in shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from curves import Run, assert_same_run, make_model, single_process, train, weights_of
from ranks import run_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def make() -> tuple[Any, Any]:
    """Several buckets."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    return model, optimizer


def run(rank: int) -> tuple[Run, int]:
    """Half-way the states are gathered on one rank, and given to a new optimizer on all."""
    model, optimizer = make()
    losses = train(model, rank, WORLD, optimizer, steps=range(3))
    optimizer.consolidate_state_dict(to=1)
    states: list[Any] = [optimizer.state_dict() if rank == 1 else None]
    dist.broadcast_object_list(states, 1)
    resumed, other = make()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(states[0])
    losses += train(resumed, rank, WORLD, other, steps=range(3, 5))
    num_momenta = sum("momentum_buffer" in state for state in other.optim.state.values())
    return Run(losses, weights_of(resumed)), num_momenta


def test_zero_redundancy_optimizer() -> None:
    results = run_ranks(WORLD, run)
    assert_same_run([run for run, _ in results], single_process())
    assert sum(count for _, count in results) == len(list(make_model().parameters()))
