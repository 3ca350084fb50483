"""get_state_dict and set_state_dict: flat weights, offloaded states, files, other optimizers."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allocations import peak_bytes, record_allocations
from full_states import load_parts, save_parts
from ranks import in_ranks, run_ranks
from rows import EACH, Row, Training, momentum, offloaded
from steps import train_step
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from user_classes import OFFLOADED
from whole_optimizers import EachWeight, elementwise
from zero_models import batch as zero_batch

from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import get_state_dict, offload, set_state_dict, zero
from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.model.cut import range_boxes
from ringcomm.parallel.state.tensor_part import TensorPart


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (0, 3)])
def test_a_range_of_a_flat_tensor_is_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(whole.numel() + 1):
        for end in range(begin, whole.numel() + 1):
            local = whole.reshape(-1)[begin:end].clone()
            part = TensorPart(local, range_boxes(shape, begin, end), shape)
            assert len(part.boxes) <= max(1, 2 * len(shape) - 1)
            assert torch.equal(part.cut(whole), local)
            if whole.dim() == 2:  # no view
                assert torch.equal(part.cut(whole.t().contiguous().t()), local)
            found = torch.full_like(whole, -1)
            for box, piece in zip(part.boxes, part.pieces(), strict=True):
                box.of(found).copy_(piece)
            assert torch.equal(found.reshape(-1)[begin:end], local)
            assert int((found >= 0).sum()) == end - begin


# The tolerance of each. Without the moments or the counts of steps, weights differ by 6e-3 and
# more; float32 weights that went through 16 bits differ by 1e-3.
SYSTEMS = {
    "fully_shard, AdaLomo": 1e-5,
    "Infinity in files, 16 bits": 5e-3,
    "offload": 1e-5,
    "ZeRO-1 over offload, 16 bits": 5e-3,
    "ZeRO-3 over offload": 1e-5,
    "Infinity in files, Muon64": 2e-5,
    "Infinity over offload, Counting": 2e-5,
    "ZeRO-2 over offload, Adafactor": 2e-5,
    "ZeRO-3 over offload, Counting": 2e-5,
}


def system_of(name: str, folder: Path) -> tuple[nn.Module, Any]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "16 bits" in name else torch.float32
    # Pieces above 64 KiB are elsewhere; a convolution has moments of AdaLomo in one dimension.
    wide = 260 if "Infinity" in name else 13
    model: Any = nn.Sequential(
        nn.Linear(7, wide), nn.Tanh(), nn.Linear(wide, 131), nn.Unflatten(1, (1, 131))
    )
    model.extend([nn.Conv1d(1, 2, 5), nn.Flatten(), nn.Linear(254, 3)])
    if "AdaLomo" in name:
        if "fully_shard" in name:
            fully_shard(model)
        return model, AdaLomo(model, 0.02)
    model.to(dtype if "Infinity" in name else torch.float32)
    given = OFFLOADED.get(name.rsplit(", ", maxsplit=1)[-1], adamw)(model)
    own = offloaded(
        given,
        to="nvme" if "files" in name else "cpu",
        path=folder if "files" in name else None,
        chunk_elems=5000 if "Infinity" in name else 500,
    )
    if name == "offload":
        return model, own
    options: dict[str, Any] = {"offload_weights": True} if "Infinity" in name else {}
    if name.startswith("ZeRO-1"):
        options["param_dtype"] = dtype
    stage = int(name[5]) if name.startswith("ZeRO") else 3
    return model, zero.shard(model, own, stage, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, (0.9, 0.999), 1e-2)


def train_system(model: Any, optimizer: Any, steps: range) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if isinstance(optimizer, offload.Offloaded):  # of replicas
        rank, world_size = 0, 1
    for step in steps:
        x, y = zero_batch(step, rank, world_size)
        out = model(x.to(next(model.parameters()).dtype))
        train_step(nn.functional.mse_loss(out.float(), y), optimizer)


def save_system(rank: int, name: str, folder: Path) -> None:
    model, optimizer = system_of(name, folder / "files")
    train_system(model, optimizer, range(2))
    save_parts(model, optimizer, folder / "parts")
    found = get_state_dict(model, optimizer, full=True, rank0_only=True)
    if rank == 0:
        torch.save(found, folder / "whole.pt")


def load_system(rank: int, name: str, folder: Path) -> list[Any]:
    found = []
    for way in ("parts", "rank 0") if dist.get_world_size() > 1 else ("file",):
        model, optimizer = system_of(name, folder / f"{way} {dist.get_world_size()}")
        if way == "parts":
            load_parts(model, optimizer, folder / way)
        else:
            is_read = way == "file" or rank == 0
            states = torch.load(folder / "whole.pt", mmap=True) if is_read else ({}, {})
            set_state_dict(model, optimizer, *states, rank0_only=way == "rank 0")
        train_system(model, optimizer, range(2, 4))
        found.append(get_state_dict(model, optimizer, full=True))
    return found


def straight(rank: int, name: str, folder: Path) -> Any:
    """In one process; Lomo's without shards."""
    model, optimizer = system_of(name.split(", ")[1] if "Lomo" in name else name, folder)
    train_system(model, optimizer, range(4))
    return get_state_dict(model, optimizer, full=True)


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_go_between_numbers_of_ranks(name: str, tmp_path: Path) -> None:
    run_ranks(2, save_system, name, tmp_path)
    (expected,) = run_ranks(1, straight, name, tmp_path / "straight")
    ways = [way for n in (3, 1) for way in run_ranks(n, load_system, name, tmp_path)]
    for found in (state for of_rank in ways for state in of_rank):
        tolerances: dict[str, Any] = {"rtol": SYSTEMS[name], "atol": SYSTEMS[name]}
        assert_close(found[0], expected[0], **tolerances)
        assert_close(found[1]["state"], expected[1]["state"], **tolerances)


