"""offload.Offloaded: optimizers of any class with states in host memory or in files.

Their steps, alone and under zero.shard(), are rows of test_classes.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import (
    full_state,
    full_weights,
    load_full_state,
    load_full_weights,
)
from gradient_watch import states_of
from ranks import in_ranks
from rows import muon, offloaded, trained_by
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from user_classes import Counting
from whole_optimizers import Averaged
from zero_models import (
    STEPS,
    Net,
    assert_close,
    batch,
    check_traffic,
    loss_of,
    same,
    train,
    weights,
)

from ringcomm.parallel import get_state_dict, offload, zero

WIDTH = 129  # matrices of the blocks are above 64 KiB, others below

# ---- alone


def test_few_states_are_in_memory(tmp_path: Path) -> None:
    """Not those of all weights, also where no two have one shape."""
    model = nn.ModuleList(nn.Linear(100 + i, 512, bias=False) for i in range(40))
    muon = torch.optim.Muon(model.parameters(), ns_steps=1)
    optimizer = offload.Offloaded(muon, to="nvme", path=tmp_path)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        largest = 4 * 139 * 512
        assert optimizer.tier._pool.num_bytes <= 4 * largest + 4096  # type: ignore[attr-defined]
        assert sum(param.nbytes for param in model.parameters()) > 25 * largest


def test_a_damaged_byte_is_an_error_before_its_weight_is_written(tmp_path: Path) -> None:
    model = Net(width=WIDTH)
    optimizers = offloaded(muon(model), to="nvme", path=tmp_path)
    first = optimizers[0]
    train(model, optimizers, steps=range(1))
    store: Any = first.tier.store
    for key in [*store._pending]:
        store._settle(key)  # writes may be under way
    begun = weights(model)
    number = first._places[model.blocks[1].weight][0]
    (entry,) = (e for key, e in store._entries.items() if key.startswith(f"state.{number}."))
    path = f"/proc/self/fd/{store._fd}"
    with open(path, "r+b", buffering=0) as file:
        file.seek(entry.offset + 7)
        value = file.read(1)[0]
        file.seek(entry.offset + 7)
        file.write(bytes([value ^ 64]))
    loss_of(model, *batch(1)).backward()
    with pytest.raises(OSError, match=r"of its file is not what was written"):
        first.step()
    for name in ("blocks.1.weight", "blocks.2.weight", "last.weight"):
        assert torch.equal(weights(model)[name], begun[name])


def test_a_class_that_raises_leaves_the_step_to_be_repeated(tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    expected = Averaged(theirs.parameters())
    own = offload.Offloaded(Averaged(ours.parameters()), to="nvme", path=tmp_path)
    for step in range(4):
        for each in (expected, own):
            each.eval()
        with pytest.raises(RuntimeError, match="call train"):
            train(ours, own, steps=range(1))
        own.zero_grad()
        for each in (expected, own):
            each.train()
        train(theirs, expected, steps=range(step, step + 1))
        train(ours, own, steps=range(step, step + 1))
        assert same(weights(ours), weights(theirs))
    assert own.param_groups[0]["k"] == 4


@in_ranks(2)
def test_under_data_parallel(rank: int) -> None:
    model, alone = Net(), Net()
    replicated = DistributedDataParallel(model)
    train(replicated, offloaded(muon(model)), rank=rank, world_size=2)
    train(alone, muon(alone))
    assert_close(weights(model), weights(alone))


# ---- what users of other libraries reported


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adafactor"])
def test_torch_saves_and_loads_it(kind: str, tmp_path: Path) -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/2729: torch's own functions, of optimizers
    that have made a step or not. https://github.com/NovaSky-AI/SkyRL/pull/1403: with offloading, a
    checkpoint needed more than weights_only=True, and Adam's step count was stale after a load."""
    options = {"momentum": 0.9} if kind == "SGD" else {}

    def made(model: nn.Module) -> Any:
        given = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        return offload.Offloaded(given, chunk_elems=50)

    ours, path = Net(), tmp_path / "saved"
    own = made(ours)
    train(ours, own, steps=range(3))
    saved = ours.state_dict(), own.state_dict(), get_optimizer_state_dict(ours, own)
    torch.save(saved, path)
    train(ours, own, steps=range(3, STEPS))
    values, native, by_torch = torch.load(path, weights_only=True)
    for is_native in (True, False):
        again = Net()
        again.load_state_dict(values)
        resumed = made(again)
        if is_native:
            resumed.load_state_dict(native)
        else:
            set_optimizer_state_dict(again, resumed, by_torch)
        train(again, resumed, steps=range(3, STEPS))
        assert same(weights(again), weights(ours))
        steps = {int(state["step"]) for state in resumed.state.values() if "step" in state}
        assert steps <= {STEPS}
        assert steps or kind == "SGD"


