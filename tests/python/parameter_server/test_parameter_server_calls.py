"""ParameterServer: states to resume from, odd models and groups, and its errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ps_runs import groups_of, make_of, make_server, step_once, workers_of
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zero_models import STEPS, Net, batch, loss_of, train_alone, weights

from ringcomm.parallel import ParameterServer, get_state_dict, set_state_dict


def resume(rank: int, layout: str) -> dict[str, Tensor] | None:
    """Half of the steps, and the others by other servers, of states and the weights."""
    workers = workers_of(layout, 3)
    saved: list[Any] = [None]
    state: Any = None
    for steps in (range(2), range(2, STEPS)):
        model = Net()
        dist.broadcast_object_list(saved, src=workers[0])
        if steps[0]:
            model.load_state_dict(saved[0])
        with make_server(model, layout, "momentum") as server:
            if state is not None:
                server.server_optimizer.load_state_dict(state)
            dist.barrier()
            for step in steps if rank in workers else ():
                step_once(server, model, step, workers.index(rank), len(workers))
            if rank in workers:
                server.pull(fresh=True)
            else:
                server.serve()
            if server.server_optimizer is not None:
                state = server.server_optimizer.state_dict()
            saved = [weights(model)]
    return weights(model) if rank in workers else None


@pytest.mark.parametrize("layout", ["dedicated", "all"])
def test_a_state_resumes(layout: str) -> None:
    """Of the servers' optimizers, each saved by its rank."""
    expected, results = train_alone("momentum"), run_ranks(3, resume, layout)
    for rank in workers_of(layout, 3):
        for name, value in expected.items():
            torch.testing.assert_close(results[rank][name], value, rtol=0, atol=1e-6)


@in_ranks(2)
def test_states_are_not_in_a_state_dict(rank: int) -> None:
    """Nothing is written, and no rank waits for another."""
    model = nn.Linear(3, 5)
    values = get_state_dict(model)[0]
    with ParameterServer(model, make_of("sgd")) as server:
        with pytest.raises(TypeError, match="the states of a ParameterServer are at its servers"):
            get_state_dict(model, server)
        with pytest.raises(TypeError, match=r"state_dict\(\) of its server_optimizer"):
            set_state_dict(model, server, values if rank else None)


# ---- edges


@in_ranks(3)
def test_fewer_parameters_than_ranks(rank: int) -> None:
    """Fewer parameters than ranks: some serve nothing."""
    model = nn.ParameterList([torch.full((2,), float(i + rank)) for i in range(2)])
    groups = [{"params": []}, {"params": list(model)}, {"params": [], "lr": 3.0}]
    with ParameterServer(model, make_of("sgd"), param_groups=groups) as server:
        assert len(server.servers) == 2
        for _ in range(2):
            server.pull()
            torch.stack([(param * rank).sum() for param in model]).sum().backward()
            server.push()
        server.pull()
        if server.server_optimizer is not None:
            assert len(server.server_optimizer.param_groups) == 3
    for i, param in enumerate(model):
        value = float(i)
        for _ in range(2):
            value -= 0.05 * (1.0 + 0.01 * value)  # the mean of ranks 0 to 2
        torch.testing.assert_close(param.detach(), torch.full((2,), value))


@in_ranks(3)
def test_odd_parameters(rank: int) -> None:
    """Dtypes of all widths, a scalar, nothing at all, strides, a weight without a gradient."""
    model = nn.ParameterDict(
        {
            "narrow": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            "wide": nn.Parameter(torch.ones((), dtype=torch.float64)),
            "turned": nn.Parameter(torch.ones(2, 3).t()),
            "nothing": nn.Parameter(torch.ones(0, 4)),
            "unused": nn.Parameter(torch.ones(5)),
            "frozen": nn.Parameter(torch.full((2,), float(rank)), requires_grad=False),
        }
    )
    model.register_buffer("buffer", torch.tensor(rank))
    with ParameterServer(model, lambda params: torch.optim.SGD(params, lr=0.5)) as server:
        server.pull()
        total = model["narrow"].sum() + model["wide"] + model["turned"].sum()
        (total + model["nothing"].sum()).backward()
        server.push()
        server.pull()
    for name, value in {"narrow": 0.5, "wide": 0.5, "turned": 0.5, "unused": 1.0}.items():
        assert (model[name] == value).all(), name
    assert model["frozen"].tolist() == [0, 0]
    assert model.buffer == 0


