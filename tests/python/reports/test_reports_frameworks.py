"""Faults that users of frameworks on top of sharded training reported, looked for here."""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import in_ranks, run_ranks
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

from ringcomm import MismatchError
from ringcomm.optim import Lomo
from ringcomm.parallel import (
    clip_grad_norm_,
    get_state_dict,
    offload,
    set_state_dict,
    zero,
)

SHARDED = ("zero 3", "infinity")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def shard(model: nn.Module, system: str, units: Any = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if system == "infinity":
        offloaded = offload.Offloaded(optimizer)
        return zero.shard(model, offloaded, 3, units=units, offload_weights=True)
    if "zero" not in system:
        return optimizer
    return zero.shard(model, optimizer, int(system[-1]), units=units)


def full(model: nn.Module) -> dict[str, Tensor]:
    return get_state_dict(model, full=True)[0]


def values_of(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Full weights, and full states by weight."""
    values, states = get_state_dict(model, optimizer, full=True)
    return values, states["state"]


# ---- what cannot be called


class Pair(nn.Module):
    """Without a forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net()[:2], nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def chain(parts: Any, x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


CONTAINERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "list": (lambda: nn.ModuleList(net()), list),
    "dict": (lambda: nn.ModuleDict({"a": net()[:2], "b": net()[2]}), lambda m: m.values()),
    "nested": (
        lambda: nn.ModuleList([nn.ModuleList([*net()][:2]), net()[2]]),
        lambda m: [*m[0], m[1]],
    ),
    "no forward": (Pair, lambda m: [m.first, m.last]),
}


def loss_in(model: nn.Module, kind: str, seed: int) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    return chain(CONTAINERS[kind][1](model), x).square().mean()


@pytest.mark.parametrize("system", ["zero 3", "infinity"])
@pytest.mark.parametrize("kind", CONTAINERS)
@in_ranks(2)
def test_a_model_that_is_not_called_trains_by_its_parts(rank: int, kind: str, system: str) -> None:
    """https://github.com/pytorch/pytorch/issues/167856: fully_shard refuses containers."""
    found = []
    for each in ("one process", system):
        torch.manual_seed(0)
        model = CONTAINERS[kind][0]()
        optimizer = shard(model, each)
        for step in range(3):
            if each == "one process":
                losses = [loss_in(model, kind, 2 * step + of) for of in range(2)]
                torch.stack(losses).mean().backward()
                clip_grad_norm_(model, 0.5)
            else:
                loss_in(model, kind, 2 * step + rank).backward()
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if each == "zero 3":
            with optimizer.no_sync():
                loss_in(model, kind, rank).backward()
            optimizer.zero_grad()
        found.append(full(model))
    assert_close(*found)


@pytest.mark.parametrize("system", SHARDED)
@in_ranks(1)
def test_a_container_with_weights_of_its_own_is_refused_unchanged(rank: int, system: str) -> None:
    tied = nn.Linear(4, 4)
    for model, units in (
        (nn.ModuleDict({"a": net(), "own": nn.ParameterList([nn.Parameter(torch.ones(1))])}), None),
        (nn.ModuleList([nn.Sequential(tied), nn.Sequential(tied), nn.Linear(4, 1)]), None),
        (nn.Sequential(nn.ModuleList(net()), nn.Linear(1, 1)), "container"),
    ):
        given: Any = None if units is None else [model[0]]  # type: ignore[index]
        before, values = [*model.parameters()], copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"can be called, got Module.*: pass the parts"):
            shard(model, system, given)
        assert [*map(id, before)] == [*map(id, model.parameters())]
        assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)
    with pytest.raises(TypeError, match="units must be modules, got list"):
        shard(net(), system, [[]])


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("system", SHARDED)
@in_ranks(1)
def test_making_shards_is_linear_in_the_units(rank: int, system: str, where: str) -> None:
    """https://github.com/pytorch/pytorch/issues/95728: a slow start of models of many modules."""
    counts = []
    for num_layers in (8, 32, 128):  # the first warms up
        with torch.device(where):
            model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(num_layers)])
        num_calls = 0

        def count(_: Any, event: str, __: Any) -> None:
            nonlocal num_calls
            num_calls += event == "call"

        sys.setprofile(count)
        try:
            shard(model, system)
        finally:
            sys.setprofile(None)
        counts.append(num_calls)
    assert counts[2] < 5 * counts[1], counts  # 16 times as many if each unit walked the model