def test_states_of_8_bits_stay_so() -> None:
    """As of https://github.com/bitsandbytes-foundation/bitsandbytes: a load casts no integers."""
    model = Net()
    own = offload.Offloaded(muon(model, Counting)[0])
    train(model, own, steps=range(2))
    saved = own.state_dict()
    own.load_state_dict(saved)
    state = own.state[model.first.weight]
    assert state["signs"].dtype == torch.int8
    assert torch.equal(state["signs"], saved["state"][0]["signs"])


def test_errors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    muon = torch.optim.Muon(model.parameters())
    own = offload.Offloaded(muon)
    with pytest.raises(RuntimeError, match=r"given to offload.Offloaded\(\) and no longer"):
        muon.step()
    with pytest.raises(ValueError, match="this Muon was given to another optimizer"):
        offload.Offloaded(muon)
    for given in (own, offload.Offloaded(torch.optim.SGD(model.parameters())), model):
        with pytest.raises(TypeError, match="neither offloaded nor sharded, got"):
            offload.Offloaded(given)  # type: ignore[arg-type]
    for kind, text in (
        (torch.optim.LBFGS, "updates sev"),
        (torch.optim.SparseAdam, "needs or keeps"),
    ):
        with pytest.raises(TypeError, match=f"{kind.__name__} {text}"):
            offload.Offloaded(kind(model.parameters()))
    with pytest.raises(ValueError, match=r"must have no path|needs path="):
        offload.Offloaded(torch.optim.SGD(model.parameters()), to="nvme")
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="elementwise= names Muon, which needs full weights"):
        offload.Offloaded(sgd, elementwise={torch.optim.Muon})
    with pytest.raises(AttributeError, match="has copies"):
        own.state = {model[0].weight: {}}


# ---- Infinity


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return repr(found["param_groups"]) == repr(expected["param_groups"]) and all(
        repr(value) == repr(expected["state"][name][key])
        and (not isinstance(value, Tensor) or torch.equal(value, expected["state"][name][key]))
        for name, state in found["state"].items()
        for key, value in state.items()
    )


@in_ranks(2)
def test_masters_are_loaded_before_the_first_step(rank: int) -> None:
    states: list[dict[str, Any]] = []
    for _ in range(2):
        model = Net(width=WIDTH).to(torch.bfloat16)
        optimizer = trained_by("infinity", model, muon(model))
        master = full_state(optimizer)["state"]["first.weight"]["master"]
        assert torch.equal(master, full_weights(model)["first.weight"].float())
        if states:
            load_full_state(optimizer, states[0])
        else:
            x, y = batch(0, rank, 2)
            loss_of(model, x.to(torch.bfloat16), y).backward()
            optimizer.step()
            saved = full_weights(model)
        load_full_weights(model, saved)
        states.append(full_state(optimizer))
    assert same_state(states[1], states[0])


@in_ranks(3)
def test_bytes_of_infinity_are_the_formulas(rank: int, tmp_path: Path) -> None:
    model = Net(width=WIDTH)
    given = offloaded(muon(model), to="nvme", path=tmp_path)
    place: dict[str, Any] = {"world_size": 3, "rank": rank, "offload_weights": True}
    memory = zero.predict_memory(model, given, 3, **place)
    optimizer = check_traffic(model, given, 3, rank, 3, offload_weights=True)
    assert memory.states == 0 == len(states_of(optimizer))