@in_ranks(4, backend="gloo")
def test_in_a_subgroup(rank: int) -> None:
    """Ranks 0 and 2 of four in a mesh over Gloo, twice; two servers at once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    for _ in range(2):
        models = [Net(), Net()]
        options: dict[str, Any] = {"mesh": mesh, "servers": [1]}
        servers = [
            ParameterServer(model, make_of("sgd"), param_groups=groups_of(model), **options)
            for model in models
        ]
        assert servers[0].servers == [1]
        for step in range(STEPS):
            for server, model in zip(servers, models, strict=True):
                step_once(server, model, step, rank // 2, 2)
        for server, model in zip(servers, models, strict=True):
            server.pull()
            server.close()
            server.close()
            for name, value in train_alone("sgd").items():
                torch.testing.assert_close(weights(model)[name], value, rtol=0, atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "servers": ({"servers": [0, 5]}, r"ranks of a group of 2, got \[0, 5\]"),
    "no servers": ({"servers": []}, "list of different ranks"),
    "twice": ({"servers": [1, 1]}, "list of different ranks"),
    "a word": ({"servers": "some"}, "list of different ranks"),
    "no worker": ({"dedicated": True}, "leaves no worker"),
    "staleness": ({"staleness": -1}, "a number of steps >= 0, got -1"),
    "half a step": ({"staleness": 0.5}, "a number of steps >= 0, got 0.5"),
}


@in_ranks(2)
def test_value_errors(rank: int) -> None:
    make = make_of("sgd")
    for servers in (3, "some", [0, "a"], [0.0], [0, 0], [2], []):
        with pytest.raises(ValueError, match="servers must be"):
            ParameterServer(Net(), make, servers=servers)  # type: ignore[arg-type]
    for options, text in WRONG.values():
        with pytest.raises(ValueError, match=text):
            ParameterServer(Net(), make, **options)
    for wrong in ([Net()], nn.ReLU):
        with pytest.raises(TypeError, match=r"expected a model, got (list|type)"):
            ParameterServer(wrong, make)  # type: ignore[arg-type]
    gone: dict[str, Any]
    for gone in ({"loss_scale": 2.0}, {"wire_dtype": torch.bfloat16}):  # of earlier versions
        with pytest.raises(TypeError, match=next(iter(gone))):
            ParameterServer(Net(), make, **gone)
    with pytest.raises(TypeError, match="got SGD"):
        ParameterServer(Net(), make(groups_of(Net())))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter requires grad"):
        ParameterServer(nn.ReLU(), make)
    with pytest.raises(ValueError, match="an optimizer of other parameters"):
        ParameterServer(Net(), lambda _: torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"must return a torch optimizer .* got list"):
        ParameterServer(Net(), lambda groups: groups)  # type: ignore[arg-type,return-value]
    model = Net()
    for groups, text in (
        (groups_of(model)[:1], "in no parameter group"),
        ([*groups_of(model), *groups_of(Net())], "that is not in the model"),
        ([{"params": [*model.parameters(), model.first.bias]}], "or repeated"),
    ):
        with pytest.raises(ValueError, match=text):
            ParameterServer(model, make, param_groups=groups)
    with pytest.raises(ValueError, match=re.escape("ranks disagree on the options: rank 0 has")):
        ParameterServer(model, make, staleness=rank)
    with pytest.raises(ValueError, match="ranks disagree on the parameters"):
        ParameterServer(nn.Linear(2, 2 + rank), make)
    for step in range(2):  # the model is as it was
        with ParameterServer(model, make, servers=[step], dedicated=True) as server:
            if rank == step:
                with pytest.raises(RuntimeError, match="a dedicated server calls serve"):
                    server.pull()
                server.serve()
                server.serve()  # there is nobody any more
                continue
            with pytest.raises(RuntimeError, match="for dedicated servers"):
                server.serve()
            loss_of(model, *batch(0)).backward()
            server.push()
            server.pull()
        with pytest.raises(RuntimeError, match=re.escape("pull() after close()")):
            server.pull()


def in_warmup(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Its groups have been written when it returns, and each step writes them again."""
    made = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(made, 0.1, total_iters=3)
    made.register_step_post_hook(lambda *_: schedule.step())
    for group in made.param_groups:
        group["weight_decay"] += 0.01
    return made


