"""zero.shard() with optimizers of other classes than AdamW and SGD, of torch and of users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_state, load_full_state
from ranks import in_ranks
from steps import apply_steps, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
)
from whole_optimizers import EachWeight, Kron, by_dimensions, elementwise, whole
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    Net,
    Towers,
    assert_close,
    batch,
    loss_of,
    same,
    weights,
)

from ringcomm.parallel import zero
from ringcomm.parallel.optimizer_classes import optimizers_of

HALF = 3  # steps before the states are saved
STEPS = 6


@elementwise
class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, as users write it: an argument without default, a number as `step`."""

    def __init__(self, params: Any, lr: float, *, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "num_calls": 0})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_calls"] += 1
            first, second = group["betas"]
            lr = group["lr"] / group["num_calls"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(param), skipped=None)
                state["step"] += 1
                param.mul_(1 - lr * self.decay)
                mean = state["exp_avg"]
                param.add_(torch.tanh(30 * mean.lerp(param.grad, 1 - first)), alpha=-lr)
                mean.lerp_(param.grad, 1 - second)


@elementwise
class Damped(torch.optim.AdamW):
    """A subclass whose step is not AdamW's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.clamp_(-0.1, 0.1)
        super().step(closure)


@whole
class Lamb(torch.optim.SGD):
    """By the norm of a weight's gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad /= param.grad.norm() + 1e-9
        super().step(closure)


@whole
class Rows(torch.optim.SGD):
    """With a state of a weight's rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(len(param))


class Joint(torch.optim.SGD):
    """By the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            torch._foreach_div_(grads, nn.utils.get_total_norm(grads))
        super().step(closure)


class Reduced(Lamb):
    """That sums over ranks itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(1))
        super().step(closure)


@elementwise
class Shadow(torch.optim.SGD):
    """With tensors that are no states."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.shadow = [param.detach().clone() for param in self.param_groups[0]["params"]]


@elementwise
class Wrapper(torch.optim.SGD):
    """Around another optimizer, whose step would be the whole weights'."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.optimizer = torch.optim.SGD(self.param_groups[0]["params"], lr)


def muon_and_adamw(params: Any, lr: float) -> list[torch.optim.Optimizer]:
    others = partial(torch.optim.AdamW, lr=lr / 2)
    return by_dimensions([{"params": [*params]}], partial(torch.optim.Muon, lr=lr), others)


def muon_alone(params: Any, lr: float) -> torch.optim.Optimizer:
    """Of one matrix, which one rank owns. The others are frozen."""
    params = [*params]
    own = next(param for param in params if param.dim() == 2)
    for param in params:
        param.requires_grad_(param is own)
    return torch.optim.Muon([own], lr)


def two_of_one_class(params: Any, lr: float) -> list[torch.optim.Optimizer]:
    params = [*params]
    return [torch.optim.Adafactor(params[:3], lr), torch.optim.Adafactor(params[3:], lr / 2)]


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01, "betas": (0.5, 0.6)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2}),
    "SGD, maximize": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    "Lion": (Lion, {"lr": 0.01, "decay": 0.5}),
    "Damped": (Damped, {"lr": 0.01}),
    "Lamb": (Lamb, {"lr": 0.01, "momentum": 0.9}),
    "Rows": (Rows, {"lr": 0.01}),
    "two": (two_of_one_class, {"lr": 0.02}),
    "Muon and AdamW": (muon_and_adamw, {"lr": 0.02}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
    "Kron": (Kron, {"lr": 0.02}),
    "Muon": (muon_alone, {"lr": 0.02}),
}
UNUSED_FROM = 2  # the step from which the second tower is not used any more


def kinds_of(stage: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each class at one stage; tests/python/pairs has some of them at each."""
    return {k: v for i, (k, v) in enumerate(KINDS.items()) if i % 3 + 1 == stage}


def make_towers() -> Any:
    return Towers(1)


