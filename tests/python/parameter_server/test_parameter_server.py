"""ParameterServer in step: the training of one process and of DDP, and the bytes it sends."""

from __future__ import annotations

from typing import Any

import ps_runs
import pytest
import torch
from ps_runs import (
    HEADER_BYTES,
    STEPS,
    check_sent,
    groups_of,
    make_of,
    make_server,
    sent_bytes,
    train_alone,
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


def check(
    results: list[dict[str, Any]],
    world_size: int,
    layout: str,
    model_options: dict[str, Any],
    num_micro_batches: int = 1,
    atol: float = 1e-6,
) -> None:
    workers = workers_of(layout, world_size)
    losses, expected = train_alone("momentum", num_micro_batches, **model_options)
    found = torch.tensor([results[rank]["losses"] for rank in workers]).mean(0)
    torch.testing.assert_close(found, torch.tensor(losses), rtol=0, atol=10 * atol)
    ages = [result["staleness"] for result in results if result["staleness"]]
    assert ages == [{0: STEPS * len(workers)}] * len(results[0]["keys"])
    for rank in workers:
        assert (results[rank]["version"], results[rank]["skipped"]) == (STEPS, 0)
        for name, value in expected.items():
            mine = results[rank]["weights"][name]
            torch.testing.assert_close(mine, value, rtol=0, atol=atol)
            assert torch.equal(mine, results[workers[0]]["weights"][name])


@pytest.mark.parametrize(
    ("world_size", "layout", "options", "model_options", "num_micro_batches"),
    [
        (1, "all", {"loss_scale": "dynamic"}, {}, 1),
        (2, "dedicated", {"loss_scale": 1024.0}, {"is_tied": True}, 2),
        (2, "one that works", {}, {"is_frozen": True}, 1),
        (3, "all", {"wire_dtype": torch.bfloat16}, {}, 1),
        (3, "all", {"loss_scale": "dynamic"}, {}, 2),
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
    args = (device, world_size, layout, options, model_options, num_micro_batches)
    results = run_ranks(world_size, train, *args)
    atol = 5e-3 if "wire_dtype" in options else 1e-6 if device == "cpu" else 1e-4
    check(results, world_size, layout, model_options, num_micro_batches, atol)
    if not model_options:
        check_sent(results, world_size, layout, STEPS, options.get("wire_dtype"))


def train_both(rank: int, world_size: int) -> None:
    """DDP's weights after each step, and the parameter server's: the bits of two ranks."""
    model = Net()
    replica: Any = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(groups_of(replica), 0.05, weight_decay=0.01)
    server = make_server(model, "one that works")
    for step in range(STEPS):
        rows = batch(step, rank, world_size)
        server.pull()
        for name, value in weights(model).items():
            assert torch.equal(value, weights(replica.module)[name]), (step, name)
        loss_of(replica, *rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, *rows).backward()
        server.push()
        assert all(param.grad is None for param in model.parameters())
    server.close()


def test_equals_ddp() -> None:
    run_ranks(2, train_both, 2)


def train_less(rank: int) -> tuple[int, dict[str, Tensor]]:
    """Rank r has r + 1 batches."""
    model = Net()
    with make_server(model, "one that works") as server:
        for step in range(rank + 1):
            server.pull()
            loss_of(model, *batch(step, rank, 3)).backward()
            server.push()
        server.pull()
    return server.version, weights(model)


def test_a_worker_may_end_early() -> None:
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
    for rank, (version, found) in enumerate(run_ranks(3, train_less)):
        assert version == rank + 1
        for name, value in after[rank].items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


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
    results = run_ranks(2, train, "cpu", 2, "all", {}, {}, pg_options=options)
    check(results, 2, "all", {})
    check_sent(results, 2, "all", STEPS)


# ---- float16


def overflow(rank: int, staleness: int | None) -> None:
    """An update is left out on all servers, if a gradient of it is not finite."""
    model = Net()
    server = make_server(model, "all", "momentum", loss_scale="dynamic", staleness=staleness)

    def step(number: int, is_broken: bool) -> None:
        server.pull(fresh=True)
        x, y = batch(number, rank, 2)
        y = y * (float("inf") if is_broken else 1)
        server.scale(loss_of(model, x, y)).backward()
        server.push()

    def weights_of_all() -> dict[str, Tensor]:
        server.pull(fresh=True)  # what this rank has pushed is there
        torch.distributed.barrier()
        server.pull(fresh=True)
        return weights(model)

    step(0, False)
    before = weights_of_all()
    torch.distributed.barrier()
    step(1, rank == 1)
    # In rounds the update is left out; alone, only the gradient that is not finite.
    after = weights_of_all()
    is_same = all(torch.equal(value, before[name]) for name, value in after.items())
    assert is_same == (staleness is not None)
    assert server.loss_scale == (2.0**15 if rank == 1 else 2.0**16)
    assert server.num_skipped_updates == 1
    assert all(value.isfinite().all() for value in after.values())
    step(2, False)
    server.pull(fresh=True)
    assert not torch.equal(weights(model)["last.weight"], before["last.weight"])
    server.close()


@pytest.mark.parametrize("staleness", [1, None])
def test_an_overflow_is_left_out_on_all_servers(staleness: int | None) -> None:
    run_ranks(2, overflow, staleness)


def train_half(rank: int, scale: float | None) -> Tensor:
    """One step, whose gradient of 2**-28 float16 has no number for."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    make = lambda params: torch.optim.SGD(params, lr=2.0**18)  # noqa: E731
    with ParameterServer(model, make, wire_dtype=torch.float16, loss_scale=scale) as server:
        server.pull()
        loss = model(torch.full([1, 4], 2.0**-28)).sum()
        server.scale(loss).backward()
        server.push()
        server.pull()
        return model.weight.detach().clone()


def test_small_gradients_survive_on_the_wire() -> None:
    for weight in run_ranks(2, train_half, None):
        assert torch.equal(weight, torch.ones(1, 4))  # they did not
    for weight in run_ranks(2, train_half, 4096.0):
        assert torch.equal(weight, torch.full([1, 4], 1 - 2.0**-10))
