"""ParameterServer: the training of one process and of DDP, and the bytes it sends; out of step; and
ranks that die or fail."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any

import ps_runs
import pytest
import torch
import torch.distributed as dist
from ps_runs import (
    LAYOUTS,
    check_sent,
    groups_of,
    make_of,
    make_server,
    step_once,
    workers_of,
)
from ranks import in_ranks, run_ranks
from steps import apply_steps, train_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from zero_models import STEPS, Net, batch, loss_of, train_alone, weights

import ringcomm
from ringcomm.parallel import ParameterServer


@pytest.mark.parametrize(
    ("world_size", "layout", "options", "model_options", "num_micro_batches"),
    [
        (1, "all", {}, {}, 1),
        (2, "dedicated", {}, {"is_tied": True}, 2),
        (2, "one that works", {}, {"is_frozen": True}, 1),
        (2, "one that works", {}, {"dtype": torch.bfloat16}, 1),
        (2, "all", {"messages": True}, {}, 1),
        (3, "all", {}, {}, 2),
        (4, "two dedicated", {}, {}, 1),
    ],
    ids=str,
)
def test_steps_are_those_of_one_process(
    device: str,
    world_size: int,
    layout: str,
    options: dict[str, Any],
    model_options: dict[str, Any],
    num_micro_batches: int,
) -> None:
    """With "messages" the default group's options are those of the server's own group."""
    over_messages = ringcomm.Options(transport="messages") if options.get("messages") else None
    options = {name: value for name, value in options.items() if name != "messages"}
    args = (device, world_size, layout, options, model_options, num_micro_batches)
    results = run_ranks(world_size, ps_runs.train, *args, pg_options=over_messages)
    workers = workers_of(layout, world_size)
    expected = train_alone("momentum", None, num_micro_batches, **model_options)
    atol = 1e-2 if "dtype" in model_options else 1e-6 if device == "cpu" else 1e-4
    ages = [result["staleness"] for result in results if result["staleness"]]
    assert ages == [{0: STEPS * len(workers)}] * len(results[0]["keys"])
    for rank in workers:
        assert results[rank]["version"] == STEPS
        for name, value in expected.items():
            mine = results[rank]["weights"][name]
            torch.testing.assert_close(mine, value, rtol=0, atol=atol)
            assert torch.equal(mine, results[workers[0]]["weights"][name])
    if not model_options:
        check_sent(results, workers)


@in_ranks(2)
def test_equals_ddp(rank: int) -> None:
    """DDP's weights after each step, and the parameter server's: the bits of two ranks."""
    model = Net()
    replica: Any = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(groups_of(replica), 0.05, weight_decay=0.01)
    server = make_server(model, "one that works")
    for step in range(STEPS):
        rows = batch(step, rank, 2)
        server.pull()
        for name, value in weights(model).items():
            assert torch.equal(value, weights(replica.module)[name]), (step, name)
        train_step(loss_of(replica, *rows), optimizer)
        loss_of(model, *rows).backward()
        server.push()
        assert all(param.grad is None for param in model.parameters())
    server.close()


@in_ranks(3)
def test_a_worker_may_end_early(rank: int) -> None:
    """Rank r has r + 1 batches. Means are those of the workers that still take part."""
    model, alone = Net(), Net()
    optimizer = make_of("sgd")(groups_of(alone))
    with make_server(model, "one that works") as server:
        for step in range(rank + 1):
            server.pull()
            loss_of(model, *batch(step, rank, 3)).backward()
            server.push()
            present = range(step, 3)
            for other in present:
                (loss_of(alone, *batch(step, other, 3)) / len(present)).backward()
            apply_steps(optimizer)
        server.pull()
    assert server.version == rank + 1
    torch.testing.assert_close(weights(model), weights(alone), rtol=0, atol=1e-6)


# ---- out of step: the staleness bound, no bound, and the staleness histogram


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
    ("world_size", "layout", "staleness"), [(2, "all", 0), (3, "dedicated", 2)]
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
    """Pulls and pushes one after the other; each server serves a push before the next."""
    model = Net()
    num_pushes = num_served = 0
    with make_server(model, "all", "momentum", staleness=None) as server:
        for kind, worker in SCHEDULE:
            if worker == rank and kind == "<":
                server.pull()
            elif worker == rank:
                loss_of(model, *batch(num_pushes, rank, 3)).backward()
                server.push()
                num_pushes += 1
            num_served += kind == ">"
            while server.server_optimizer and server.staleness_histogram.total() < num_served:
                time.sleep(0.001)
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


# ---- a rank dies, leaves or fails, and no rank waits for it


def make_failing(fail: Any, num_updates: int) -> Any:
    """An optimizer that fails in an update."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = make_of("sgd")(groups)
        left = num_updates

        def count(*_: Any) -> None:
            nonlocal left
            if left == 0:
                fail()
            left -= 1

        optimizer.register_step_pre_hook(count)
        return optimizer

    return make


def die(signal_number: int | None) -> None:
    """Ends this process."""
    if signal_number is not None:
        os.kill(os.getpid(), signal_number)
    os._exit(0)


def lose_one(rank: int, world_size: int, layout: str, victim: int, signal_number: Any) -> int:
    """Until a rank dies; which one that was."""
    workers = workers_of(layout, world_size)
    model = Net()
    is_dying_server = rank == victim and rank not in workers
    make = make_failing(lambda: die(signal_number), 2) if is_dying_server else make_of("sgd")
    server = ParameterServer(model, make, staleness=1, **LAYOUTS[layout])

    def go_on() -> None:
        if rank not in workers:
            server.serve()
        for step in range(1000):
            if rank == victim and step == 3:
                die(signal_number)
            step_once(server, model, step, workers.index(rank), len(workers))

    with pytest.raises(ringcomm.PeerDiedError) as first:
        go_on()
    with pytest.raises(ringcomm.PeerDiedError):
        server.pull() if rank in workers else server.serve()
    with pytest.raises(ringcomm.PeerDiedError):
        server.close()
    return first.value.rank


@pytest.mark.parametrize(
    ("world_size", "layout", "victim", "signal_number"),
    [(2, "all", 1, None), (3, "dedicated", 0, signal.SIGKILL)],
)
def test_a_death_is_named(world_size: int, layout: str, victim: int, signal_number: Any) -> None:
    args = (world_size, layout, victim, signal_number)
    options: dict[str, Any] = {"fresh": True, "may_die": [victim], "timeout_s": 20.0}
    results = run_ranks(world_size, lose_one, *args, **options)
    assert results == [None if rank == victim else victim for rank in range(world_size)]


@pytest.mark.parametrize("where", ["loop", "optimizer"])
@in_ranks(3, timeout_s=20.0)
def test_an_error_is_that_of_all_ranks(rank: int, where: str) -> None:
    """In the loop of rank 1, or in the optimizer of its server; no rank waits for it."""

    def fail() -> None:
        raise ZeroDivisionError

    make = make_failing(fail, 0) if rank == 1 and where == "optimizer" else make_of("sgd")
    model = Net()

    def go_on() -> None:
        with ParameterServer(model, make) as server:
            for step in range(3):
                step_once(server, model, step, rank, 3)
                if rank == 1 and where == "loop":
                    fail()

    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            go_on()
        return
    kind = ringcomm.PeerDiedError if where == "loop" else ringcomm.RingcommError
    with pytest.raises(kind) as caught:
        go_on()
    assert type(caught.value) is kind
    assert getattr(caught.value, "rank", None) == 1