@in_ranks(2)
def test_make_optimizer_writes_into_its_groups(rank: int) -> None:
    """Its factors counted twice, as each server's was made of the written groups of another.

    A default that took a schedule's place: https://github.com/apache/mxnet/pull/16487
    """
    models = [Net(), Net()]
    alone = in_warmup([{"params": [*models[1].parameters()]}])
    with ParameterServer(models[0], in_warmup) as server:
        for step in range(STEPS):
            step_once(server, models[0], step, 0, 1)  # equal gradients: their mean is each of them
            loss_of(models[1], *batch(step, 0, 1)).backward()
            alone.step()
            alone.zero_grad()
        server.pull()
    for param, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-6)


@in_ranks(2)
def test_weights_that_are_loaded_late(rank: int) -> None:
    """The first gradient was theirs, and the update of the weights from before.

    https://github.com/deepspeedai/DeepSpeed/pull/762, https://github.com/learning-at-home/hivemind/issues/446
    """
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with ParameterServer(model, make_of("sgd")) as server:
        server.pull()
        for param in model.parameters():
            param.data.mul_(2)  # as an average of weights for an evaluation
        model.load_state_dict(before)
        server.pull()
        step_once(server, model, 0, rank, 2)
        server.pull()
    with ParameterServer(model, make_of("sgd")) as server:
        model.load_state_dict(before)
        for _ in range(2):
            with pytest.raises(ValueError, match="its servers have those of before: load weights"):
                server.pull()


@in_ranks(2)
def test_a_model_in_another_dtype(rank: int) -> None:
    """Servers keep that in which it was given."""
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with ParameterServer(model, lambda groups: torch.optim.SGD(groups, lr=0.1)) as server:
        for dtype in (torch.float16, torch.float32, torch.float64):
            model.to(dtype)
            before = model.weight.detach().clone()
            model(torch.ones(1, 2, dtype=dtype)).sum().backward()
            server.push()
            server.pull(fresh=True)
            found = model.weight.detach()
            torch.testing.assert_close(found, before - 0.1, rtol=2**-7, atol=2**-6)


@in_ranks(2)
def test_changed_models(rank: int) -> None:
    """On both ranks, so that they go on together."""
    model = Net()
    with ParameterServer(model, make_of("sgd")) as server:
        for change in (
            lambda: model.first.register_parameter("bias", nn.Parameter(torch.zeros(13))),
            lambda: model.first.weight.requires_grad_(False),
            lambda: model.register_parameter("more", nn.Parameter(torch.zeros(1))),
        ):
            bias, weight = model.first.bias, model.first.weight
            change()
            with pytest.raises(ValueError, match="close\\(\\) it, and make a new one"):
                server.push()
            model.first.bias = bias
            weight.requires_grad_(True)
        del model.more
        step_once(server, model, 0, rank, 2)
        embedding = model.first.weight
        embedding.grad = torch.zeros(13, 7).to_sparse()
        with pytest.raises(ValueError, match=r"the gradient of first\.weight is sparse"):
            server.push()
        embedding.grad = None
        step_once(server, model, 1, rank, 2)
        assert server.version == 1