@in_ranks(2)
def test_a_file_is_read_where_the_parts_are(rank: int, tmp_path: Path) -> None:
    """Parts of a file, for a model on the meta device; names that the state lacks."""
    with torch.device("meta"):
        model: Any = nn.Sequential(ColumnParallelLinear(32, 64), RowParallelLinear(64, 32))
    file = tmp_path / f"{rank}.pt"
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).state_dict(), file)
    state = torch.load(file, mmap=True)
    with record_allocations() as sizes:
        set_state_dict(model, None, state)
    assert peak_bytes(sizes) <= 4 * (sum(param.numel() for param in model.parameters()) + 32)
    found = get_state_dict(model, full=True)[0]
    assert all(torch.equal(found[name], value) for name, value in state.items())
    some = {"1.bias": torch.ones(32), "stranger": torch.ones(1)}
    with pytest.raises(
        ValueError, match=r"lacks \['0.bias', '0.weight', '1.weight'\] and has unknown names \['s"
    ):
        set_state_dict(model, None, some)
    set_state_dict(model, None, some, strict=False)
    assert torch.equal(model[1].bias, torch.ones(32))
    assert torch.equal(get_state_dict(model, full=True)[0]["0.weight"], state["0.weight"])
    optimizer = AdaLomo(model)
    moments = get_state_dict(model, optimizer, full=True)[1]["state"]["0.weight"]
    assert {key: value.shape for key, value in moments.items()} == {
        "exp_avg_sq_row": (64,),
        "exp_avg_sq_col": (32,),
    }


