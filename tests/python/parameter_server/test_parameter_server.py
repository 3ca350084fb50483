"""ParameterServer in step: the training of one process and of DDP, and the bytes it sends."""

from __future__ import annotations

from typing import Any

import ps_runs
import pytest
import torch
import torch.distributed as dist
from ps_runs import check_sent, groups_of, make_of, make_server, workers_of
from ranks import in_ranks, run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from zero_models import STEPS, Net, batch, loss_of, train_alone, weights

import ringcomm
from ringcomm.parallel import ParameterServer


@pytest.mark.parametrize(
    ("world_size", "layout", "options", "model_options", "num_micro_batches"),
    [
        (1, "all", {"loss_scale": "dynamic"}, {}, 1),
        (2, "dedicated", {"loss_scale": 1024.0}, {"is_tied": True}, 2),
        (2, "one that works", {}, {"is_frozen": True}, 1),
        (2, "all", {"messages": True}, {}, 1),
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
    """With "messages" the default group's options are those of the server's own group."""
    over_messages = ringcomm.Options(transport="messages") if options.get("messages") else None
    options = {name: value for name, value in options.items() if name != "messages"}
    args = (device, world_size, layout, options, model_options, num_micro_batches)
    results = run_ranks(world_size, ps_runs.train, *args, pg_options=over_messages)
    workers, is_narrow = workers_of(layout, world_size), "wire_dtype" in options
    expected = train_alone("momentum", None, num_micro_batches, **model_options)
    atol = 5e-3 if is_narrow else 1e-6 if device == "cpu" else 1e-4
    ages = [result["staleness"] for result in results if result["staleness"]]
    assert ages == [{0: STEPS * len(workers)}] * len(results[0]["keys"])
    for rank in workers:
        assert (results[rank]["version"], results[rank]["skipped"]) == (STEPS, 0)
        for name, value in expected.items():
            mine = results[rank]["weights"][name]
            torch.testing.assert_close(mine, value, rtol=0, atol=atol)
            assert torch.equal(mine, results[workers[0]]["weights"][name])
    if not model_options:
        check_sent(results, workers, 2 if is_narrow else 4)


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
        loss_of(replica, *rows).backward()
        optimizer.step()
        optimizer.zero_grad()
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
            optimizer.step()
            optimizer.zero_grad()
        server.pull()
    assert server.version == rank + 1
    torch.testing.assert_close(weights(model), weights(alone), rtol=0, atol=1e-6)


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
        dist.barrier()
        server.pull(fresh=True)
        return weights(model)

    step(0, False)
    before = weights_of_all()
    dist.barrier()
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


@in_ranks(2)
def test_small_gradients_survive_on_the_wire(rank: int) -> None:
    """One step, whose gradient of 2**-28 float16 has no number for."""
    for scale, expected in ((None, 1.0), (4096.0, 1 - 2.0**-10)):
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        make = lambda params: torch.optim.SGD(params, lr=2.0**18)  # noqa: E731
        with ParameterServer(model, make, wire_dtype=torch.float16, loss_scale=scale) as server:
            server.pull()
            loss = model(torch.full([1, 4], 2.0**-28)).sum()
            server.scale(loss).backward()
            server.push()
            server.pull()
        assert (model.weight == expected).all()
