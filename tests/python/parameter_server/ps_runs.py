"""Training through a parameter server, for its tests, and the bytes that it should send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ranks
import torch
from torch import nn
from zero_models import STEPS, Net, batch, loss_of, sent_bytes, weights

from ringcomm.parallel import ParameterServer

HEADER_BYTES = 24

# By name: how many ranks of a world serve, and whether they work.
LAYOUTS: dict[str, dict[str, Any]] = {
    "all": {"servers": "all"},
    "dedicated": {"servers": [0], "dedicated": True},
    "two dedicated": {"servers": [0, 2], "dedicated": True},
    "one that works": {"servers": [1]},
}


def workers_of(layout: str, world_size: int) -> list[int]:
    options = LAYOUTS[layout]
    servers = options["servers"] if options.get("dedicated") else []
    return [rank for rank in range(world_size) if rank not in servers]


def make_of(kind: str) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """The optimizer that zero_models.make_optimizer() makes, of given groups."""
    momentum: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if kind == "momentum" else {}

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, 0.05, weight_decay=0.01, **momentum)

    return make


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two, of which the second has a learning rate and a weight decay of its own."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "weight_decay": 0.1}]


def make_server(model: nn.Module, layout: str, kind: str = "sgd", **options: Any) -> Any:
    return ParameterServer(
        model, make_of(kind), param_groups=groups_of(model), **{**LAYOUTS[layout], **options}
    )


def step_once(server: Any, model: nn.Module, step: int, place: int, num_workers: int) -> None:
    server.pull()
    loss_of(model, *batch(step, place, num_workers)).backward()
    server.push()


def train(
    rank: int,
    device: str,
    world_size: int,
    layout: str,
    options: dict[str, Any],
    model_options: dict[str, Any],
    num_micro_batches: int = 1,
) -> dict[str, Any]:
    """STEPS steps; every worker has rows of its own."""
    place = ranks.place(device, rank)
    model = Net(**model_options).to(place)
    if rank != 0:
        nn.init.zeros_(model.last.weight)  # rank 0's count
    workers = workers_of(layout, world_size)
    before = sent_bytes()["send"]  # others may pull as soon as there is a server
    with make_server(model, layout, "momentum", **options) as server:
        if rank in workers:
            mine = workers.index(rank)
            for step in range(STEPS):
                server.pull()
                for part in range(num_micro_batches):
                    rows = batch(num_micro_batches * step + part, mine, len(workers))
                    loss_of(model, *(row.to(place) for row in rows)).backward()
                server.push()
            server.pull(fresh=True)
        else:
            server.serve()
    return {
        "weights": {name: value.cpu() for name, value in weights(model).items()},
        "version": server.version,
        "sent": sent_bytes()["send"] - before,
        "keys": server.keys,
        "staleness": dict(server.staleness_histogram),
    }


def check_sent(results: list[dict[str, Any]], workers: list[int]) -> None:
    """STEPS gradients of every worker with a byte per key, as many weights, and one pull more.

    A pull that finds nothing new is headers alone.
    """
    params = dict(Net().named_parameters())
    keys = {
        server: sum(params[name].nbytes for name in names)
        for server, names in results[0]["keys"].items()
    }
    assert sum(keys.values()) == sum(param.nbytes for param in params.values())
    num_pulls = STEPS + 1
    for rank, result in enumerate(results):
        expected = 0
        if rank in workers:
            others = [server for server in keys if server != rank]
            headers = (STEPS + num_pulls + 1) * HEADER_BYTES  # the last one closes
            of_keys = {server: len(names) for server, names in results[0]["keys"].items()}
            expected += sum(STEPS * (keys[s] + of_keys[s]) + headers for s in others)
        if rank in keys:
            num_clients = len(workers) - (rank in workers)
            expected += num_clients * (STEPS * keys[rank] + num_pulls * HEADER_BYTES)
        assert result["sent"] == expected, rank