@in_ranks(2)
def test_optimizers_of_equal_weights_share_files(rank: int, tmp_path: Path) -> None:
    models = Net(width=WIDTH), Net(width=WIDTH)
    given: list[list[Any]] = [
        [torch.optim.Adam(each.blocks[i].parameters(), 0.001 * (i + 1), eps=1e-3) for i in range(3)]
        for each in models
    ]
    for model, own in zip(models, given, strict=True):
        for part in (model.first, model.last):
            part.requires_grad_(False)
        own[0].add_param_group({"params": [model.scale]})
    sharded = [offload.Offloaded(each, to="nvme", path=tmp_path) for each in given[1]]
    optimizer = trained_by("infinity", models[1], sharded)
    train(models[0], given[0])
    train(models[1], optimizer, rank=rank, world_size=2)
    assert_close(full_weights(models[1]), weights(models[0]), 1e-5)


@in_ranks(2)
def test_what_infinity_refuses(rank: int, tmp_path: Path) -> None:
    model = Net()
    matrices, adamw = muon(model)
    before = weights(model)
    own = offload.Offloaded(matrices)
    nvme: dict[str, Any] = {"to": "nvme", "path": tmp_path}
    cases: list[tuple[Any, str]] = [
        ([own, adamw], "offload_weights needs optimizers of class ringcomm.parallel.offload"),
        ([own, offload.Offloaded(adamw, **nvme)], "with equal `to` and `path`"),
        (
            [own, own, offload.Offloaded(torch.optim.AdamW(adamw.param_groups))],
            "two optimizers have",
        ),
    ]
    for given, text in cases:
        with pytest.raises(ValueError, match=text):
            zero.shard(model, given, 3, offload_weights=True)
    assert same(weights(model), before)
    given = [own, offload.Offloaded(torch.optim.AdamW(adamw.param_groups))]
    optimizer: Any = trained_by("infinity", model, given)
    with pytest.raises(RuntimeError, match=r"was given to zero\.shard"):
        own.step()
    optimizer.close()
    dist.barrier()


def test_what_is_loaded_is_checked_and_passes_the_hooks(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, width)) for width in (2, 5)]
    plain = torch.optim.SGD(models[1].parameters(), 0.1, momentum=0.9)
    train_step(models[1](torch.ones(2, 4)).square().mean(), plain)
    own = offload.Offloaded(torch.optim.SGD(models[0].parameters(), 0.1, momentum=0.9))
    with pytest.raises(ValueError, match="momentum_buffer of parameter 2 has 15 elements, but the"):
        own.load_state_dict(plain.state_dict())
    assert not own.state
    own = offload.Offloaded(torch.optim.SGD(models[1].parameters(), 0.1, momentum=0.9))
    seen: list[int] = []

    def doubled(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        for value in state["state"].values():
            value["momentum_buffer"] = 2 * value["momentum_buffer"]
        return state

    own.register_load_state_dict_pre_hook(doubled)
    own.register_load_state_dict_post_hook(lambda it: seen.append(len(it.state)))
    with torch.inference_mode():
        own.load_state_dict(copy.deepcopy(plain.state_dict()))
    for mine, theirs in zip(own.state.values(), plain.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], 2 * theirs["momentum_buffer"])
    assert seen == [4]
    train_step(models[1](torch.ones(2, 4)).square().mean(), own)


def test_states_of_another_mode_than_training_have_values() -> None:
    """Before a step, train() of a schedule-free class counts as none."""
    model = nn.Linear(4, 3)
    own = offload.Offloaded(Averaged(model.parameters()))
    own.train()
    found = get_state_dict(model, own)[1]["state"]
    assert {name: [*state] for name, state in found.items()} == {"weight": ["z"], "bias": ["z"]}
