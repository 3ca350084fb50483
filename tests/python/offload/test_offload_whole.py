"""offload.Offloaded: optimizers of any class with states in host memory or in files, alone, under
zero.shard() at all stages, and in ZeRO-Infinity."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import covering, slow
from full_states import (
    full_state,
    full_weights,
    load_full_state,
    load_full_weights,
    load_parts,
    save_parts,
)
from ranks import in_ranks, run_ranks
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from whole_optimizers import Averaged, Muon64, SmoothMuon, by_dimensions, whole
from zero_models import (
    STEPS,
    Net,
    assert_alike,
    assert_close,
    batch,
    check_traffic,
    loss_of,
    place_of,
    same,
    train,
    train_on_halves,
    weights,
)

from ringcomm.parallel import get_state_dict, offload, zero

WIDTH = 129  # matrices of the blocks are above 64 KiB, others below
SYSTEMS = ["1", "2", "3", "infinity"]


@whole
class Counting(Muon64):
    """Counts its steps in a group and, as a number and as a tensor, in a state; replaces a state,
    keeps one of integers, one in a list, and one without elements."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["num_calls"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_calls"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=torch.tensor(0.0), num=0, rows=[torch.zeros(len(param))])
                    state.update(signs=torch.zeros_like(param, dtype=torch.int8))
                    state.update(mean=torch.zeros_like(param), none=torch.zeros(0))
                    state.update(odd=torch.zeros_like(param), even=torch.zeros_like(param))
                state["step"] += 1
                state["num"] += 1
                # Two that change places, and one that is new.
                state["odd"], state["even"] = state["even"], state["odd"]
                state["odd"].add_(param.grad)
                param.sub_(state["odd"], alpha=0.01)
                state["mean"] = 0.9 * state["mean"] + param.grad
                state["rows"][0].mul_(0.9).add_(param.grad.square().sum(1))
                state["signs"] += param.grad.sign().to(torch.int8)
                scale = (state["rows"][0][:, None] + 1e-3).rsqrt() + 0.01 * state["signs"]
                param.sub_(state["mean"] * scale, alpha=group["lr"] / group["num_calls"])


KINDS: dict[str, Any] = {
    "Muon64": Muon64,
    "Muon": functools.partial(torch.optim.Muon, lr=0.02),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.02),
    "Counting": Counting,
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3),
}


def plain(model: nn.Module, kind: str = "Muon64") -> list[torch.optim.Optimizer]:
    """One of matrices and one of others, in two groups if it can be."""
    groups: list[Any] = [{"params": [*model.parameters()]}]
    if kind == "Adam":
        return [KINDS[kind](groups)]
    return by_dimensions(
        groups, KINDS[kind], functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
    )


def offloaded(model: nn.Module, kind: str = "Muon64", **where: Any) -> list[Any]:
    """All offloaded; AdamW by chunks."""
    first, *rest = plain(model, kind)
    found: list[Any] = [offload.Offloaded(first, **where)]
    return found + [
        offload.Offloaded(torch.optim.AdamW(each.param_groups, 0.01, eps=1e-3), **where)
        for each in rest
    ]


def shard(model: nn.Module, given: Any, system: str, **options: Any) -> zero.ZeroOptimizer:
    if system == "infinity":
        return zero.shard(model, given, 3, offload_weights=True, **options)
    return zero.shard(model, given, int(system), **options)


# ---- alone