# ---- moves


@pytest.mark.parametrize("system", SHARDED)
@in_ranks(1)
def test_moves_that_change_nothing_do_nothing(rank: int, system: str) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/15822 and 19152,
    https://github.com/modelscope/ms-swift/issues/7871: a framework moves a sharded model."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
    optimizer = shard(model, system)
    moves: dict[str, Callable[[Any], Any]] = {
        "to cpu": lambda m: m.to("cpu"),
        "to a dtype": lambda m: m.to(torch.float32),
        "as another": lambda m: m.to(torch.ones(1)),
        "contiguous": lambda m: m.to(memory_format=torch.contiguous_format),
        "cpu": lambda m: m.cpu(),
        "float": lambda m: m.float(),
        "type": lambda m: m[0].type(torch.float32) and m,
        "requires_grad_": lambda m: m.requires_grad_(),
        "a layer": lambda m: m[0].float() and m,
    }
    for move in moves.values():
        assert move(model) is model
    changes: dict[str, Callable[[Any], Any]] = {
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "double": lambda m: m.double(),
        "type": lambda m: m.type(torch.float64),
        "meta": lambda m: m.to("meta"),
        "channels_last": lambda m: m.to(memory_format=torch.channels_last),
        "to_empty": lambda m: m.to_empty(device="cpu"),
        "share_memory": lambda m: m.share_memory(),
        "a layer": lambda m: m[0].half(),
    }
    for name, change in changes.items():
        with pytest.raises(RuntimeError, match="cannot move or cast"):
            change(model)
        assert not any(x.is_shared() for x in model.buffers()), name
    train_step(model(torch.ones(2, 1, 3, 3)).sum(), optimizer)


