"""What loops do around zero.shard() and between its steps: rows of rows.py."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import in_ranks
from rows import (
    EACH,
    STAGES,
    ZERO,
    Blocks,
    Row,
    Training,
    adamw,
    cases_of,
    check,
    momentum,
    muon,
    sgd,
    square,
    squared,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler
from whole_optimizers import Muon64
from zero_models import Net, batch

from ringcomm.parallel import set_state_dict

# ---- options and schedulers


def options_change(made: Training) -> None:
    """Others than the learning rate, and whole parameter groups."""
    for step in range(6):
        made.train([step])
        groups = made.optimizer.param_groups
        for group in groups[::2]:
            group["momentum"] = (0.9, 0.5, 0.0)[step % 3]
            group.update(weight_decay=0.1 * step, nesterov=step % 3 == 0, maximize=step == 4)
        groups[1] = {**groups[1], "lr": 0.05 * step}


def group_for_each(model: Any) -> Any:
    groups = [{"params": [p], "lr": 0.1 * 0.8**i} for i, p in enumerate(model.parameters())]
    return torch.optim.SGD(groups)


def of_matrices(kind: Any, model: Any, **options: Any) -> Any:
    """With its learning rate in a tensor."""
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    return kind([p for p in model.parameters() if p.dim() == 2], torch.tensor(0.05), **options)


def rate_in_a_tensor(made: Training) -> None:
    """The user keeps the tensor, and a scheduler sets it."""
    scheduler = lr_scheduler.ExponentialLR(made.optimizer, 0.5)
    for step in range(2):
        made.train([step])
        scheduler.step()
    made.early.fill_(0.1)
    made.train(range(2, 4))


def its_rate(given: Any) -> Any:
    return given.param_groups[0]["lr"]


def two_groups(model: Any) -> Any:
    params = [*model.parameters()]
    groups: list[Any] = [
        {"params": params[:3]},
        {"params": params[3:], "lr": 0.02, "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, 0.01, eps=1e-3)


def nadam(model: Any) -> Any:
    return torch.optim.NAdam(model.parameters(), 0.01)


def one_cycle(optimizer: Any) -> list[Any]:
    """It sets all options that schedulers set; and a warm-up from a learning rate of 0."""
    cycle = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)
    return [cycle, lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))]


def scheduled(made: Training) -> list[float]:
    """By schedulers of the given optimizer, or of that of zero.shard()."""
    schedulers = made.early or one_cycle(made.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for step in range(5):
            made.train([step])
            for each in schedulers:
                each.step()
    rates = [group["lr"] for group in made.optimizer.param_groups]
    assert rates == [group["lr"] for group in made.given.param_groups] or not made.early
    return rates


def of_each(given: Any) -> list[Any]:
    matrices, others = given
    return [lr_scheduler.OneCycleLR(matrices, 0.05, total_steps=9), lr_scheduler.StepLR(others, 2)]


def scheduled_both(made: Training) -> None:
    """By one of each given optimizer, and by one of all."""
    optimizers = made.optimizer if made.is_alone else [made.optimizer]
    schedulers = made.early + [lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for step in range(4):
        made.train([step])
        for each in schedulers:
            each.step()
    if not made.is_alone:  # Muon has no betas, AdamW no momentum
        with pytest.raises(ValueError, match="momentum"):
            lr_scheduler.OneCycleLR(made.optimizer, 0.1, total_steps=9)


def momentum_grows(made: Training) -> None:
    for step in range(3):
        for each in made.optimizer if made.is_alone else [made.optimizer]:
            for group in each.param_groups:
                group.update({"momentum": 0.85 + 0.05 * step} if "momentum" in group else {})
        made.train([step])


# ---- gradients


def without_zero_grad(made: Training) -> None:
    for step in range(3):
        if made.is_alone:  # an optimizer of zero.shard() has dropped its gradients
            made.optimizer.zero_grad()
        made.backward(step)
        made.optimizer.step()


def by_closure(made: Training) -> None:
    for step in range(3):

        def closure(step: int = step) -> float:
            made.optimizer.zero_grad()
            return made.backward(step)

        assert made.optimizer.step(closure) > 0


def apart(made: Training) -> None:
    for step in range(3):
        for rank in made.ranks:
            out, num = made.model(made.rows(step, rank)[0]), len(made.ranks)
            (square(out[:, :2]) / num).backward(retain_graph=True)
            (out[:, 2:].abs().mean() / num).backward()
        made.step()


def largest_gradients(made: Training) -> None:
    for step in range(3):
        made.backward(step)
        clip_grad_norm_(made.model.parameters(), 0.01, norm_type=float("inf"))
        clip_grad_value_(made.model.parameters(), 0.008)
        made.step()


def no_empty_part() -> nn.Module:
    """torch has no largest element of nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3))


