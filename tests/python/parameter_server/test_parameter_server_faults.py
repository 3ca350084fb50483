"""ParameterServer: a rank dies, leaves or fails, and nobody waits for it."""

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


def lose_one(rank: int, world_size: int, layout: str, victim: int, how: str) -> int:
    """Until somebody dies; who that was."""
    workers = workers_of(layout, world_size)
    model = Net()

    num_updates = 0

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = make_of("sgd")(groups)
        if rank == victim and rank not in workers:
            optimizer.register_step_pre_hook(die_in_the_third)
        return optimizer

    def die_in_the_third(*_: Any) -> None:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 3:
            end(how)

    def go_on() -> None:
        if rank not in workers:
            server.serve()
        for step in range(1000):
            if rank == victim and step == 3:
                end(how)
            step_once(server, model, step, workers.index(rank), len(workers))

    server = ParameterServer(model, make, staleness=1, **LAYOUTS[layout])
    with pytest.raises(ringcomm.PeerDiedError) as first:
        go_on()
    with pytest.raises(ringcomm.PeerDiedError):
        server.pull() if rank in workers else server.serve()
    with pytest.raises(ringcomm.PeerDiedError):
        server.close()
    return first.value.rank


def end(how: str) -> None:
    """This process."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(
    ("world_size", "layout", "victim", "how"),
    [
        (2, "all", 1, "exit"),
        (3, "dedicated", 0, "kill"),
    ],
)
def test_a_death_is_named(world_size: int, layout: str, victim: int, how: str) -> None:
    results = run_ranks(
        world_size,
        lose_one,
        *(world_size, layout, victim, how),
        fresh=True,
        may_die=[victim],
        timeout_s=20.0,
    )
    assert results == [None if rank == victim else victim for rank in range(world_size)]


def fail_one(rank: int, where: str) -> str:
    """An error of the program: in the loop of rank 1, or in the optimizer of its server."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = make_of("sgd")(groups)
        if rank == 1 and where == "optimizer":
            optimizer.register_step_pre_hook(fail)
        return optimizer

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
def test_an_error_is_everybodys(where: str) -> None:
    """Nobody waits for a rank that has failed."""
    results = run_ranks(3, fail_one, where, timeout_s=20.0)
    kind = "PeerDiedError" if where == "loop" else "RingcommError"
    assert results == [f"{kind} 1", "ZeroDivisionError", f"{kind} 1"]
