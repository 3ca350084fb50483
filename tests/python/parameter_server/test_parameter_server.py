"""ParameterServer in step: the training of one process and of DDP, and the bytes it sends."""

from __future__ import annotations

from typing import Any

import ps_runs
import pytest
import torch
from ps_oracles import train_alone
from ps_runs import (
    HEADER_BYTES,
    STEPS,
    check_sent,
    groups_of,
    make_of,
    make_server,
    sent_bytes,
    workers_of,
)
from ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from zero_models import Net, batch, loss_of, weights

import ringcomm
from ringcomm.parallel import ParameterServer


def train(rank: int, *args: Any) -> dict[str, Any]:
    """ps_runs.train on the ranks of this file, which other cases use as well."""
    return ps_runs.train(rank, *args)


CASES = [(1, "all"), (2, "dedicated"), (2, "one that works"), (3, "all"), (4, "two dedicated")]


def check(
    results: list[dict[str, Any]],
    world_size: int,
    layout: str,
    kind: str,
    num_micro_batches: int = 1,
    atol: float = 1e-6,
    **model_options: Any,
) -> None:
    workers = workers_of(layout, world_size)
    losses, expected = train_alone(kind, num_micro_batches, **model_options)
    found = torch.tensor([results[rank]["losses"] for rank in workers]).mean(0)
    torch.testing.assert_close(found, torch.tensor(losses), rtol=0, atol=10 * atol)
    for rank in workers:
        assert results[rank]["version"] == STEPS
        for name, value in expected.items():
            mine = results[rank]["weights"][name]
            torch.testing.assert_close(mine, value, rtol=0, atol=atol)
            assert torch.equal(mine, results[workers[0]]["weights"][name])


@pytest.mark.parametrize(("world_size", "layout"), CASES)
def test_steps_are_those_of_one_process(world_size: int, layout: str) -> None:
    results = run_ranks(world_size, train, world_size, layout, "momentum")
    check(results, world_size, layout, "momentum")
    check_sent(results, world_size, layout, STEPS)
    num_workers = len(workers_of(layout, world_size))
    found = [result["staleness"] for result in results if result["staleness"]]
    assert found == [{0: STEPS * num_workers}] * len(results[0]["keys"])


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int, float]] = {
    "tied": ({}, {"is_tied": True}, 1, 1e-6),
    "frozen": ({}, {"is_frozen": True}, 1, 1e-6),
    "accumulated": ({}, {}, 2, 1e-6),
    "bfloat16 on the wire": ({"wire_dtype": torch.bfloat16}, {}, 1, 5e-3),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_and_options(case: str) -> None:
    options, model_options, num_micro_batches, atol = MODELS[case]
    results = run_ranks(
        3,
        train,
        *(3, "all", "sgd", options),
        *(model_options, num_micro_batches),
    )
    check(results, 3, "all", "sgd", num_micro_batches, atol, **model_options)
    if not model_options:
        check_sent(results, 3, "all", STEPS, options.get("wire_dtype"))


def train_both(rank: int, world_size: int, layout: str) -> None:
    """DDP's weights after each step, and the parameter server's."""
    model = Net()
    replica: Any = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(groups_of(replica), 0.05, weight_decay=0.01)
    server = ParameterServer(
        model,
        make_of("sgd"),
        param_groups=groups_of(model),
        servers="all" if layout == "all" else [1],
    )
    for step in range(STEPS):
        rows = batch(step, rank, world_size)
        server.pull()
        for name, value in weights(model).items():
            other = weights(replica.module)[name]
            if world_size == 2:
                assert torch.equal(value, other), (step, name)
            torch.testing.assert_close(value, other, rtol=0, atol=1e-6)
        loss_of(replica, *rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, *rows).backward()
        server.push()
        assert all(param.grad is None for param in model.parameters())
    server.close()


@pytest.mark.parametrize(("world_size", "layout"), [(2, "all"), (2, "one that works"), (3, "all")])
def test_equals_ddp(world_size: int, layout: str) -> None:
    """To the bit with two ranks; with more, sums differ in their order."""
    run_ranks(world_size, train_both, world_size, layout)


def train_less(rank: int, layout: str) -> tuple[int, dict[str, Tensor]]:
    """Rank r has r + 1 batches."""
    model = Net()
    with ParameterServer(
        model,
        make_of("sgd"),
        param_groups=groups_of(model),
        servers="all" if layout == "all" else [2],
    ) as server:
        for step in range(rank + 1):
            server.pull()
            loss_of(model, *batch(step, rank, 3)).backward()
            server.push()
        server.pull()
    return server.version, weights(model)


@pytest.mark.parametrize("layout", ["all", "one that works"])
def test_a_worker_may_end_early(layout: str) -> None:
    """Means are those of the workers that still take part."""
    model = Net()
    optimizer = make_of("sgd")(groups_of(model))
    after = []
    for step in range(3):
        present = range(step, 3)
        for rank in present:
            (loss_of(model, *batch(step, rank, 3)) / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(weights(model))
    for rank, (version, found) in enumerate(run_ranks(3, train_less, layout)):
        assert version == rank + 1
        for name, value in after[rank].items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_a_dedicated_server() -> None:
    """N Phi each way a step, and the headers."""
    phi = 4 * sum(param.numel() for param in Net().parameters())
    server, *workers = (result["sent"] for result in run_ranks(4, train, 4, "dedicated"))
    assert server == 3 * STEPS * phi + 3 * (STEPS + 1) * HEADER_BYTES
    assert workers == [STEPS * phi + (STEPS + STEPS + 1 + 1) * HEADER_BYTES] * 3


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


def test_shards_that_divide() -> None:
    run_ranks(3, send_as_formulas, 3, 5)


def test_over_messages() -> None:
    """The default group's options are those of the server's own group."""
    options = ringcomm.Options(transport="p2p")
    results = run_ranks(2, train, 2, "all", pg_options=options)
    check(results, 2, "all", "sgd")
    check_sent(results, 2, "all", STEPS)


def test_the_cases_can_fail() -> None:
    results = run_ranks(2, train, 2, "all")
    with pytest.raises(AssertionError, match="not close"):
        check(results, 2, "all", "momentum")
    results[1]["sent"] -= 1
    with pytest.raises(AssertionError):
        check_sent(results, 2, "all", STEPS)