def halved(model: Net) -> Net:
    model.first.weight.register_hook(lambda grad: 0.5 * grad)
    return model


def hooked_late() -> Net:
    model = Net()
    model.scale.register_post_accumulate_grad_hook(lambda _: None)
    return model


def hooked_between(made: Training) -> None:
    made.backward(0)
    made.model.first.weight.register_hook(lambda grad: grad)
    made.step()


# ---- weights


class Alternates(Blocks):
    turn = 0

    def forward(self, x: Tensor) -> Any:
        return self.last(self.blocks[self.turn % 2](self.first(x)))


def in_turn(made: Training) -> None:
    for step in range(4):
        made.model.turn = step
        made.train([step])


def toggled(made: Training) -> None:
    for step in range(4):
        made.model.blocks[step % 2].requires_grad_(False)
        made.backward(step)
        made.model.blocks[step % 2].requires_grad_(True)
        made.step()


def frozen_at_first() -> Net:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.unused = nn.Linear(5, 5)
    return model


def thawed(made: Training) -> None:
    """After two steps; another layer is frozen after four."""
    for step in range(6):
        made.model.blocks[0].requires_grad_(step >= 2)
        made.model.blocks[1].requires_grad_(step < 4)
        made.train([step])


def saved_while_frozen(made: Training) -> None:
    """The new one has trained the layer before it is loaded."""

    def prepare(new: Training) -> None:
        new.model.requires_grad_(True)
        new.train(range(7, 9))

    made.train(range(2))
    made.reload(made.system, prepare)
    made.model.requires_grad_(True)
    made.train(range(2, 4))


def saved_when_thawed(made: Training) -> None:
    """A weight without a step beside others."""
    made.train(range(2))
    made.model.requires_grad_(True)
    names = {name for name, _ in made.model.named_parameters()}
    assert made.is_alone or {*made.save()[1]["state"]} == names
    made.reload(made.system, lambda new: new.model.requires_grad_(True))
    made.train(range(2, 4))


def clamped(made: Training) -> None:
    for step in range(2):
        made.train([step])
        with torch.no_grad():
            for param in made.model.parameters():
                param.clamp_(-0.1, 0.1)


def finds_a_rate(made: Training) -> None:
    """States from before the first step come back."""
    saved = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))
    for group in made.optimizer.param_groups:
        group["lr"] *= 3
    made.train(range(5, 8))
    made.model.load_state_dict(saved[0])
    made.optimizer.load_state_dict(saved[1])
    made.train(range(3))


def loaded_after_a_forward_pass(made: Training) -> Tensor:
    """No backward pass came between."""
    made.train(range(2))
    made.model(made.rows(50, made.ranks[0])[0])
    values = {name: 1.5 * value for name, value in Net().state_dict().items()}
    if made.is_alone:
        made.model.load_state_dict(values)
    else:
        set_state_dict(made.model, made.optimizer, values, made.save()[1])
    found: Tensor = made.model(batch(50)[0]).detach()
    made.train(range(2, 4))
    return found


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


def reset(how: str, made: Training) -> None:
    made.train(range(3))
    RESETS[how](made.optimizer)
    made.train(range(3, 5))


# ---- rows

of_blocks = partial(Row, model=Blocks, loss=squared)
# At which stages a row is not quick: it has been right there all along.
SLOW: dict[str, Any] = {"systems": (), "slow": ZERO}
MUON_RATE = partial(of_matrices, Muon64)
ADAMW_RATE = partial(of_matrices, torch.optim.AdamW, foreach=False, eps=1e-3)
AFTER = "which stage 3 would never call"

