"""ParameterServer: a rank dies, leaves or fails, and no rank waits for it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from ps_runs import LAYOUTS, make_of, step_once, workers_of
from ranks import run_ranks
from zero_models import Net

import ringcomm
from ringcomm.parallel import ParameterServer


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
def test_a_death_is_named(
    world_size: int, layout: str, victim: int, signal_number: int | None
) -> None:
    args = (world_size, layout, victim, signal_number)
    options: dict[str, Any] = {"fresh": True, "may_die": [victim], "timeout_s": 20.0}
    results = run_ranks(world_size, lose_one, *args, **options)
    assert results == [None if rank == victim else victim for rank in range(world_size)]


def fail_one(rank: int, where: str) -> str:
    """An error of the program: in the loop of rank 1, or in the optimizer of its server."""

    def fail() -> None:
        raise ZeroDivisionError

    is_optimizer = rank == 1 and where == "optimizer"
    make = make_failing(fail, 0) if is_optimizer else make_of("sgd")
    model = Net()
    try:
        with ParameterServer(model, make) as server:
            for step in range(3):
                step_once(server, model, step, rank, 3)
                if rank == 1 and where == "loop":
                    fail()
    except (ringcomm.RingcommError, ZeroDivisionError) as error:
        return f"{type(error).__name__} {getattr(error, 'rank', '')}".strip()
    return "nothing"


@pytest.mark.parametrize("where", ["loop", "optimizer"])
def test_an_error_is_that_of_all_ranks(where: str) -> None:
    """No rank waits for one that has failed."""
    results = run_ranks(3, fail_one, where, timeout_s=20.0)
    kind = "PeerDiedError" if where == "loop" else "RingcommError"
    assert results == [f"{kind} 1", "ZeroDivisionError", f"{kind} 1"]
