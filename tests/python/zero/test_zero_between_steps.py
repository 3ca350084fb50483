"""What loops do around zero.shard() and between its steps: right, or an error that helps."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import covering
from full_states import full_weights
from ranks import in_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    STEPS,
    Net,
    assert_close,
    batch,
    loss_of,
    make,
    make_optimizer,
    same,
    train,
    train_alone,
    weights,
)

from ringcomm.parallel import offload, zero
from ringcomm.torch_names import TORCH_VERSION

INFINITY = 4  # a stage of these tests: 3 with offload_weights
OFFLOADED: dict[str, Any] = {"place": {"to": "cpu"}, "offload_weights": True}


def make_stage(stage: int, kind: str = "adamw", model: Any = None) -> Any:
    options = OFFLOADED if stage == INFINITY else {}
    return make(min(stage, 3), kind, model, **options)


def given_and_sharded(
    stage: int, prepare: Callable[[Any], Any] = lambda _: None
) -> tuple[Net, Any, Any, Any]:
    """A model, its optimizer, the given one, and what prepare() made of that before it was sharded.

    Stage 0 is the given optimizer in one process.
    """
    model, is_infinity = Net(), stage == INFINITY
    given = make_optimizer(model, "adamw", **({"to": "cpu"} if is_infinity else {}))
    options: dict[str, Any] = {"offload_weights": True} if is_infinity else {}
    prepared = prepare(given)
    if not stage:
        return model, given, given, prepared
    options["bucket_bytes"] = BUCKET_BYTES
    return model, zero.shard(model, given, min(stage, 3), **options), given, prepared


def make_schedulers(optimizer: Any) -> list[Any]:
    """Of all options that schedulers set, and a warm-up from a learning rate of 0.

    https://github.com/pytorch/pytorch/pull/113548: one looks for momentum in the defaults.
    """
    schedulers = torch.optim.lr_scheduler
    cycle = schedulers.OneCycleLR(optimizer, [0.02, 0.04], total_steps=2 * STEPS)
    return [cycle, schedulers.LambdaLR(optimizer, lambda step: min(1.0, step / 3))]


def train_scheduled(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    model, optimizer, given, schedules = given_and_sharded(stage, make_schedulers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for step in range(STEPS):
            train(model, optimizer, rank, world_size, range(step, step + 1))
            for schedule in schedules:
                schedule.step()
    assert optimizer.param_groups[1]["lr"] == given.param_groups[1]["lr"]
    return weights(model) if stage != INFINITY else full_weights(optimizer)


@pytest.mark.parametrize("stage", [*STAGES, INFINITY])
@in_ranks(2)
def test_a_scheduler_of_the_given_optimizer(rank: int, stage: int) -> None:
    assert_close(train_scheduled(rank, 2, stage), train_scheduled(0, 1, 0), 2e-5)


@pytest.mark.parametrize(
    ("kind", "cycled"), [("adamw", {"betas"}), ("momentum", {"momentum"}), ("muon", set())]
)
@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(1)
def test_momentum_is_cycled_where_all_groups_have_it(
    rank: int, stage: int, kind: str, cycled: set[str]
) -> None:
    """OneCycleLR asks the defaults, and then sets the option in every group."""
    _, optimizer = make(stage, kind)
    assert optimizer.defaults.keys() & {"betas", "momentum"} == cycled
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, optimizer, 0.1, total_steps=4)
    if cycled:
        cycle(max_momentum=0.75)
        for group in optimizer.param_groups:
            assert 0.75 in (group.get("momentum"), group.get("betas", (0,))[0])
    else:
        with pytest.raises(ValueError, match="must support momentum"):
            cycle()
        cycle(cycle_momentum=False)


@pytest.mark.parametrize("stage", [*STAGES, INFINITY])
@in_ranks(2)
def test_the_given_optimizer_raises(rank: int, stage: int) -> None:
    """Before it writes; weight decay needs no gradient's values."""
    called: list[Any] = []
    model, sharded, given, _ = given_and_sharded(
        stage, lambda given: given.register_step_post_hook(lambda each, *_: called.append(each))
    )
    before = full_weights(model)
    loss_of(model, *batch(0, rank, 2)).backward()
    calls: list[Callable[[], Any]] = [
        *(given.step, given.zero_grad, given.state_dict),
        lambda: given.load_state_dict({"state": {}, "param_groups": []}),
        lambda: given.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"use the optimizer that zero\.shard\(\) returned"):
            call()
    assert same(full_weights(model), before)
    sharded.step()
    assert called == [sharded]
    after = full_weights(model)
    assert not torch.equal(after["first.weight"], before["first.weight"])