def backward(model: Any, optimizer: Any, step: int, rank: int) -> None:
    """Two micro-batches on each of two ranks."""
    used = [0] if step >= UNUSED_FROM else [0, 1]
    generator = torch.Generator().manual_seed(10 * step + rank)
    for part in torch.randn(2, 3, 6, generator=generator):
        loss = model(part, used).square().mean()
        (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()


def train_towers(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, optimizer, step, rank)
        apply_steps(optimizer)


def train_alone(model: Any, optimizer: Any, steps: range, clip: float | None) -> None:
    """One process that averages the gradients of two halves, as two ranks do."""
    for step in steps:
        grads = []
        for rank in range(2):
            model.zero_grad()
            backward(model, None, step, rank)
            grads.append([param.grad for param in model.parameters()])
        for param, first, second in zip(model.parameters(), *grads, strict=True):
            param.grad = None if first is None else (first + second) / 2
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in optimizers_of(optimizer):
            each.step()
        model.zero_grad()


def stepped(
    kind: Any, arguments: dict[str, Any], stage: int, options: dict[str, Any], saved: Any, rank: int
) -> tuple[Any, Any]:
    """The towers and their optimizer after some steps; with `saved`, from there to the end."""
    model = make_towers()
    given = kind(model.parameters(), **arguments)
    if saved is not None:
        model.load_state_dict(saved[0])
    optimizer = zero.shard(model, given, stage, bucket_bytes=BUCKET_BYTES, **options)
    if saved is not None:
        load_full_state(optimizer, saved[1])
    train_towers(model, optimizer, rank, range(HALF) if saved is None else range(HALF, STEPS))
    return model, optimizer


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (2, {"clip_grad_norm": 0.1, "loss_scale": 1024.0}), (3, {"loss_scale": 1024.0})],
)
@in_ranks(2, timeout_s=120)
def test_other_classes(rank: int, stage: int, options: dict[str, Any]) -> None:
    """Unused weights, micro-batches; states go to another stage and to one process."""
    clip = options.get("clip_grad_norm")
    for kind, arguments in kinds_of(stage).values():
        model, optimizer = stepped(kind, arguments, stage, options, None, rank)
        values, state = weights(model), full_state(optimizer)
        train_towers(model, optimizer, rank, range(HALF, STEPS))
        again, _ = stepped(kind, arguments, stage % 3 + 1, options, (values, state), rank)
        found = weights(again)
        assert_close(found, weights(model))
        alone, resumed = make_towers(), make_towers()
        plain = kind(alone.parameters(), **arguments)
        train_alone(alone, plain, range(HALF), clip)
        assert_close(values, weights(alone))
        resumed.load_state_dict(values)
        other = kind(resumed.parameters(), **arguments)
        for group in state["param_groups"]:  # torch loads no keys that it does not know
            group.pop("loss_scale", None)
            group.pop("loss_scale_good_steps", None)
        # No state of the weights that are never used.
        whole = StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(resumed, other, state, options=whole)
        train_alone(resumed, other, range(HALF, STEPS), clip)
        assert_close(weights(resumed), weights(model))
        expected: Any = get_state_dict(alone, plain)[1]["state"]
        for weight, of_weight in expected.items():
            assert set(state["state"][weight]) == {k for k, v in of_weight.items() if v is not None}


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS updates several weights together"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam needs or keeps more"),
    "Joint": (
        lambda params: Joint(params, 0.1),
        "does not know whether Joint does: pass elementwise",
    ),
    "Reduced": (lambda params: Reduced(params, 0.1), "does not know whether Reduced does"),
    "Shadow": (lambda params: Shadow(params, 0.1), "Shadow keeps tensors, a module or an"),
    "Wrapper": (lambda params: Wrapper(params, 0.1), "Wrapper keeps tensors, a module or an"),
}


@pytest.mark.parametrize("stage", [2, 3])
@in_ranks(2)
def test_classes_that_are_refused(rank: int, stage: int) -> None:
    for make, words in BAD.values():
        model = Net()
        before = weights(model)
        optimizer = make(model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # lr is 0 at first
        seed = torch.get_rng_state()
        with pytest.raises(TypeError, match=words):
            zero.shard(model, optimizer, stage)
        assert torch.equal(torch.get_rng_state(), seed)
        assert same(weights(model), before)
        loss_of(model, *batch(0)).backward()
        optimizer.zero_grad()  # it still works


@in_ranks(2)
def test_adagrad_on_meta(rank: int) -> None:
    """Its state exists before the first step, but has no values on the meta device."""
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="Adagrad already has state on the meta device"):
        zero.shard(model, torch.optim.Adagrad(model.parameters()), 2)


class ByRow(EachWeight):
    """Whose state has one element for each row, so that its step is not elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def update(self, group: dict[str, Any], param: Any) -> None:
        rows = self.state[param].setdefault("rows", torch.zeros(len(param)))
        rows += param.grad.reshape(len(param), -1).sum(1)
        param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_a_state_of_another_shape_is_refused_before_a_change(rank: int, stage: int) -> None:
    model = nn.Linear(3, 2)
    given = ByRow(model.parameters())
    train_step(model(torch.eye(3)).square().sum(), given)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rows of parameter 0 must have .* shape \(2, 3\), got"):
        zero.shard(model, given, stage, elementwise=[ByRow])
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, before)
    train_step(model(torch.eye(3)).square().sum(), given)  # was not given away
