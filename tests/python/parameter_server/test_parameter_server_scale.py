"""ParameterServer(loss_scale=): float16, and updates that are left out on all servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ps_oracles import train_alone
from ps_runs import STEPS, make_server
from ranks import run_ranks
from torch import Tensor
from zero_models import Net, batch, loss_of, weights

from ringcomm.parallel import ParameterServer


def train_scaled(rank: int, world_size: int, scale: Any, staleness: Any) -> Any:
    model = Net()
    server = make_server(model, "all", loss_scale=scale, staleness=staleness)
    losses = []
    for step in range(STEPS):
        server.pull(fresh=True)
        loss = loss_of(model, *batch(step, rank, world_size))
        server.scale(loss).backward()
        server.push()
        losses.append(float(loss.detach()))
    server.pull(fresh=True)
    found = weights(model), losses, server.loss_scale, server.num_skipped_updates
    server.close()
    return found


@pytest.mark.parametrize(("world_size", "scale"), [(1, "dynamic"), (3, 1024.0), (2, "dynamic")])
def test_a_scale_changes_nothing(world_size: int, scale: Any) -> None:
    results = run_ranks(world_size, train_scaled, world_size, scale, 0)
    _, expected = train_alone("sgd")
    for found, _, value, num_skipped in results:
        assert (value, num_skipped) == (2.0**16 if scale == "dynamic" else scale, 0)
        for name, wanted in expected.items():
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-6)


def overflow(rank: int, staleness: int | None) -> None:
    model = Net()
    server = make_server(model, "all", "momentum", loss_scale="dynamic", staleness=staleness)

    def step(number: int, is_broken: bool) -> None:
        server.pull(fresh=True)
        x, y = batch(number, rank, 2)
        y = y * (float("inf") if is_broken else 1)
        server.scale(loss_of(model, x, y)).backward()
        server.push()

    step(0, False)
    server.pull(fresh=True)
    torch.distributed.barrier()
    server.pull(fresh=True)
    before = weights(model)
    torch.distributed.barrier()
    step(1, rank == 1)
    server.pull(fresh=True)  # what this rank has pushed is there
    torch.distributed.barrier()
    server.pull(fresh=True)
    # In rounds the update is left out; alone, only the gradient that is not finite.
    is_same = all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert is_same == (staleness is not None)
    assert server.loss_scale == (2.0**15 if rank == 1 else 2.0**16)
    assert server.num_skipped_updates == 1
    assert all(value.isfinite().all() for value in weights(model).values())
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
    with ParameterServer(
        model,
        lambda params: torch.optim.SGD(params, lr=2.0**18),
        wire_dtype=torch.float16,
        loss_scale=scale,
    ) as server:
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


def refuse(rank: int) -> None:
    with pytest.raises(ValueError, match="loss_scale is None"):
        make_server(Net(), "all", loss_scale=-1.0)


def test_errors() -> None:
    run_ranks(1, refuse)
