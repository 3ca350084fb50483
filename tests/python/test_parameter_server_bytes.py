"""What a parameter server sends, to the byte: keys up, keys down, and headers of 32 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_runs import HEADER_BYTES, STEPS, make_server, sent_bytes, train, workers_of
from ranks import run_ranks
from zero_models import Net, batch, loss_of

WIDTH = {None: 4, torch.bfloat16: 2}


def key_bytes(keys: dict[int, list[str]], wire_dtype: torch.dtype | None) -> dict[int, int]:
    """By server."""
    model = Net()
    return {
        server: sum(WIDTH[wire_dtype] * model.get_parameter(name).numel() for name in names)
        for server, names in keys.items()
    }


def check_sent(
    results: list[dict[str, Any]],
    world_size: int,
    layout: str,
    num_pushes: int,
    num_news: int,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """num_pushes gradients of every worker; of its pulls, one more, num_news brought something."""
    workers = workers_of(layout, world_size)
    keys = key_bytes(results[0]["keys"], wire_dtype)
    whole = sum(WIDTH[wire_dtype] * param.numel() for param in Net().parameters())
    assert sum(keys.values()) == whole
    num_pulls = num_pushes + 1
    for rank, result in enumerate(results):
        expected = 0
        if rank in workers:
            others = [server for server in keys if server != rank]
            headers = (num_pushes + num_pulls + 1) * HEADER_BYTES  # the last one closes
            expected += sum(num_pushes * keys[server] + headers for server in others)
        if rank in keys:
            clients = len(workers) - (rank in workers)
            expected += clients * (num_news * keys[rank] + num_pulls * HEADER_BYTES)
        assert result["sent"] == expected, rank


@pytest.mark.parametrize("updates_at", ["server", "worker"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, "all"),
        (2, "dedicated"),
        (2, "all"),
        (3, "all"),
        (3, "one that works"),
        (3, "dedicated"),
        (4, "two dedicated"),
        (4, "all"),
    ],
)
def test_in_step(world_size: int, layout: str, updates_at: str) -> None:
    """A worker: Phi up and Phi down a step, less its own keys; a server: once for each worker."""
    options = {"updates_at": updates_at}
    results = run_ranks(world_size, train, world_size, layout, "sgd", options)
    check_sent(results, world_size, layout, STEPS, STEPS)


def test_a_dedicated_server() -> None:
    """N Phi each way a step, and the headers."""
    phi = 4 * sum(param.numel() for param in Net().parameters())
    server, *workers = (result["sent"] for result in run_ranks(4, train, 4, "dedicated"))
    assert server == 3 * STEPS * phi + 3 * (STEPS + 1) * HEADER_BYTES
    assert workers == [STEPS * phi + (STEPS + STEPS + 1 + 1) * HEADER_BYTES] * 3


def test_half_of_it_in_bfloat16() -> None:
    results = run_ranks(3, train, 3, "all", "sgd", {"wire_dtype": torch.bfloat16})
    check_sent(results, 3, "all", STEPS, STEPS, torch.bfloat16)


def test_accumulated_gradients_are_sent_once() -> None:
    results = run_ranks(2, train, 2, "all", "sgd", {}, {}, 3)
    check_sent(results, 2, "all", STEPS, STEPS)


def test_delayed_updates_are_sent_once() -> None:
    """Those of the steps that begin before the first update bring nothing: the last pull all."""
    options = {"staleness": 2, "lockstep": True, "updates_at": "worker"}
    results = run_ranks(3, train, 3, "all", "sgd", options)
    check_sent(results, 3, "all", STEPS, STEPS)


def send_as_formulas(rank: int, world_size: int, num_steps: int) -> None:
    """(N-1)/N Phi up and as much down a step, where keys divide."""
    model = torch.nn.ParameterList([torch.ones(12) for _ in range(12)])
    phi = 12 * 12 * 4
    others = world_size - 1
    before = sent_bytes()
    with make_server(model, "all") as server:
        for _ in range(num_steps):
            torch.stack(list(model)).sum().backward()
            server.push()
            server.pull()
    headers = others * (3 * num_steps + 1) * HEADER_BYTES  # push, pull, answer; and the last
    assert sent_bytes() - before == 2 * num_steps * others * phi // world_size + headers


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_that_divide(world_size: int) -> None:
    run_ranks(world_size, send_as_formulas, world_size, 5)


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
