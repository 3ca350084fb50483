"""ParameterServer out of step: the staleness bound, no bound, and the staleness histogram."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ps_runs import groups_of, make_of, make_server, workers_of
from ranks import in_ranks, run_ranks
from torch import Tensor
from zero_models import Net, batch, loss_of, weights

from ringcomm.parallel import get_state_dict

# ---- the bound


def log_steps(
    rank: int, world_size: int, layout: str, staleness: int, num_steps: int
) -> list[tuple[float, float]]:
    """When each step began, and when its push did, by a clock that all processes share."""
    workers = workers_of(layout, world_size)
    model = Net()
    log = []
    with make_server(model, layout, staleness=staleness) as server:
        if rank not in workers:
            server.serve()
            return []
        for step in range(num_steps):
            server.pull()
            begun = time.monotonic()
            assert server.version >= step - staleness
            loss_of(model, *batch(step, rank, world_size)).backward()
            time.sleep(0.02 if rank == workers[-1] else 0.002)
            log.append((begun, time.monotonic()))
            server.push()
        server.pull(fresh=True)
        assert server.version == num_steps
    assert max(server.staleness_histogram, default=0) <= staleness
    return log


@pytest.mark.parametrize(
    ("world_size", "layout", "staleness"),
    [(2, "all", 0), (3, "dedicated", 2)],
)
def test_a_fast_worker_is_ahead_by_the_bound(world_size: int, layout: str, staleness: int) -> None:
    """Never by more; and by so much at some time, since it is ten times as fast."""
    logs = [
        log for log in run_ranks(world_size, log_steps, world_size, layout, staleness, 12) if log
    ]
    ahead = (
        step - sum(pushed <= begun for _, pushed in others)
        for mine in logs
        for step, (begun, _) in enumerate(mine)
        for others in logs
    )
    assert max(ahead) == staleness


# ---- without a bound


# Pulls (<) and pushes (>) of ranks; some pull twice, or push twice at the same weights.
EVENTS = "<0>0<1<2>2>1>1<1<1>1<0>0>2<2>2>0<0<2>0>2<1>1<0<1<2"
SCHEDULE = [(kind, int(rank)) for kind, rank in zip(EVENTS[::2], EVENTS[1::2], strict=True)]


def recurrence(num_workers: int) -> tuple[dict[str, Tensor], dict[int, int]]:
    """w <- w - lr g_k(w as worker k pulled it), one push after the other, in one process."""
    model = Net()
    optimizer = make_of("momentum")(groups_of(model))
    pulled = {worker: (0, weights(model)) for worker in range(num_workers)}
    num_pushes: Counter[int] = Counter()
    ages: Counter[int] = Counter()
    for kind, worker in SCHEDULE:
        if kind == "<":
            pulled[worker] = num_pushes.total(), weights(model)
            continue
        version, values = pulled[worker]
        other = Net()
        other.load_state_dict(values)
        loss_of(other, *batch(num_pushes[worker], worker, num_workers)).backward()
        for param, source in zip(model.parameters(), other.parameters(), strict=True):
            param.grad = source.grad
        optimizer.step()
        ages[num_pushes.total() - version] += 1
        num_pushes[worker] += 1
    return weights(model), dict(ages)


def in_order(rank: int) -> tuple[dict[str, Tensor], dict[int, int]]:
    """Pulls and pushes one after the other; get_state_dict() waits until a push is served."""
    model = Net()
    num_pushes = 0
    with make_server(model, "all", "momentum", staleness=None) as server:
        for kind, worker in SCHEDULE:
            if worker == rank and kind == "<":
                server.pull()
            elif worker == rank:
                loss_of(model, *batch(num_pushes, rank, 3)).backward()
                server.push()
                num_pushes += 1
                get_state_dict(model, server)
            dist.barrier()
    return weights(model), dict(server.staleness_histogram)


def test_each_push_is_an_update() -> None:
    """The weights of a recurrence in one process, to the bit, and its histogram."""
    expected, histogram = recurrence(3)
    results = run_ranks(3, in_order)
    for found, ages in results:
        assert ages in ({}, histogram)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    assert any(ages for _, ages in results)


@in_ranks(3)
def test_without_a_bound_nobody_waits(rank: int) -> None:
    """Rank 2 stops until rank 1 is through: it holds nobody up."""
    model: Any = Net()
    with make_server(model, "dedicated", staleness=None) as server:
        if rank == 0:
            server.serve()
            ages = server.staleness_histogram
            assert ages.total() == 10
            assert max(ages) < 10
            return
        if rank == 2:
            dist.recv(torch.zeros(1), 1)
        for step in range(5):
            server.pull()
            loss_of(model, *batch(step, rank - 1, 2)).backward()
            server.push()
        server.pull()
        assert server.version == 5 * rank
        if rank == 1:
            dist.send(torch.zeros(1), 2)