@elementwise
class SecondMoments(EachWeight):
    """Keeps exp_avg_sq, as AdaLomo does for what is no matrix, in the shape of the weight."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, group: dict[str, Any], param: Any) -> None:
        state = self.state[param]
        moment = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        state["num_steps"] = state.get("num_steps", 0) + 1
        moment.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
        param.addcdiv_(param.grad, moment.sqrt().add_(1e-3), value=-group["lr"])


def second_moments(is_split: bool) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    if is_split:
        model[0] = ColumnParallelLinear.from_linear(model[0])
        model[1] = RowParallelLinear.from_linear(model[1])
    optimizer = SecondMoments(model.parameters())
    model(torch.ones(2, 6)).square().sum().backward()
    early = get_state_dict(model, optimizer, full=True)[1]["state"]
    assert early["1.weight"]["exp_avg_sq"].shape == (4, 8)
    optimizer.step()
    return get_state_dict(model, optimizer, full=True)


@in_ranks(2)
def test_an_optimizer_names_its_states_of_one_dimension(rank: int) -> None:
    """Not by the keys of a state; and gradients that wait for a step do not hinder it."""
    expected, found = second_moments(False), second_moments(True)
    assert found[1]["state"]["0.weight"]["exp_avg_sq"].shape == (8, 6)
    assert_close(found[0], expected[0])
    assert_close(found[1]["state"], expected[1]["state"])


def test_states_appear_again_after_they_were_dropped() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdaLomo(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    expected = get_state_dict(model, optimizer)[1]["state"]
    optimizer.state.clear()
    found = get_state_dict(model, optimizer)[1]["state"]
    shapes = [{key: value.shape for key, value in of["weight"].items()} for of in (expected, found)]
    assert shapes[0] == shapes[1]
    assert float(found["weight"]["exp_avg_sq_row"].sum()) == 0


@in_ranks(1)
def test_a_loss_scale_is_removed_for_an_optimizer_of_torch(rank: int) -> None:
    """torch's loader of full states knows no keys of groups that its optimizer lacks."""
    model = nn.Linear(3, 2)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()), 1, loss_scale=8.0)
    optimizer.scale(model(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    _, state = get_state_dict(model, optimizer, full=True)
    alone = nn.Linear(3, 2)
    plain = torch.optim.AdamW(alone.parameters())
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises(KeyError, match="loss_scale"):
        set_optimizer_state_dict(alone, plain, state, options=options)
    for group in state["param_groups"]:
        del group["loss_scale"], group["loss_scale_good_steps"]
    set_optimizer_state_dict(alone, plain, state, options=options)
    assert torch.equal(plain.state[alone.weight]["exp_avg"], state["state"]["weight"]["exp_avg"])


@in_ranks(2)
def test_a_part_of_another_rank_is_refused(rank: int) -> None:
    model: Any = nn.Sequential(ColumnParallelLinear(4, 6, bias=False))
    values, _ = get_state_dict(model)
    before = model[0].weight.detach().clone()
    rows = range_boxes((6, 4), 12 * (1 - rank), 12 * (2 - rank))
    part = TensorPart(torch.zeros(12), rows, (6, 4))
    with pytest.raises(ValueError, match=r"rank 0: 0\.weight is the part of another rank"):
        set_state_dict(model, None, dict.fromkeys(values, part))
    assert torch.equal(model[0].weight, before)


SCALED = ("zero 1", "zero 2", "zero 3", "infinity", "Lomo", "AdaLomo", "fully_shard, Lomo")


def scaled(name: str, folder: Path) -> tuple[nn.Module, Any]:
    """A model with a dynamic loss scale, and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 2)
    options: dict[str, Any] = {"loss_scale": "dynamic"}
    if "Lomo" in name:
        group = None if "fully_shard" in name else dist.group.WORLD
        if group is None:
            fully_shard(model)
        kind: Any = AdaLomo if "AdaLomo" in name else Lomo
        return model, kind(model, 0.1, group=group, **options)
    if name == "infinity":
        own: Any = offload.Offloaded(torch.optim.AdamW(model.parameters()), to="nvme", path=folder)
        return model, zero.shard(model, own, 3, offload_weights=True, **options)
    given = torch.optim.AdamW(model.parameters())
    return model, zero.shard(model, given, int(name[-1]), **options)


def scales(model: nn.Module, optimizer: Any, factors: str) -> list[float]:
    """The loss scale after each step; those with an i overflow on rank 1."""
    found = []
    for factor in factors:
        loss = optimizer.scale(model(torch.ones(1, 3)).sum())
        train_step(loss * (torch.inf if factor == "i" and dist.get_rank() == 1 else 1), optimizer)
        found.append(optimizer.loss_scale)
    return found


def resume(way: str, model: nn.Module, optimizer: Any, again: nn.Module, resumed: Any) -> None:
    """Loads one optimizer's state into another."""
    if way == "own":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif way == "ringcomm":
        values, state = copy.deepcopy(get_state_dict(model, optimizer))
        set_state_dict(again, resumed, values, state)
    elif way == "torch":
        values, state = copy.deepcopy(dcp.get_state_dict(model, optimizer))
        dcp.set_state_dict(again, resumed, model_state_dict=values, optim_state_dict=state)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(SCALED, ["own", "ringcomm"]),
        *((name, "torch") for name in SCALED if name != "infinity"),
    ],
)
@in_ranks(2)
def test_a_loss_scale_is_state(rank: int, name: str, way: str, tmp_path: Path) -> None:
    """And how many good steps are behind it: it doubles after two; an overflow ends the count."""
    with mock.patch.object(LossScale, "growth_interval", 2):
        model, optimizer = scaled(name, tmp_path / "first")
        assert scales(model, optimizer, "giig") == [2.0**16, 2.0**15, 2.0**14, 2.0**14]
        again, resumed = scaled(name, tmp_path / "again")
        resume(way, model, optimizer, again, resumed)
        assert scales(again, resumed, "gg") == [2.0**15, 2.0**15]
        assert "loss_scale" not in resumed.param_groups[0]


