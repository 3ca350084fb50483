"""ParameterServer out of step: the staleness bound, no bound, and the staleness histogram."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ps_runs import HEADER_BYTES, STEPS, groups_of, make_of, make_server, sent_bytes, workers_of
from ranks import run_ranks
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
    sleeps = random.Random(rank)
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
            # The last worker takes ten times as long.
            time.sleep(sleeps.uniform(0, 0.004) * (10 if rank == workers[-1] else 1))
            log.append((begun, time.monotonic()))
            server.push()
        server.pull(fresh=True)
        assert server.version == num_steps
    assert max(server.staleness_histogram, default=0) <= staleness
    return log


def steps_ahead(log: list[list[tuple[float, float]]]) -> int:
    """The most by which a step that begins is ahead of the slowest worker's step under way."""
    most = 0
    for mine in log:
        for step, (begun, _) in enumerate(mine):
            for others in log:
                num_pushed = sum(pushed <= begun for _, pushed in others)
                most = max(most, step - num_pushed)
    return most


@pytest.mark.parametrize(
    ("world_size", "layout", "staleness"),
    [(2, "all", 0), (3, "dedicated", 2)],
)
def test_a_fast_worker_is_ahead_by_the_bound(world_size: int, layout: str, staleness: int) -> None:
    """Never by more; and by so much at some time, since it is ten times as fast."""
    logs = run_ranks(world_size, log_steps, world_size, layout, staleness, 12)
    assert steps_ahead([log for log in logs if log]) == staleness


# ---- without a bound


def random_schedule(workers: list[int], num_pushes: int, seed: int) -> list[tuple[str, int]]:
    """Workers in any order; some pull twice, or push twice at the same weights."""
    draw = random.Random(seed)
    events = []
    for _ in range(num_pushes):
        worker = draw.choice(workers)
        events += [("pull", worker)] * draw.choice([0, 1, 1, 1, 2])
        events += [("push", worker)]
    return events + [("pull", worker) for worker in workers]


def recurrence(
    schedule: list[tuple[str, int]], workers: list[int]
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """w <- w - lr g_k(w as worker k pulled it), one push after the other, in one process."""
    model = Net()
    optimizer = make_of("momentum")(groups_of(model))
    pulled = {worker: (0, weights(model)) for worker in workers}
    num_pushes = dict.fromkeys(workers, 0)
    version = 0
    histogram: dict[int, int] = {}
    for kind, worker in schedule:
        if kind == "pull":
            pulled[worker] = version, weights(model)
            continue
        at, values = pulled[worker]
        other = Net()
        other.load_state_dict(values)
        rows = batch(num_pushes[worker], workers.index(worker), len(workers))
        loss_of(other, *rows).backward()
        for param, source in zip(model.parameters(), other.parameters(), strict=True):
            param.grad = source.grad
        optimizer.step()
        num_pushes[worker] += 1
        histogram[version - at] = histogram.get(version - at, 0) + 1
        version += 1
    return weights(model), histogram


def in_order(
    rank: int, world_size: int, layout: str, schedule: list[tuple[str, int]]
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """Pulls and pushes one after the other; get_state_dict() waits until a push is served."""
    model = Net()
    num_pushes = 0
    with make_server(model, layout, "momentum", staleness=None) as server:
        for kind, worker in schedule:
            if worker == rank and kind == "pull":
                server.pull()
            elif worker == rank:
                loss_of(model, *batch(num_pushes, rank, world_size)).backward()
                server.push()
                num_pushes += 1
                get_state_dict(model, server)
            dist.barrier()
    return weights(model), dict(server.staleness_histogram)


def test_each_push_is_an_update() -> None:
    """The weights of a recurrence in one process, to the bit, and its histogram."""
    schedule = random_schedule([0, 1, 2], 20, seed=3)
    expected, histogram = recurrence(schedule, [0, 1, 2])
    results = run_ranks(3, in_order, 3, "all", schedule)
    for found, ages in results:
        assert ages in ({}, histogram)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    assert any(ages for _, ages in results)


def train_freely(rank: int, world_size: int, layout: str) -> Any:
    """The last worker stops until all others are through: it holds nobody up."""
    workers = workers_of(layout, world_size)
    model = Net()
    with make_server(model, layout, staleness=None) as server:
        if rank not in workers:
            server.serve()
            return dict(server.staleness_histogram)
        if rank == workers[-1]:
            for other in workers[:-1]:
                dist.recv(torch.zeros(1), other)
        for step in range(5):
            server.pull()
            loss_of(model, *batch(step, workers.index(rank), len(workers))).backward()
            server.push()
        server.pull()
        assert 5 <= server.version <= 5 * len(workers)
        if rank == workers[-1]:
            assert server.version == 5 * len(workers)
        else:
            dist.send(torch.zeros(1), workers[-1])
    return dict(server.staleness_histogram)


def test_without_a_bound_nobody_waits() -> None:
    for found in run_ranks(3, train_freely, 3, "dedicated"):
        assert sum(found.values()) in (0, 10)
        assert all(0 <= age < 10 for age in found)


# ---- bytes


def send_free(rank: int) -> int:
    """Two workers without a bound."""
    model = Net()
    before = sent_bytes()
    with make_server(model, "dedicated", staleness=None) as server:
        if rank == 0:
            server.serve()
        else:
            for step in range(STEPS):
                loss_of(model, *batch(step, rank - 1, 2)).backward()
                server.push()
                server.pull()
    return sent_bytes() - before


def test_without_a_bound() -> None:
    """Each pull follows a push of its own, and so brings something."""
    phi = 4 * sum(param.numel() for param in Net().parameters())
    server, *workers = run_ranks(3, send_free)
    assert workers == [STEPS * (phi + 2 * HEADER_BYTES) + HEADER_BYTES] * 2
    assert server == 2 * STEPS * (phi + HEADER_BYTES)