ROWS = {
    # https://github.com/pytorch/pytorch/pull/113548: it looks for momentum in the defaults.
    "one cycle": Row(
        scheduled, optimizer=momentum, systems=("zero 2", "infinity"), slow=("zero 1", "zero 3")
    ),
    "schedulers of the given optimizer": Row(scheduled, optimizer=two_groups, early=one_cycle),
    # https://github.com/pytorch/ao/issues/959 and /1209: an offloading optimizer was no Optimizer
    # and had no defaults, and refused weights that do not require grad.
    "schedulers of an offloaded optimizer": Row(
        scheduled, partial(Net, is_frozen=True), nadam, systems=("offload",), atol=0.0
    ),
    "schedulers of each and of all": Row(
        scheduled_both, optimizer=muon, early=of_each, systems=("zero 2",)
    ),
    # https://github.com/facebookresearch/fairscale/issues/66,
    # https://github.com/pytorch/pytorch/issues/84485: groups change after the constructor.
    "options that change": Row(options_change, optimizer=group_for_each),
    # https://github.com/deepspeedai/DeepSpeed/pull/8202
    # https://github.com/deepspeedai/DeepSpeed/pull/7633
    # https://github.com/pytorch/pytorch/issues/126670
    "learning rate in a tensor": Row(
        rate_in_a_tensor, optimizer=ADAMW_RATE, early=its_rate, systems=STAGES, steps_before=1
    ),
    "learning rate of Muon in a tensor": Row(
        rate_in_a_tensor, optimizer=MUON_RATE, early=its_rate, systems=STAGES, steps_before=1
    ),
    # https://github.com/MoonshotAI/Moonlight/issues/27: a rank of stage 3 has nothing of a matrix;
    # and the momentum changes between steps, as in https://github.com/karpathy/nanochat.
    "fewer rows than ranks": Row(
        momentum_grows, lambda: Net(width=2), muon, systems=("zero 3",), num_ranks=3
    ),
    # https://github.com/deepspeedai/DeepSpeed/pull/6554: whose zero_grad() drops which.
    "a step drops the gradients": of_blocks(without_zero_grad, **SLOW),
    # https://github.com/pytorch/pytorch/pull/46750: the closure of a sharded optimizer.
    "step with a closure": of_blocks(by_closure, **SLOW),
    # https://github.com/deepspeedai/DeepSpeed/issues/3539: a graph that is retained.
    "two backwards of one forward": of_blocks(apart, **SLOW),
    # https://github.com/meta-pytorch/torchrec/pull/3199: at stage 3.
    "largest gradients": Row(
        largest_gradients, no_empty_part, partial(sgd, lr=1.0), systems=("zero 3",), num_ranks=3
    ),
    # Hooks of gradients run, or are refused; those after the accumulation are refused.
    "hook of a gradient": Row(
        model=lambda: halved(Net()),
        refused={"zero 3": r"first\.weight has a hook of register_hook"},
    ),
    "hook after the accumulation": Row(
        model=hooked_late,
        refused=dict.fromkeys(ZERO, "scale has a hook of register_post_accumulate_grad_hook"),
    ),
    "hook between a pass and its step": Row(
        hooked_between, systems=("zero 3",), refused={"zero 3": AFTER}
    ),
    # https://github.com/facebookresearch/fairscale/issues/796: a layer is left out of a step.
    "blocks that run in turn": of_blocks(in_turn, model=Alternates, optimizer=momentum, **SLOW),
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20138: toggle_optimizer().
    "weights that are frozen in turn": of_blocks(toggled, **SLOW),
    "frozen before zero.shard()": Row(thawed, frozen_at_first, adamw),
    "frozen before zero.shard(), muon": Row(
        thawed, frozen_at_first, muon, systems=(*STAGES, "zero 2, file", "infinity")
    ),
    # https://github.com/pytorch/pytorch/issues/104148: a layer is thawed after some steps.
    "saved while frozen": Row(saved_while_frozen, frozen_at_first, adamw, systems=STAGES),
    # https://github.com/pytorch/pytorch/pull/192307
    "saved when thawed": Row(
        saved_when_thawed,
        frozen_at_first,
        adamw,
        systems=(EACH, "offload", *STAGES, "zero 2, host"),
    ),
    # https://github.com/pytorch/pytorch/issues/117742: weights written between steps.
    "weights that the loop clamps": of_blocks(
        clamped,
        **SLOW,
        refused={"infinity": r"clamp_\(\) of a weight that is sharded and freed"},
    ),
    # https://github.com/fastai/fastai/issues/3185
    "learning rate finder": Row(finds_a_rate, optimizer=adamw, systems=STAGES),
    # https://github.com/pytorch/pytorch/issues/117421
    "loaded after a forward pass": Row(
        loaded_after_a_forward_pass, optimizer=adamw, systems=STAGES
    ),
    **{
        f"states are reset: {how}": Row(partial(reset, how), optimizer=two_groups, systems=STAGES)
        for how in RESETS
    },
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    check(rank, ROWS[name], system)