def zero_steps(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()
        state["exp_avg"].zero_()


def replace(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.01)


RESETS: dict[str, Callable[[Any], object]] = {
    "assign": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "clear": lambda optimizer: optimizer.state.clear(),
    "zero": zero_steps,
    "replace": replace,
    "delete": lambda optimizer: optimizer.state.pop(optimizer.param_groups[1]["params"][0]),
}


def train_reset(rank: int, world_size: int, stage: int, how: str) -> dict[str, Tensor]:
    model, optimizer, _, _ = given_and_sharded(stage)
    train(model, optimizer, rank, world_size, range(3))
    RESETS[how](optimizer)
    train(model, optimizer, rank, world_size, range(3, STEPS))
    return weights(model)


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_states_can_be_reset(rank: int, stage: int) -> None:
    for how in RESETS:
        assert_close(train_reset(rank, 2, stage, how), train_reset(0, 1, 0, how), 2e-5)


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_copies(rank: int, stage: int) -> None:
    """Offloaded states cannot be assigned, and no sharded optimizer copied; models can be."""
    model, optimizer = make_stage(stage)
    train(model, optimizer, rank, 2, range(2))
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled: save ringcomm"):
            call(optimizer)
    if stage < 3:
        values, file = weights(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = copy.deepcopy(model), torch.load(file, weights_only=False)
        average = AveragedModel(model)
        train(model, optimizer, rank, 2, range(2, 3))
        for found in (*copies, average.module):
            assert same(weights(found), values)
            x, y = batch(0)
            loss_of(found.to(torch.float64), x.double(), y).backward()
        average.update_parameters(model)
        assert not same(weights(average.module), values)
    model, optimizer = make(stage, "adamw", place={"to": "cpu"})
    train(model, optimizer, rank, 2, range(1))
    with pytest.raises(AttributeError, match=r"use load_state_dict\(\) to replace them"):
        optimizer.state = {}
    assert len(optimizer.state) == len(list(model.parameters()))


class Features(nn.Module):
    """Random features, and running statistics."""

    angles: Tensor

    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        with torch.device(device):
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.register_buffer("angles", torch.empty(4, 4))
        self.register_buffer("number", torch.tensor(seed), persistent=False)
        nn.init.normal_(self.angles, generator=torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[1](self.layers[0](torch.sin(x @ self.angles)))
        return out


@pytest.mark.parametrize("made_on", ["cpu", "meta"])
@pytest.mark.parametrize("stage", [*STAGES, INFINITY])
@in_ranks(2)
def test_buffers_are_those_of_rank_0(rank: int, stage: Any, made_on: str) -> None:
    model: Any = Features(5 + rank, made_on)
    if stage == INFINITY:
        given = offload.Offloaded(torch.optim.AdamW(model.parameters()), to="cpu")
        zero.shard(model, given, 3, offload_weights=True)
    else:
        zero.shard(model, torch.optim.AdamW(model.parameters()), stage)
    expected: Any = Features(5, "cpu")
    assert torch.equal(model.angles, expected.angles)
    assert int(model.number) == 5
    assert torch.equal(model.layers[1].running_var, torch.ones(4))


@pytest.mark.parametrize("stage", [*STAGES, INFINITY])
@in_ranks(2)
def test_hooks_of_weights(rank: int, stage: int) -> None:
    """Those of gradients run, or are refused; those after the accumulation are refused."""
    late, early = Net(), Net()
    late.scale.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match="scale has a hook of register_post_accumulate_grad_hook"):
        make_stage(stage, "momentum", late)
    early.first.weight.register_hook(lambda grad: 0.5 * grad)
    if stage == 3:
        with pytest.raises(ValueError, match=r"first\.weight has a hook of register_hook\(\)"):
            make_stage(stage, "momentum", early)
        model, optimizer = make(stage)
        loss_of(model, *batch(0, rank, 2)).backward()
        before = weights(model)
        model.first.weight.register_hook(lambda grad: grad)
        with pytest.raises(ValueError, match="which stage 3 would never call"):
            optimizer.step()
        assert same(weights(model), before)
        return
    _, optimizer = make_stage(stage, "momentum", early)
    train(early, optimizer, rank, 2)
    alone = Net()
    alone.first.weight.register_hook(lambda grad: 0.5 * grad)
    train(alone, make_optimizer(alone, "momentum"))
    assert_close(full_weights(optimizer), weights(alone), 1e-5)


# ---- errors say what happened


@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(2)
def test_texts_of_flat_stages(rank: int, stage: int) -> None:
    model, optimizer = make(stage)
    loss_of(model, *batch(0, rank, 2)).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\), which drops"):
        model.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, rank, 2)
    assert_close(weights(model), train_alone("momentum"))
    loss_of(model, *batch(0, rank, 2)).backward()
    with pytest.raises(RuntimeError, match=r"cast or moved after zero\.shard\(\): do it before"):
        model.double()


