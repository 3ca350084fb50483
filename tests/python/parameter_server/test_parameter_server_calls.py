"""ParameterServer: states to resume from, odd models and groups, and its errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ps_runs import groups_of, make_of, make_server, step_once, workers_of
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from zero_models import STEPS, Net, batch, loss_of, train_alone, weights

from ringcomm.parallel import ParameterServer, get_state_dict, set_state_dict


def resume(rank: int, layout: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Half of the steps, and the others by other servers, of a state and the weights."""
    workers = workers_of(layout, 3)
    saved: list[Any] = [None, None]
    for steps in (range(2), range(2, STEPS)):
        model = Net()
        if steps[0]:
            dist.broadcast_object_list(saved, src=workers[0])
        with make_server(model, layout, "momentum") as server:
            if steps[0]:
                set_state_dict(model, server, *saved)
            if rank not in workers:
                server.serve()
                continue
            for step in steps:
                step_once(server, model, step, workers.index(rank), len(workers))
            server.pull()
            saved = list(get_state_dict(model, server, full=True))
    return (weights(model), saved[1]) if rank in workers else None


def test_a_state_resumes(tmp_path: Path) -> None:
    """And is the one of torch's own optimizer, also through torch.distributed.checkpoint."""
    layout = "dedicated"
    expected = train_alone("momentum")
    model = Net()
    optimizer = make_of("momentum")(groups_of(model))
    results = run_ranks(3, resume, layout)
    for found, state in (results[rank] for rank in workers_of(layout, 3)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        assert state["param_groups"][1]["lr"] == 0.02
        assert "master" not in state["state"]["scale"]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        checkpoint.save({"model": found, "optimizer": state}, checkpoint_id=folder)
        values, loaded = get_state_dict(model, optimizer)
        checkpoint.load({"model": values, "optimizer": loaded}, checkpoint_id=folder)
        set_state_dict(model, optimizer, values, loaded)
        for name, param in model.named_parameters():
            assert torch.equal(param, found[name])
            buffer = optimizer.state[param]["momentum_buffer"]
            assert torch.equal(buffer, state["state"][name]["momentum_buffer"])


@in_ranks(2)
def test_weights_alone_are_loaded(rank: int) -> None:
    model = nn.Linear(3, 5)
    values = {name: torch.full_like(param, 2.0) for name, param in model.named_parameters()}
    with ParameterServer(model, make_of("sgd")) as server:
        set_state_dict(model, server, values)
        before = {name: param.clone() for name, param in model.named_parameters()}
        for _ in range(2):
            server.pull()
            (0 * model(torch.ones(1, 3)).sum()).backward()
            server.push()
        server.pull()
    assert all(torch.allclose(p, before[n], atol=0.2) for n, p in model.named_parameters())


@in_ranks(2)
def test_masters_are_kept(rank: int) -> None:
    """Weights travel in 16 bits; the state has those that the servers add to."""
    model = nn.Linear(3, 5)
    make = make_of("sgd")
    with ParameterServer(model, make, wire_dtype=torch.bfloat16) as server:
        for _ in range(3):
            server.pull()
            model(torch.ones(1, 3)).sum().backward()
            server.push()
        server.pull()
        state = get_state_dict(model, server)[1]
    for name, param in model.named_parameters():
        master = state["state"][name]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(param, master.bfloat16().float())
        assert not torch.equal(param, master)
    with ParameterServer(model, make, wire_dtype=torch.bfloat16) as server:
        set_state_dict(model, server, None, state if rank == 0 else {}, rank0_only=True)
        again = get_state_dict(model, server)[1]
        for name in ("weight", "bias"):
            assert torch.equal(again["state"][name]["master"], state["state"][name]["master"])
        first = get_state_dict(model, server, full=True, rank0_only=True)
        assert (first == ({}, {})) == (rank > 0)
        groups = [{"params": ["weight", "bias"]}]
        for wrong, text in (
            ({"state": {}, "param_groups": [{"params": ["weight"]}]}, r"parameter groups of \[1\]"),
            (
                {"state": {"bias": {"master": torch.ones(4)}}, "param_groups": groups},
                r"rank 0: bias\.master must have shape \(5,\), got \(4,\) in the state",
            ),
            (
                {"state": {"other": {"step": torch.ones(())}}, "param_groups": groups},
                r"has unknown names \['other\.step'\]",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                set_state_dict(model, server, None, wrong)


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "ASGD", "Rprop"])
@in_ranks(2)
def test_a_state_before_the_first_step_is_none(rank: int, kind: str) -> None:
    """It has a value for every key, as every optimizer's, and the first step begins without."""
    make = getattr(torch.optim, kind)
    alone, model = nn.Linear(3, 2), nn.Linear(3, 2)
    with ParameterServer(alone, make) as server:
        before = get_state_dict(alone, server)[1]
        assert sorted(before["state"]) == ["bias", "weight"]
        server.pull()
        alone(torch.ones(1, 3)).sum().backward()
        values = {name: value.clone() for name, value in weights(alone).items()}
        server.push()
        server.pull()
    with ParameterServer(model, make) as server:
        set_state_dict(model, server, values, before)
        model(torch.ones(1, 3)).sum().backward()
        server.push()
        server.pull()
        after = get_state_dict(model, server)[1]["state"]["weight"]
    assert float(after["step"]) == 1
    torch.testing.assert_close(weights(model), weights(alone), rtol=0, atol=0)


@in_ranks(2)
def test_groups_are_matched_by_names(rank: int) -> None:
    """Also in another order, where sizes alone tell nothing."""
    rates, make = {"weight": 0.1, "bias": 0.2}, make_of("momentum")
    states: list[dict[str, Any]] = []
    for names in (["weight", "bias"], ["bias", "weight"]):
        model = nn.Linear(3, 2)
        groups = [{"params": [getattr(model, n)], "lr": rates.pop(n, 0.3)} for n in names]
        with ParameterServer(model, make, param_groups=groups) as server:
            if states:
                set_state_dict(model, server, None, states[0])
            states.append(get_state_dict(model, server)[1])
    for state in states:
        found = {group["params"][0]: group["lr"] for group in state["param_groups"]}
        assert found == {"weight": 0.1, "bias": 0.2}


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
        assert len(get_state_dict(model, server)[1]["param_groups"]) == 3
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
    "wire_dtype": ({"wire_dtype": torch.int8}, "a floating-point dtype"),
}


@in_ranks(2)
def test_value_errors(rank: int) -> None:
    make = make_of("sgd")
    for options, text in WRONG.values():
        with pytest.raises(ValueError, match=text):
            ParameterServer(Net(), make, **options)
    for wrong in ([Net()], nn.ReLU):
        with pytest.raises(TypeError, match=r"expected a model, got (list|type)"):
            ParameterServer(wrong, make)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_scale"):  # an option of earlier versions
        ParameterServer(Net(), make, loss_scale=2.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="got SGD"):
        ParameterServer(Net(), make(groups_of(Net())))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter requires grad"):
        ParameterServer(nn.ReLU(), make)
    with pytest.raises(ValueError, match="an optimizer of other parameters"):
        ParameterServer(Net(), lambda _: torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="must return a torch optimizer, got list"):
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
