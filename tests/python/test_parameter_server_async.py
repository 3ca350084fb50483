"""ParameterServer out of step: bounds, delayed SGD, schedules, and what is recorded of them."""

from __future__ import annotations

import random
import time
from typing import Any

import ps_runs
import pytest
import torch
import torch.distributed as dist
from ps_oracles import delayed_sgd, random_schedule, recurrence, train_alone
from ps_runs import (
    HEADER_BYTES,
    LAYOUTS,
    STEPS,
    check_sent,
    make_of,
    make_server,
    sent_bytes,
    workers_of,
)
from ranks import run_ranks
from torch import Tensor
from zero_models import Net, batch, loss_of, weights

from ringcomm.parallel import ParameterServer


def train(rank: int, *args: Any) -> dict[str, Any]:
    """ps_runs.train on the ranks of this file, which other cases use as well."""
    return ps_runs.train(rank, *args)


# ---- the bound


def log_steps(
    rank: int, world_size: int, layout: str, staleness: int, updates_at: str, num_steps: int
) -> list[tuple[float, float]]:
    """When each step began, and when its push did, by a clock that all processes share."""
    workers = workers_of(layout, world_size)
    model = Net()
    sleeps = random.Random(rank)
    log = []
    with make_server(model, layout, staleness=staleness, updates_at=updates_at) as server:
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
    ("world_size", "layout", "staleness", "updates_at"),
    [
        (2, "all", 0, "server"),
        (2, "all", 1, "server"),
        (3, "all", 1, "worker"),
        (3, "dedicated", 2, "server"),
        (4, "one that works", 1, "server"),
    ],
)
def test_a_fast_worker_is_ahead_by_the_bound(
    world_size: int, layout: str, staleness: int, updates_at: str
) -> None:
    """Never by more; and by so much at some time, since it is ten times as fast."""
    logs = run_ranks(world_size, log_steps, world_size, layout, staleness, updates_at, 12)
    assert steps_ahead([log for log in logs if log]) == staleness


def test_the_log_can_fail() -> None:
    in_step = [[(0.0, 1.0), (2.0, 3.0)], [(0.0, 1.5), (2.0, 2.5)]]
    ahead = [[(0.0, 1.0), (1.1, 3.0)], [(0.0, 1.5), (2.0, 2.5)]]
    assert steps_ahead(in_step) == 0
    assert steps_ahead(ahead) == 1


# ---- lockstep


def train_lockstep(
    rank: int, world_size: int, layout: str, staleness: int, updates_at: str
) -> tuple[dict[str, Tensor] | None, dict[int, int]]:
    workers = workers_of(layout, world_size)
    model = Net()
    with make_server(
        model, layout, staleness=staleness, updates_at=updates_at, lockstep=True
    ) as server:
        if rank not in workers:
            server.serve()
        else:
            place = workers.index(rank)
            for step in range(8):
                server.pull()
                assert server.version == max(0, step - staleness)
                time.sleep(0.002 * random.random())
                loss_of(model, *batch(step, place, len(workers))).backward()
                server.push()
            server.pull(fresh=True)
    return (weights(model) if rank in workers else None), dict(server.staleness_histogram)


@pytest.mark.parametrize(
    ("world_size", "layout", "staleness", "updates_at"),
    [
        (2, "all", 1, "server"),
        (2, "all", 3, "worker"),
        (3, "all", 3, "server"),
        (3, "dedicated", 1, "worker"),
        (4, "one that works", 2, "server"),
    ],
)
def test_lockstep_is_delayed_sgd(
    world_size: int, layout: str, staleness: int, updates_at: str
) -> None:
    results = run_ranks(world_size, train_lockstep, world_size, layout, staleness, updates_at)
    workers = workers_of(layout, world_size)
    expected = delayed_sgd(staleness, len(workers), 8)
    for rank in workers:
        for name, value in expected.items():
            torch.testing.assert_close(results[rank][0][name], value, rtol=0, atol=1e-6)
    histogram = {age: len(workers) for age in range(staleness)}
    histogram[staleness] = len(workers) * (8 - staleness)
    for _, found in results:
        assert found in ({}, histogram)


def test_another_delay_is_another_result() -> None:
    last = "blocks.2.weight"
    assert not torch.allclose(delayed_sgd(1, 2, 8)[last], delayed_sgd(2, 2, 8)[last], atol=1e-5)


# ---- schedules