# ---- rows of an optimizer's state


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_a_file_of_one_ranks_states_is_refused(rank: int, stage: int) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/6387 and 10745,
    https://github.com/facebookresearch/fairscale/issues/8: rank 0 writes its part."""
    model = net()
    optimizer = shard(model, f"zero {stage}")
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    with torch.inference_mode():
        state = optimizer.state_dict()
    words = r"momentum_buffer of this .* part of one rank.*\(model, optimizer, full=True\)"
    kept = copy.deepcopy(state)
    for value in (state, kept):
        with pytest.raises(RuntimeError, match=words):
            torch.save(value, io.BytesIO())
    ForkingPickler.dumps(state["state"][1])  # for the process of async_save()
    before = values_of(model, optimizer)[1]
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.load_state_dict(kept)
    assert_close(values_of(model, optimizer)[1], before, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(1)
def test_one_rank_alone_writes_its_states(rank: int, stage: int) -> None:
    model = net()
    optimizer = shard(model, f"zero {stage}")
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    expected = values_of(model, optimizer)[1]
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    assert_close(values_of(model, optimizer)[1], expected, rtol=0, atol=0)


def checkpoints(rank: int, stage: int, way: str, folder: str) -> None:
    model = net()
    optimizer = shard(model, f"zero {stage}")
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    wanted = values_of(model, optimizer)

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    if way == "save":
        dcp.save(state(), checkpoint_id=folder)
    else:
        kind = dcp.state_dict_saver.AsyncCheckpointerType
        how = kind.PROCESS if way == "process" else kind.THREAD
        group: Any = dist.new_group(backend="gloo")
        options: dict[str, Any] = {"process_group": group, "async_checkpointer_type": how}
        if way == "shared":
            options["async_stager"] = dcp.staging.BlockingAsyncStager()
        dcp.async_save(state(), checkpoint_id=folder, **options).result()  # type: ignore[union-attr]
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    dcp.load(found := state(), checkpoint_id=folder)
    values, states = get_state_dict(model, optimizer)
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, values, states)
    assert_close(values_of(model, optimizer), wanted, rtol=0, atol=0)
    assert found["optimizer"]["state"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "way", ["save", "thread", "shared", pytest.param("process", marks=pytest.mark.slow)]
)
def test_torch_distributed_checkpoint_takes_the_rows(way: str, stage: int, tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/144657, https://github.com/pytorch/torchtitan/issues/3476:
    async_save() and the values that it copies."""
    run_ranks(2, checkpoints, stage, way, str(tmp_path / "saved"), fresh=way == "process")


@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(2)
def test_all_ranks_refuse_a_state_that_one_cannot_load(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/125177: one rank has another state."""
    model = net()
    optimizer = shard(model, f"zero {stage}")
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    state = optimizer.state_dict()
    cases: dict[str, Any] = {
        "rank 1: the state is from rank 0 of 2 and lacks": {**state, "rank": 0},
        "rank 1: KeyError": state if rank == 0 else {},
        "rank 0: .*NoneType": None if rank == 0 else state,
    }
    before = full(model)
    for words, given in cases.items():
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(given)
    assert_close(full(model), before, rtol=0, atol=0)
    optimizer.load_state_dict(state)


# ---- messages


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(1)
def test_weights_that_are_set_are_named(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/fairscale/issues/430 and 492: weights are written as one
    vector."""
    for how in ("vector", "data"):
        model = net()
        optimizer = shard(model, f"zero {stage}")
        model(torch.ones(2, 4)).sum().backward()
        if how == "vector" and stage < 3:
            vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
        else:
            weight: Any = model[0].weight
            weight.data = weight.data * 0.5
        with pytest.raises((RuntimeError, ValueError), match=r"`.data` of \d\.\w+ was set after"):
            optimizer.step()


@pytest.mark.parametrize("how", ["fused", "replicas", "shards", "hooks"])
@in_ranks(1)
def test_lomo_names_itself_where_a_graph_runs_again(rank: int, how: str) -> None:
    """https://github.com/kozistr/pytorch_optimizer/issues/64: weights are updated between two
    backward passes through one graph."""
    model = net()
    if how == "shards":
        fully_shard(model)
    params = model.parameters() if how == "hooks" else model
    group: Any = {"fused": "none", "shards": None}.get(how, dist.group.WORLD)
    optimizer = Lomo(params, 0.1, model=model, group=group)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    before = None if how == "shards" else full(model)
    with pytest.raises(RuntimeError, match=r"after its update by Lomo: .*accumulation_steps=N"):
        (2 * loss).backward()
    if before is not None:
        assert_close(full(model), before, rtol=0, atol=0)
    optimizer.step()
    optimizer.zero_grad()
    kept = model(torch.ones(2, 4, requires_grad=True)).sum()
    torch.autograd.grad(kept, [*model.parameters()][1], retain_graph=True)  # no update
    optimizer.zero_grad()


def one_rank_alone(rank: int, method: str) -> str:
    model = net()
    optimizer = shard(model, "zero 1")
    train_step(model(torch.ones(2, 4)).sum(), optimizer)
    model(torch.ones(2, 4)).sum().backward()
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": optimizer.state_dict,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(math.inf),
        "get_state_dict": lambda: full(model),
    }
    if rank == 1:
        calls[method] = optimizer.step
    with pytest.raises(MismatchError) as found:
        calls[method]()
    return str(found.value)


@pytest.mark.parametrize("method", ["state_dict", "clip_grad_norm_", "get_state_dict"])
def test_a_method_that_one_rank_calls_is_named(method: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/797: rank 0 alone saves, and hangs."""
    first, second = run_ranks(2, one_rank_alone, method, fresh=True)
    assert first.endswith(f"this rank is in {method}()"), first
    assert second.endswith("this rank is in step()"), second