@pytest.mark.parametrize("to", ["cpu", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
def test_alone_it_has_the_bits_of_its_class(kind: str, to: str, tmp_path: Path) -> None:
    """And its state goes to the class, and comes from there."""
    theirs, ours, third = Net(), Net(), Net()
    expected: list[Any] = plain(theirs, kind)
    found: list[Any] = plain(ours, kind)
    found[0] = own = offload.Offloaded(found[0], **place_of(to, tmp_path))
    train(theirs, expected, steps=range(3))
    train(ours, found, steps=range(3))
    assert same(weights(ours), weights(theirs))
    state = own.state_dict()
    assert repr(state["state"]) == repr(expected[0].state_dict()["state"])
    assert state["param_groups"] == expected[0].state_dict()["param_groups"]
    third.load_state_dict(theirs.state_dict())
    again: list[Any] = plain(third, kind)
    for each, of in zip(again[1:], found[1:], strict=True):
        each.load_state_dict(copy.deepcopy(of.state_dict()))
    again[0] = offload.Offloaded(again[0], **place_of(to, tmp_path / "again"))
    again[0].load_state_dict(own.state_dict())
    begun = plain(ours, kind)  # that has a state already
    begun[0].load_state_dict(own.state_dict())
    found[0] = offload.Offloaded(begun[0], **place_of(to, tmp_path / "begun"))
    for model, given in ((theirs, expected), (ours, found), (third, again)):
        train(model, given, steps=range(3, STEPS))
    assert same(weights(ours), weights(theirs))
    assert same(weights(third), weights(theirs))
    for offloading in (own, again[0], found[0]):
        offloading.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_16_bit_weights_have_masters(tmp_path: Path) -> None:
    """What is written into a weight between steps replaces its own masters only."""
    half, whole = Net().to(torch.bfloat16), Net()
    load_full_weights(whole, {name: x.float() for name, x in weights(half).items()})
    ours = offload.Offloaded(plain(half)[0], to="nvme", path=tmp_path)
    theirs = plain(whole)[0]
    for step in range(4):
        for i, (low, full) in enumerate(zip(half.parameters(), whole.parameters(), strict=True)):
            generator = torch.Generator().manual_seed(10 * step + i)
            low.grad = torch.randn(low.shape, generator=generator).to(torch.bfloat16)
            full.grad = low.grad.float()
            if step == 2:
                with torch.no_grad():
                    low.view(-1)[0] = full.view(-1)[0] = 0.5
        ours.step()
        theirs.step()
    for low, full in zip(half.parameters(), whole.parameters(), strict=True):
        if low.dim() == 2:
            assert torch.equal(low, full.to(torch.bfloat16))
            assert torch.equal(ours.state[low]["master"], full.detach())


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
        assert optimizer.tier.memory_bytes <= 4 * largest + 4096
        assert sum(param.nbytes for param in model.parameters()) > 25 * largest


def test_a_damaged_byte_is_an_error_before_its_weight_is_written(tmp_path: Path) -> None:
    model = Net(width=WIDTH)
    first, *_ = optimizers = offloaded(model, "Muon", to="nvme", path=tmp_path)
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
    train(replicated, offloaded(model), rank=rank, world_size=2)
    train(alone, plain(alone))
    assert_close(weights(model), weights(alone))


# ---- what users of other libraries reported


def test_schedulers_and_frozen_weights() -> None:
    """https://github.com/pytorch/ao/issues/959 and /1209: an offloading optimizer was no Optimizer
    and had no defaults, and refused weights that do not require grad."""
    theirs, ours = Net(is_frozen=True), Net(is_frozen=True)
    expected = torch.optim.NAdam(theirs.parameters(), 0.01)
    own = offload.Offloaded(torch.optim.NAdam(ours.parameters(), 0.01), chunk_elems=50)
    assert own.defaults["lr"] == 0.01
    assert own.defaults == expected.defaults
    for each in (expected, own):
        schedulers = [
            lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)),
            lr_scheduler.CosineAnnealingLR(each, 9),
        ]
        model = theirs if each is expected else ours
        for step in range(4):
            train(model, each, steps=range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
    assert same(weights(ours), weights(theirs))


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
    own = offload.Offloaded(plain(model, "Counting")[0])
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


@functools.cache
def alone(kind: str, width: int, options: str = "") -> dict[str, Tensor]:
    model = Net(width=width)
    more: dict[str, Any] = {"clip": 0.1} if "clip" in options else {}
    train(model, plain(model, kind), num_micro_batches=2 if "micro" in options else 1, **more)
    return full_weights(model)


@pytest.mark.parametrize(
    ("world_size", "system", "kind", "options", "to"),
    [
        slow(2, "1", "Muon64", "", "cpu"),
        (3, "1", "Adafactor", "mixed", "nvme"),
        (2, "2", "Counting", "mixed clip", "nvme"),
        slow(3, "2", "Adam", "micro", "cpu"),
        (6, "2", "Muon64", "scale", "cpu"),  # more ranks than matrices
        (3, "3", "Muon64", "micro scale", "nvme"),
        (2, "3", "Adafactor", "clip", "cpu"),
        slow(2, "3", "Adam", "mixed", "nvme"),
        (1, "infinity", "Counting", "", "nvme"),
        slow(2, "infinity", "Muon64", "", "cpu"),
        (3, "infinity", "Muon64", "clip micro", "nvme"),
        slow(2, "infinity", "Adafactor", "scale", "nvme"),
        (3, "infinity", "Counting", "micro", "cpu"),
        slow(2, "infinity", "Adam", "clip", "nvme"),
        slow(6, "infinity", "Muon64", "", "nvme"),
    ],
)
@in_ranks()
def test_steps_are_those_of_one_process(
    rank: int, world_size: int, system: str, kind: str, options: str, to: str, tmp_path: Path
) -> None:
    width = WIDTH if system == "infinity" else 13
    model = Net(width=width)
    given = offloaded(model, kind, **place_of(to, tmp_path))
    if "mixed" in options:  # not all are offloaded
        given[1:] = plain(model, kind)[1:]
    more: dict[str, Any] = {"clip_grad_norm": 0.1} if "clip" in options else {}
    if "scale" in options:
        more["loss_scale"] = 1.0
    optimizer = shard(model, given, system, **more)
    num = 2 if "micro" in options else 1
    train(model, optimizer, rank=rank, world_size=world_size, num_micro_batches=num)
    found = full_weights(model)
    tolerance = 1e-5 if system == "infinity" else 2e-6
    assert_close(found, alone(kind, width, options.replace("scale", "")), tolerance)
    assert_alike(found)


@pytest.mark.parametrize(
    ("system", "width", "num_steps"),
    [*((system, 13, STEPS) for system in SYSTEMS[:3]), *((system, WIDTH, 1) for system in SYSTEMS)],
)
@in_ranks(2)
def test_matrices_have_the_bits_of_one_process(
    rank: int, system: str, width: int, num_steps: int, tmp_path: Path
) -> None:
    """In Infinity for a step: AdamW by chunks rounds otherwise than torch's, as gradients show."""
    alone, model = Net(width=width), Net(width=width)
    train_on_halves(alone, plain(alone, "Muon"), num_steps)
    given = offloaded(model, "Muon", **place_of("nvme", tmp_path))
    if system != "infinity":
        given[1:] = plain(model, "Muon")[1:]
    train(model, shard(model, given, system), rank, 2, range(num_steps))
    matrices = {name: x for name, x in full_weights(alone).items() if x.dim() == 2}
    assert same(full_weights(model), matrices)


def save(rank: int, system: str, kind: str, where: dict[str, Any], num_steps: int = 3) -> Any:
    model = Net(width=WIDTH)
    optimizer = shard(model, offloaded(model, kind, **where), system)
    first = full_state(optimizer)["state"]  # before a step, what stands for none
    assert {*first} == {name for name, _ in model.named_parameters()}
    train(model, optimizer, rank, 2, range(num_steps))
    native = optimizer.state_dict()
    optimizer.load_state_dict(native)
    again = full_state(optimizer)
    train(model, optimizer, rank, 2, range(num_steps, STEPS))
    return full_weights(model), again


def load(
    rank: int, world_size: int, system: str, kind: str, where: dict[str, Any], state: Any
) -> dict[str, Tensor]:
    model = Net(width=WIDTH)
    train(model, plain(model, kind), steps=range(3))
    optimizer = shard(model, offloaded(model, kind, **where), system)
    load_full_state(optimizer, state)
    train(model, optimizer, rank, world_size, range(3, STEPS))
    return full_weights(model)


@pytest.mark.parametrize(
    ("system", "kind", "to", "other"),
    [
        ("1", "Muon64", "nvme", "infinity"),
        slow("2", "Adam", "cpu", "3"),
        ("3", "Counting", "nvme", "1"),
        ("infinity", "Muon64", "nvme", "2"),
        slow("infinity", "Adam", "cpu", "infinity"),
        slow("infinity", "Counting", "cpu", "3"),
        ("2", "Adafactor", "nvme", "infinity"),
    ],
)
def test_states_of_2_ranks_go_to_3_and_to_one_process(
    system: str, kind: str, to: str, other: str, tmp_path: Path
) -> None:
    expected = alone(kind, WIDTH)
    (found, state), _ = run_ranks(2, save, system, kind, place_of(to, tmp_path / "two"))
    assert_close(found, expected, 2e-5)
    where = place_of(to, tmp_path / "three")
    for mine in run_ranks(3, load, 3, other, kind, where, state):
        assert_close(mine, expected, 2e-5)
    model = Net(width=WIDTH)
    optimizers: list[Any] = plain(model, kind)
    train(model, optimizers, steps=range(3))
    optimizers = plain(model, kind)
    optimizers[0] = offload.Offloaded(optimizers[0])
    for each in optimizers:
        names = {p: name for name, p in model.named_parameters()}
        load_full_state_alone(each, names, state)
    train(model, optimizers, steps=range(3, STEPS))
    assert_close(weights(model), expected, 2e-5)


def load_full_state_alone(optimizer: Any, names: dict[Any, str], state: Any) -> None:
    native = optimizer.state_dict()
    own = {}
    for group, saved in zip(optimizer.param_groups, native["param_groups"], strict=True):
        for number, param in zip(saved["params"], group["params"], strict=True):
            own[number] = copy.deepcopy(state["state"][names[param]])
        for given in state["param_groups"]:
            if names[group["params"][0]] in given["params"]:
                saved |= {
                    key: value for key, value in given.items() if key in saved.keys() - {"params"}
                }
    optimizer.load_state_dict({"state": own, "param_groups": native["param_groups"]})


# ---- Infinity


def resume(
    rank: int,
    scratch: Path,
    saved: Path,
    kind: str,
    dtype: torch.dtype,
    steps: tuple[int, int],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Loads a checkpoint unless it begins at step 0; saves one at the end."""
    model = Net(width=WIDTH).to(dtype)
    given = offloaded(model, kind, to="nvme", path=scratch)
    scheduler = lr_scheduler.StepLR(given[0], 1, 0.9)
    optimizer: Any = shard(model, given, "infinity")
    if steps[0] > 0:
        load_parts(model, optimizer, saved)
        scheduler.last_epoch = steps[0]
    for step in range(*steps):
        x, y = batch(step, rank, 2)
        loss_of(model, x.to(dtype), y).backward()
        optimizer.step()
        scheduler.step()
    found = full_weights(model), full_state(optimizer)
    save_parts(model, optimizer, saved)
    optimizer.close()
    return found


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return repr(found["param_groups"]) == repr(expected["param_groups"]) and all(
        repr(value) == repr(expected["state"][name][key])
        and (not isinstance(value, Tensor) or torch.equal(value, expected["state"][name][key]))
        for name, state in found["state"].items()
        for key, value in state.items()
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(["Muon64", "Adafactor", "Counting", "Adam"], [torch.float32, torch.bfloat16]),
)
def test_a_run_continues_from_its_checkpoint(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By torch.distributed.checkpoint, with the bits and counts of a run without an end."""
    run = functools.partial(run_ranks, 2, resume, tmp_path / "scratch")
    expected = run(tmp_path / "whole", kind, dtype, (0, 5))
    first = run(tmp_path / "saved", kind, dtype, (0, 3))
    again = run(tmp_path / "saved", kind, dtype, (3, 3))
    found = run(tmp_path / "saved", kind, dtype, (3, 5))
    for ours, theirs in ((again, first), (found, expected)):
        for (mine, state), (other, of_other) in zip(ours, theirs, strict=True):
            assert same(mine, other)
            assert same_state(state, of_other)


@in_ranks(2)
def test_masters_are_loaded_before_the_first_step(rank: int) -> None:
    states: list[dict[str, Any]] = []
    for _ in range(2):
        model = Net(width=WIDTH).to(torch.bfloat16)
        optimizer = shard(model, offloaded(model), "infinity")
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
    given = offloaded(model, "Muon64", to="nvme", path=tmp_path)
    place: dict[str, Any] = {"world_size": 3, "rank": rank, "offload_weights": True}
    memory = zero.predict_memory(model, given, 3, **place)
    optimizer = check_traffic(model, given, 3, rank, 3, offload_weights=True)
    assert memory.states == 0 == len(optimizer.state_tensors())


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
    optimizer = shard(models[1], sharded, "infinity")
    train(models[0], given[0])
    train(models[1], optimizer, rank=rank, world_size=2)
    assert_close(full_weights(models[1]), weights(models[0]), 1e-5)


@whole
class Failing(SmoothMuon):
    def direction(self, mean: Tensor) -> Tensor:
        if mean.shape[0] == 3 and self.param_groups[0]["lr"] < 0.02:
            raise ArithmeticError("no direction")
        return super().direction(mean)


@pytest.mark.parametrize("system", ["2", "3", "infinity"])
@in_ranks(2)
def test_an_error_of_one_owner_is_everybodys(rank: int, system: str, tmp_path: Path) -> None:
    model = Net(width=WIDTH)
    matrices = Failing([p for p in model.parameters() if p.dim() == 2])
    where: dict[str, Any] = {"to": "nvme", "path": tmp_path}
    others = offload.Offloaded(
        torch.optim.SGD([p for p in model.parameters() if p.dim() != 2], 0.1), **where
    )
    optimizer = shard(model, [offload.Offloaded(matrices, **where), others], system)
    train(model, optimizer, rank, 2, range(1))
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(
        (ArithmeticError, RuntimeError), match=r"no direction|on another rank, which owns"
    ):
        train(model, optimizer, rank, 2, range(1, 2))


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_weights_without_gradients(rank: int, system: str, tmp_path: Path) -> None:
    """A weight without a gradient, one that is frozen and thawed, and halves with masters."""
    width = WIDTH if system == "infinity" else 13
    model, alone = Net(width=width), Net(width=width)
    for each in (model, alone):
        torch.manual_seed(1)
        each.unused = nn.Linear(5, 5)
        each.blocks[0].requires_grad_(False)
    given, expected = offloaded(model, **place_of("nvme", tmp_path)), plain(alone)
    schedulers = [lr_scheduler.StepLR(each, 2, 0.5) for each in (given[0], expected[0])]
    optimizer = shard(model, given, system)
    for step in range(STEPS):
        if step == 2:
            for each in (model, alone):
                each.blocks[0].requires_grad_(True)
                each.blocks[1].requires_grad_(False)
        train(model, optimizer, rank, 2, range(step, step + 1))
        train(alone, expected, steps=range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert_close(full_weights(model), weights(alone), 2e-5)
    state = full_state(optimizer)["state"]
    assert state["unused.weight"].keys() == state["first.weight"].keys()


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_schedule_free(rank: int, system: str, tmp_path: Path) -> None:
    width = WIDTH if system == "infinity" else 13
    model, alone = Net(width=width), Net(width=width)
    expected, own = Averaged(alone.parameters()), Averaged(model.parameters())
    optimizer = shard(model, offload.Offloaded(own, **place_of("nvme", tmp_path)), system)
    for step in range(4):
        for each in (expected, optimizer):
            each.train()
        train(alone, expected, steps=range(step, step + 1))
        train(model, optimizer, rank, 2, range(step, step + 1))
        for each in (expected, optimizer):
            each.eval()
        assert_close(full_weights(model), weights(alone), 1e-5)
    with pytest.raises(RuntimeError, match="call train"):
        train(model, optimizer, rank, 2, range(1))


@in_ranks(2)
def test_what_infinity_refuses(rank: int, tmp_path: Path) -> None:
    model = Net()
    muon, adamw = plain(model, "Muon")
    before = weights(model)
    own = offload.Offloaded(muon)
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
            shard(model, given, "infinity")
    assert same(weights(model), before)
    optimizer: Any = shard(
        model, [own, offload.Offloaded(torch.optim.AdamW(adamw.param_groups))], "infinity"
    )
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
