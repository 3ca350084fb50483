"""Names in state dicts: those of the model without torch's wrappers, and what else modules save."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import in_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict as get_by_torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import get_state_dict, pipeline, set_state_dict, zero
from ringcomm.parallel.model.describe import describe, plain_name


class Net(nn.Module):
    """With a tied weight, a buffer, and a submodule whose name is that of a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.module(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def wrapped(kind: str) -> Any:
    net: Any = Net()
    if "layers" in kind:
        wrap = checkpoint_wrapper if "checkpoint" in kind else compiled
        for idx in range(2):
            net.layers[idx] = wrap(net.layers[idx])
        net.module = compiled(checkpoint_wrapper(net.module))
    if kind.startswith("compiled"):
        net = compiled(net)
    if "DDP" in kind:
        net = DistributedDataParallel(net)
    return net


KINDS = ("plain", "DDP", "compiled", "checkpoint layers", "compiled layers", "DDP, compiled layers")


def train(net: Any, optimizer: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        net(torch.arange(6.0).view(2, 3)).sum().backward()
    apply_steps(optimizer)


@in_ranks(2)
def test_a_state_goes_between_models_with_and_without_wrappers(rank: int) -> None:
    plain = Net()
    names, params = [*plain.state_dict()], [name for name, _ in plain.named_parameters()]
    states = {}
    for stage in (0, 2, 3):
        for kind in KINDS if stage == 0 else ("compiled", "checkpoint layers"):
            net = wrapped(kind)
            optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-2)
            optimizer = zero.shard(net, optimizer, stage) if stage else optimizer
            train(net, optimizer)
            values, state = states[kind, stage] = get_state_dict(net, optimizer, full=True)
            assert list(values) == names, kind
            assert sorted(state["state"]) == sorted(params), kind
            assert state["param_groups"][0]["params"] == params, kind
            # From the state of the kind before, and back.
            given = states[[*states][max(len(states) - 2, 0)]]
            set_state_dict(net, optimizer, *given)
            assert_close(get_state_dict(net, optimizer, full=True)[0], given[0], rtol=0, atol=0)
    by_torch: Any = get_by_torch(net := wrapped("DDP"), torch.optim.AdamW(net.parameters()))
    assert (list(by_torch[0]), sorted(by_torch[1]["state"])) == (names, sorted(params))


def test_names_by_the_kind_of_modules() -> None:
    net = wrapped("checkpoint layers")
    assert [*describe(net).names] == [*describe(Net()).names]
    assert plain_name(net, "layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
    assert plain_name(net, "layers.0.weight") == "layers.0.weight"
    around = compiled(net)
    assert plain_name(around, "_orig_mod.module.0.bias") == "module.0.bias"
    assert plain_name(around, "_orig_mod.renamed.by.a.hook") == "renamed.by.a.hook"
    users = nn.Module()  # not one of torch
    users._orig_mod = nn.Linear(2, 2)
    assert plain_name(users, "_orig_mod.weight") == "_orig_mod.weight"


class Extra(nn.Linear):
    seen: Any = None

    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Loadless(nn.Linear):
    def get_extra_state(self) -> Any:
        return 5


@in_ranks(2)
def test_extra_states_are_saved_and_set(rank: int) -> None:
    """Of any type; a tensor may have another shape than the state that it replaces."""
    for stage in (0, 1, 3):
        for value in ({"scale": 3}, torch.arange(rank + 2.0), None):
            net, other = (nn.Sequential(checkpoint_wrapper(Extra(value))) for _ in range(2))
            optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
            optimizer = zero.shard(net, optimizer, stage) if stage else optimizer
            values, _state = get_state_dict(net, optimizer, full=True, rank0_only=stage == 1)
            assert set(values) == (
                {"0.weight", "0.bias", "0._extra_state"} if stage != 1 or rank == 0 else set()
            )
            owner: Any = other[0]._checkpoint_wrapped_module
            set_state_dict(other, None, values, rank0_only=stage == 1)
            wanted = torch.arange(2.0) if isinstance(value, Tensor) else value
            assert_close(owner.seen, wanted)
    with pytest.raises(ValueError, match=r"lacks \['0\._extra_state'\]"):
        set_state_dict(other, None, {k: v for k, v in values.items() if "extra" not in k})
    values, _ = get_state_dict(made := nn.Sequential(Loadless(2, 2)), full=True)
    with pytest.raises(ValueError, match=r"0\._extra_state is made by a module's own saving code"):
        set_state_dict(made, None, values)


@in_ranks(2)
def test_what_hooks_rename_has_one_name_for_weights_and_states(rank: int) -> None:
    def rename(_: Any, state: dict[str, Any], *__: Any) -> None:
        for name in [name for name in state if name.endswith("weight")]:
            state[name.replace("weight", "kernel")] = state.pop(name).clone()

    def renamed() -> Any:
        net = nn.Sequential(nn.Linear(3, 2))
        net.register_state_dict_post_hook(rename)
        return net

    net = nn.Sequential(nn.Linear(3, 2))
    net.register_state_dict_post_hook(
        lambda _, state, *__: state.__setitem__("0.kernel", state.pop("0.weight"))
    )
    optimizer = zero.shard(net, torch.optim.AdamW(net.parameters()), 2)
    values, state = get_state_dict(net, optimizer, full=True)
    assert (sorted(values), sorted(state["state"])) == (["0.bias", "0.kernel"],) * 2
    set_state_dict(net, optimizer, {k: v + 1 for k, v in values.items()}, state)
    assert_close(get_state_dict(net, full=True)[0]["0.kernel"], values["0.kernel"] + 1)
    # A copy that a hook makes is not written back, and says so.
    values, _ = get_state_dict(renamed(), full=True)
    with pytest.raises(ValueError, match=r"0\.kernel is made by a module's own saving code"):
        set_state_dict(renamed(), None, values)


@in_ranks(2)
def test_what_strict_leaves_out_is_told(rank: int) -> None:
    """Also the states of an optimizer; with values of the same names none is silent."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    values, state = get_state_dict(net, optimizer, full=True)
    wrong = {**state, "state": {f"old.{name}": of for name, of in state["state"].items()}}
    with pytest.raises(ValueError, match=r"unknown names \['old\.layers"):
        set_state_dict(net, optimizer, values, wrong)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_state_dict(net, optimizer, values, wrong, strict=False)
    texts = [str(w.message) for w in caught if "strict=False" in str(w.message)]
    assert len(texts) == (rank == 0)
    assert all("21 values of the optimizer's state" in text for text in texts), texts


@in_ranks(2)
def test_groups_are_found_by_the_names_of_their_parameters(rank: int) -> None:
    def made(order: tuple[int, ...], stage: int) -> tuple[Any, Any]:
        net = Net()
        groups: list[dict[str, Any]] = [
            {"params": list(net.module.named_parameters()), "lr": 0.1, "mine": [1]},
            {"params": [], "lr": 0.2, "param_names": []},
            {"params": list(net.layers.named_parameters()), "lr": 0.3},
        ]
        optimizer: Any = torch.optim.AdamW([groups[idx] for idx in order])
        return net, zero.shard(net, optimizer, stage) if stage else optimizer

    for stage in (0, 2, 3):
        net, optimizer = made((0, 1, 2), stage)
        values, state = get_state_dict(net, optimizer, full=True)
        state["param_groups"][2]["lr"] = 0.5
        other, found = made((2, 0, 1), stage)
        set_state_dict(other, found, values, state)
        assert [group["lr"] for group in found.param_groups] == [0.5, 0.1, 0.2]
        assert found.param_groups[1]["mine"] == [1]
        assert found.param_groups[1]["mine"] is not state["param_groups"][0]["mine"]
        names = [group["param_names"] for group in found.param_groups]
        assert names == [
            ["0.weight", "0.bias", "1.bias"],
            [*dict(net.module.named_parameters())],
            [],
        ]
    mixed = [
        {**group, "params": names}
        for group, names in zip(
            state["param_groups"],
            (["module.0.weight", "layers.0.weight"], [], ["module.0.bias"]),
            strict=True,
        )
    ]
    mixed[2]["params"] += [n for n in state["state"] if all(n not in g["params"] for g in mixed)]
    with pytest.raises(ValueError, match=r"parameter groups of \[2, 0, 5\] parameters"):
        set_state_dict(other, found, values, {**state, "param_groups": mixed})
    with pytest.raises(ValueError, match="are in 2 groups of the state"):
        set_state_dict(other, found, values, {**state, "param_groups": mixed}, strict=False)


@in_ranks(2)
def test_other_owners_of_names(rank: int) -> None:
    """A pipeline with wrapped blocks."""
    blocks = [checkpoint_wrapper(nn.Linear(3, 3)) for _ in range(2)]
    pipe = pipeline.Pipeline(nn.Sequential(*blocks), nn.functional.mse_loss, num_microbatches=2)
    optimizer: Any = torch.optim.AdamW(pipe.parameters())
    values, state = get_state_dict(pipe, optimizer, full=True)
    assert sorted(values) == sorted(state["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    set_state_dict(pipe, optimizer, values, state)


@in_ranks(2)
def test_what_cannot_be_saved_is_refused(rank: int) -> None:
    net = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="has its own parts of flattened weights: use fully_shard"):
        get_state_dict(net)
    part = ColumnParallelLinear(4, 4, gather_output=True)
    groups = [torch.distributed.new_group([r]) for r in range(2)]
    with pytest.raises(ValueError, match=r"have 8 of 16 elements of model\.weight: pass the group"):
        get_state_dict(part, full=True, group=groups[rank])