def replay(
    rank: int, world_size: int, layout: str, schedule: list[tuple[str, int]]
) -> tuple[dict[str, Tensor] | None, dict[int, int]]:
    workers = workers_of(layout, world_size)
    model = Net()
    num_pushes = 0

    def compute() -> None:
        nonlocal num_pushes
        time.sleep(0.003 * random.random())
        loss_of(model, *batch(num_pushes, workers.index(rank), len(workers))).backward()
        num_pushes += 1

    with make_server(model, layout, "momentum", staleness=None, schedule=schedule) as server:
        if rank in workers:
            server.replay(compute)
        else:
            server.serve()
    return (weights(model) if rank in workers else None), dict(server.staleness_histogram)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "all"), (2, "one that works"), (3, "dedicated"), (3, "all"), (4, "two dedicated")],
)
def test_a_schedule_is_its_recurrence(world_size: int, layout: str) -> None:
    workers = workers_of(layout, world_size)
    for seed in range(2):
        schedule = random_schedule(workers, 20, seed)
        expected, histogram = recurrence(schedule, workers)
        results = run_ranks(world_size, replay, world_size, layout, schedule)
        for rank in workers:
            for name, value in expected.items():
                assert torch.equal(results[rank][0][name], value), name
        for _, found in results:
            assert found in ({}, histogram)


def break_schedule(rank: int) -> None:
    schedule = [("pull", 0), ("push", 0), ("pull", 1), ("push", 1), ("pull", 0), ("push", 1)]
    model = Net()
    with make_server(model, "all", staleness=None, schedule=schedule) as server:
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"has pull for this worker, not a push\(\)"):
                server.push()
        else:  # what rank 1 leaves out holds nobody up
            server.pull()
            server.push()
            server.pull()
            with pytest.raises(RuntimeError, match="nothing more"):
                server.pull()
    with pytest.raises(RuntimeError, match="there is no schedule"):
        ParameterServer(Net(), make_of("sgd"), servers=[0]).replay(list)


def test_a_schedule_is_kept() -> None:
    run_ranks(2, break_schedule)


# ---- without a bound


def train_freely(rank: int, world_size: int, layout: str, updates_at: str) -> Any:
    """The last worker stops until all others are through: it holds nobody up."""
    workers = workers_of(layout, world_size)
    model = Net()
    with make_server(model, layout, staleness=None, updates_at=updates_at) as server:
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


@pytest.mark.parametrize("updates_at", ["server", "worker"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_without_a_bound_nobody_waits(world_size: int, updates_at: str) -> None:
    for layout in ("all", "dedicated"):
        num_workers = len(workers_of(layout, world_size))
        for found in run_ranks(world_size, train_freely, world_size, layout, updates_at):
            assert sum(found.values()) in (0, 5 * num_workers)
            assert all(0 <= age < 5 * num_workers for age in found)


def sum_of_pushes(rank: int) -> list[float]:
    """updates_at="worker" without a bound: a pull brings all that was pushed since the last."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    schedule = [("push", 0), ("push", 1), ("pull", 0), ("push", 1), ("pull", 1), ("pull", 0)]
    seen = []
    with ParameterServer(
        model,
        lambda params: torch.optim.SGD(params, lr=1.0),
        staleness=None,
        updates_at="worker",
        schedule=schedule,
    ) as server:
        for kind, worker in schedule:
            if worker == rank:
                if kind == "pull":
                    server.pull()
                    seen.append(-model.weight.item())
                else:
                    model.weight.grad = torch.full((1, 1), 1.0 + 9.0 * rank)
                    server.push()
    return seen


def test_workers_pull_sums() -> None:
    assert run_ranks(2, sum_of_pushes) == [[11.0, 21.0], [21.0]]


# ---- bytes


def test_delayed_updates_are_sent_once() -> None:
    """The steps before the first update pull nothing; the last pull brings all that is left."""
    options = {"staleness": 2, "lockstep": True, "updates_at": "worker"}
    check_sent(run_ranks(3, train, 3, "all", "sgd", options), 3, "all", STEPS)


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


# ---- what is recorded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_step_nothing_is_stale(layout: str) -> None:
    results = run_ranks(4, train, 4, layout)
    _, expected = train_alone("sgd")
    num_workers = len(workers_of(layout, 4))
    for result in results:
        assert result["staleness"] in ({}, {0: 4 * num_workers})
    assert sum(bool(result["staleness"]) for result in results) == len(results[0]["keys"])
    assert sum(len(names) for names in results[0]["keys"].values()) == len(expected)