@pytest.mark.parametrize("system", [EACH, "offload", "zero 1", "zero 2, host", "zero 3"])
@in_ranks(2)
def test_states_that_are_loaded_after_a_look_are_used(rank: int, system: str) -> None:
    """get_state_dict() makes states that stand for none until the next step, which drops them:
    https://github.com/pytorch/pytorch/issues/164929 is of such states."""
    plain, *both = (
        Training(Row(optimizer=momentum), each, rank) for each in (EACH, system, system)
    )
    plain.begin().train(range(2))
    for made, has_looked in zip(both, (False, True), strict=True):
        made.model.load_state_dict(plain.model.state_dict())
        made.begin()
        if has_looked:
            made.save()
        made.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        made.train(range(2, 5))
    assert_close(both[0].weights(), both[1].weights(), rtol=0, atol=0)


def test_states_that_are_written_after_a_look_are_used() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 1.0, momentum=0.5)
    module = nn.ParameterList([weight])
    get_state_dict(module, optimizer)[1]["state"]["0"]["momentum_buffer"].fill_(4.0)
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [1 - (0.5 * 4 + 1)] * 3


class Wrapper:
    """Around an optimizer, as programs write it: with its groups, or with nothing but step()."""

    def __init__(self, optimizer: Any, *, forwards: bool) -> None:
        self.optimizer, self._forwards = optimizer, forwards

    def step(self) -> None:
        self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self._forwards:
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class Averaged(torch.optim.Optimizer):
    """A wrapper with a state of its own, as pytorch_optimizer's Lookahead."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        slow = {param: {"slow": param.detach().clone()} for param in params_in(optimizer)}
        self.state = defaultdict(dict, slow)


def params_in(optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("forwards", [False, True])
def test_an_optimizer_in_a_wrapper(forwards: bool) -> None:
    """Of dampened momentum the first step differs from one with a state of zeros."""
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, is_saved in zip(models, (False, True), strict=True):
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
        if is_saved:
            wrapper = Wrapper(Wrapper(inner, forwards=forwards), forwards=forwards)
            values, state = get_state_dict(model, wrapper)
            assert state["state"]["weight"].keys() == {"momentum_buffer"}
            set_state_dict(model, wrapper, values, {**state, "state": {}})
        for _ in range(2):
            train_step(model(torch.eye(3)).square().sum(), inner)
    assert_close(models[0].weight, models[1].weight, rtol=0, atol=0)


class Sharing(torch.optim.Optimizer):
    """A wrapper with the groups and the states of its optimizer, to which schedulers attach."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


def test_a_wrapper_shares_groups_and_states_after_they_are_set() -> None:
    """A scheduler from before sets the learning rate of the next step."""

    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        wrapper = Sharing(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        return model, wrapper, torch.optim.lr_scheduler.StepLR(wrapper, 1, 0.5)

    def train(model: Any, wrapper: Any, scheduler: Any) -> None:
        for step in range(2):
            train_step(model(torch.eye(3) + step).square().sum(), wrapper)
            scheduler.step()

    (model, wrapper, scheduler), resumed = made(), made()
    train(model, wrapper, scheduler)
    states = get_state_dict(model, wrapper)
    group, state = resumed[1].param_groups[0], resumed[1].state
    for _ in range(2):  # the second finds an optimizer that has states
        set_state_dict(*resumed[:2], *states)
    assert resumed[1].param_groups == resumed[1].optimizer.param_groups
    assert resumed[1].optimizer.param_groups[0] is group
    assert resumed[1].optimizer.state is state
    resumed[2].load_state_dict(scheduler.state_dict())
    train(*resumed)
    train(model, wrapper, scheduler)
    assert group["lr"] == wrapper.param_groups[0]["lr"] == 0.1 / 16
    assert_close(resumed[0].weight, model.weight, rtol=0, atol=0)


def test_a_wrapper_with_a_state_of_its_own_is_refused() -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(inner, 1)
    with pytest.raises(TypeError, match="StepLR is a scheduler: pass its optimizer"):
        get_state_dict(model, scheduler)
    with pytest.raises(TypeError, match="Averaged has other weights or states than its `opt"):
        get_state_dict(model, Averaged(inner))
    with pytest.raises(TypeError, match="expected an optimizer of torch's kind, got SimpleName"):
        get_state_dict(model, SimpleNamespace(param_groups=inner.param_groups, state=inner.state))