@pytest.mark.parametrize("stage", [3, INFINITY])
@in_ranks(2)
def test_sharded_weights_stay_where_they_are(rank: int, stage: int) -> None:
    model, optimizer = make_stage(stage, "momentum")
    for move in (model.double, partial(model.to, "meta"), partial(model.last.to, torch.float16)):
        with pytest.raises(RuntimeError, match=r"call these before zero\.shard"):
            move()
    train(model, optimizer, rank, 2)
    assert_close(full_weights(optimizer), train_alone("momentum"), 1e-5)


@pytest.mark.parametrize("stage", [3, INFINITY])
@in_ranks(2)
def test_a_gradient_penalty_is_refused(rank: int, stage: int) -> None:
    """But not one that needs no weight; then steps that are right."""
    model, optimizer = make_stage(stage, "momentum")
    before = full_weights(optimizer)
    x, y = batch(0, rank, 2)
    with pytest.raises(RuntimeError, match=r"use stage 1 or 2 of zero\.shard"):
        torch.autograd.grad(loss_of(model, x.requires_grad_(), y), x, create_graph=True)
    optimizer.zero_grad()
    assert same(full_weights(optimizer), before)


class Failing(torch.autograd.Function):
    """Raises in the forward or the backward pass of a step."""

    fails_in = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if Failing.fails_in == "forward":
            raise ArithmeticError
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.fails_in == "backward":
            raise ArithmeticError
        return grad


# fully_shard continues after an error from torch 2.13 on.
CONTINUE = [stage for stage in [*STAGES, INFINITY] if stage != 3 or TORCH_VERSION >= (2, 13)]


@pytest.mark.parametrize(("stage", "where"), covering(CONTINUE, ["first", "last", "blocks.1"]))
@in_ranks(2)
def test_an_exception_in_a_pass(rank: int, stage: int, where: str) -> None:
    """All ranks drop the batch and continue.

    https://github.com/pytorch/torchtitan/issues/1329: batches that do not fit are skipped.
    https://github.com/pytorch/torchtitan/pull/3724: units stay as they were in the error.
    """
    model, optimizer = make_stage(stage, "momentum")
    model.get_submodule(where).register_forward_hook(lambda _, __, out: Failing.apply(out))
    before = full_weights(optimizer)
    Failing.fails_in = "backward"
    with pytest.raises(ArithmeticError):
        loss_of(model, *batch(7, rank, 2)).backward()
    Failing.fails_in = ""
    if stage == 3:
        with pytest.raises(RuntimeError, match="a backward pass raised an error at stage 3"):
            optimizer.step()
    optimizer.zero_grad()
    assert same(full_weights(optimizer), before)
    train(model, optimizer, rank, 2)
    loss_of(model, *batch(STEPS, rank, 2)).backward()
    Failing.fails_in = "forward"  # of a micro-batch, which is left out
    with pytest.raises(ArithmeticError):
        model(batch(7, rank, 2)[0])
    Failing.fails_in = ""
    apply_steps(optimizer)
    alone = Net()
    train(alone, make_optimizer(alone, "momentum"), steps=range(STEPS + 1))
    assert_close(full_weights(optimizer), weights(alone), 1e-5)
