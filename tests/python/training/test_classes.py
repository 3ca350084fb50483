"""zero.shard() with optimizers of torch and of users: as rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import rows
import torch
import user_classes as user
from ranks import in_ranks
from rows import (
    APART,
    EACH,
    STAGES,
    ZERO,
    Row,
    Training,
    cases_of,
    check,
    muon,
    resume,
    resume_at_once,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from whole_optimizers import Averaged, Kron, Muon64
from zero_models import BUCKET_BYTES, Net, Towers, make_optimizer

from ringcomm.parallel import get_state_dict as get_whole_state
from ringcomm.parallel import offload
from ringcomm.parallel.optimizer_classes import optimizers_of

# ---- optimizers


def of(kind: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: kind(model.parameters(), *args, **options)


def muon_alone(model: Any) -> torch.optim.Optimizer:
    """Of one matrix, which one rank owns. The others are frozen."""
    own = next(param for param in model.parameters() if param.dim() == 2)
    for param in model.parameters():
        param.requires_grad_(param is own)
    return torch.optim.Muon([own], 0.02)


def two_of_one_class(model: Any) -> list[torch.optim.Optimizer]:
    params = [*model.parameters()]
    return [torch.optim.Adafactor(params[:3], 0.02), torch.optim.Adafactor(params[3:], 0.01)]


def fragile(model: Any) -> torch.optim.Optimizer:
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    return user.Fragile([param for param in model.parameters() if param.dim() == 2])


def with_rates(kind: Any, model: Any) -> torch.optim.Optimizer:
    model.first.weight.rate, model.last.bias.rate = 3.0, 0.1
    made: torch.optim.Optimizer = kind(model.parameters())
    return made


def first_frozen(model: Any) -> list[torch.optim.Optimizer]:
    model.first.requires_grad_(False)
    rest = [param for name, param in model.named_parameters() if not name.startswith("first")]
    return [user.First(model.first.parameters()), torch.optim.SGD(rest, 0.1)]


def named(model: Any) -> torch.optim.Optimizer:
    model.first.weight.requires_grad_(False)
    return user.ByName(model.named_parameters())


def named_in_part(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [Muon64(matrices), torch.optim.AdamW(others)]


def backwards(model: Any) -> torch.optim.Optimizer:
    """Groups in another order than the model, and weights in another order in them."""
    params = [*model.parameters()]
    groups: list[Any] = [{"params": params[1::2][::-1], "lr": 0.03}, {"params": params[::2][::-1]}]
    return torch.optim.AdamW(groups, 0.02, eps=1e-3)


def of_matrices(kind: Any, model: Any) -> Any:
    """The first of its optimizers; other weights are frozen."""
    first, *_ = optimizers_of(kind(model))
    trained = {param for group in first.param_groups for param in group["params"]}
    for param in model.parameters():
        param.requires_grad_(param in trained)
    return first


def tied_over_units() -> nn.Module:
    model = Net(width=WIDTH, is_tied=True, is_frozen=True)
    model.nothing = nn.ParameterList([torch.ones(0)])
    return model


class WithUnused(Net):
    """With a layer that has no state in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 5)


def first_offloaded(kind: Any, model: Any) -> Any:
    first, *rest = kind(model)
    return [offload.Offloaded(first), *rest]


# ---- programs


def ask_at_once(made: Training) -> None:
    """For the state of all weights; it changes no step."""
    num_weights = len([*made.model.parameters()])
    for step in range(2):
        assert made.is_alone or len(made.save()[1]["state"]) == num_weights
        made.train([step])


def loaded_and_asked(made: Training) -> None:
    """Of its own state, before the first step."""
    if not made.is_alone:
        made.load_own_state()
        made.save()
    made.train(range(3))


def asked_before(model: Any) -> Any:
    """For states, which another system then does not take for those of a step."""
    made = DAMPENED(model)
    get_whole_state(model, made, full=True)
    return made


def towers(made: Training, steps: range) -> None:
    """The second tower is not used any more from the third step on, others never."""
    for step in steps:
        made.model.used = [0] if step >= 2 else [0, 1]
        made.train([step])


def through_stages(made: Training) -> dict[str, set[str]]:
    """Another stage, and one process that goes on; what of each weight's state is saved."""
    towers(made, range(3))
    if made.is_alone:
        saved: Any = get_state_dict(made.model, made.optimizer)[1]["state"]
    else:
        saved = made.save()[1]["state"]
    made.reload(made.next_stage())
    towers(made, range(3, 5))
    made.reload(EACH)
    towers(made, range(5, 7))
    return {
        weight: {key for key, value in state.items() if value is not None}
        for weight, state in saved.items()
        if not weight.startswith(("towers.2", "towers.3"))  # which torch has no state of
    }


def resume_all(made: Training) -> None:
    """Every weight has a state."""
    names = {name for name, _ in made.model.named_parameters()}
    made.train([0])
    assert made.is_alone or {*made.save()[1]["state"]} == names
    resume(made)


def thawed(made: Training) -> None:
    made.train(range(2))
    made.model.requires_grad_(True)
    made.train(range(2, 4))


def names_of_weights(made: Training) -> list[str]:
    made.train(range(3))
    return list(made.optimizer.param_groups[0]["param_names"])


def in_both_modes(made: Training) -> Tensor:
    """The weights of evaluations."""
    found = []
    for step in range(4):
        made.optimizer.train()
        made.train([step])
        trained = made.weights()
        for _ in range(2):  # the second one has no effect
            made.optimizer.eval()
        found.append(made.weights())
        assert step == 0 or not torch.equal(found[-1]["first.weight"], trained["first.weight"])
    with pytest.raises(RuntimeError, match="call train"):
        made.train([0])
    if made.system in STAGES:
        with pytest.raises(RuntimeError, match="was given to zero"):
            made.given.eval()
    return torch.cat([value.flatten() for each in found for value in each.values()])


def saved_in_evaluation_mode(made: Training) -> Tensor:
    """What was saved is what is evaluated, and training goes on from it."""
    if not made.is_alone:
        made.save()  # of states that are not there yet
    for mode in ("eval", "train"):
        getattr(made.optimizer, mode)()
    made.train(range(2))
    made.optimizer.eval()
    evaluated = made.weights()
    if not made.is_alone:
        torch.testing.assert_close(made.save()[0], evaluated, rtol=0, atol=0)
    made.reload(made.next_stage(), lambda new: new.optimizer.train())
    made.optimizer.train()
    made.train(range(2, 4))
    return torch.cat([value.flatten() for value in evaluated.values()])


def there_and_back(made: Training) -> list[str]:
    """Another one with its state, and one process that goes on; what is in the states."""
    if not made.is_alone:
        names = {name for name, x in made.model.named_parameters() if x.requires_grad}
        assert {*made.save()[1]["state"]} == names
    made.train(range(2))
    made.load_own_state()
    made.reload()
    made.train(range(2, 4))
    made.reload(EACH)
    made.train(range(4, 6))
    states = [state for each in made.optimizers for state in each.state.values()]
    return [f"{type(state[key])} {key}" for state in states for key in sorted(state)]


# ---- rows

OF_STAGE: dict[str, dict[str, Any]] = {
    "zero 1": {},
    "zero 2": {"clip_grad_norm": 0.1, "loss_scale": 1024.0},
    "zero 3": {"loss_scale": 1024.0},
}
# Each at one stage; test_pairs.py has some of them at all.
KINDS: dict[str, Callable[[Any], Any]] = {
    "Adam": of(torch.optim.Adam, 0.01, weight_decay=0.1),
    "AdamW, amsgrad": of(torch.optim.AdamW, torch.tensor(0.01), amsgrad=True),
    "NAdam": of(torch.optim.NAdam, 0.01),
    "RAdam": of(torch.optim.RAdam, 0.01, betas=(0.5, 0.6)),
    "RMSprop": of(torch.optim.RMSprop, 0.01, momentum=0.9, centered=True),
    "Adagrad": of(torch.optim.Adagrad, 0.01, initial_accumulator_value=0.1),
    "Adadelta": of(torch.optim.Adadelta, 0.5),
    "Adamax": of(torch.optim.Adamax, 0.01),
    "Rprop": of(torch.optim.Rprop, 0.01),
    "ASGD": of(torch.optim.ASGD, 0.05, t0=2),
    "SGD, maximize": of(torch.optim.SGD, 0.01, momentum=0.9, maximize=True),
    "Lion": of(user.Lion, 0.01, decay=0.5),
    "Damped": of(user.Damped, 0.01),
    "Lamb": of(user.Lamb, 0.01, momentum=0.9),
    "Rows": of(user.Rows, 0.01),
    "two": two_of_one_class,
    "Muon and AdamW": partial(muon, kind=partial(torch.optim.Muon, lr=0.02)),
    "Adafactor": of(torch.optim.Adafactor, 0.02),
    "Kron": of(Kron, 0.02),
    "Muon": muon_alone,
}
# With states before zero.shard().
BEFORE: dict[str, Callable[[Any], Any]] = {
    # https://github.com/pytorch/ao/issues/3314, https://github.com/pytorch/pytorch/issues/43706
    "states that are no floats": of(user.Bits),
    # https://github.com/pytorch/pytorch/pull/74215: tensors without dimensions besides the step.
    "NAdam": of(torch.optim.NAdam, 0.02, eps=1e-3),
    "ASGD": of(torch.optim.ASGD, 0.1, t0=1),
    # https://github.com/huggingface/accelerate/issues/3855,
    # https://github.com/hpcaitech/ColossalAI/pull/6433: states from before the first step.
    "Adagrad": of(torch.optim.Adagrad, 0.1, initial_accumulator_value=0.3),
    # As SOAP's and Shampoo's.
    "states of several matrices": of(user.NoRate),
}
# https://github.com/NVIDIA/Megatron-LM/pull/5976, https://github.com/pytorch/pytorch/issues/164929:
# what makes a state before the first step is a step that counts.
AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "Adam": of(torch.optim.Adam, 0.02, weight_decay=0.3),
    "SGD": of(torch.optim.SGD, 0.02, weight_decay=0.3, momentum=0.9),
    "RMSprop": of(torch.optim.RMSprop, 0.02, weight_decay=0.3, momentum=0.9),
}
MORE_AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "NAdam": of(torch.optim.NAdam, 0.01),
    "ASGD": of(torch.optim.ASGD, 0.01),
    "Rprop": of(torch.optim.Rprop, 0.01),
    "Adagrad": of(torch.optim.Adagrad, initial_accumulator_value=0.1),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LBFGS": (of(torch.optim.LBFGS), "LBFGS updates several weights together"),
    "SparseAdam": (of(torch.optim.SparseAdam), "SparseAdam needs or keeps more"),
    "Joint": (of(user.Joint, 0.1), "does not know whether Joint does: pass elementwise"),
    "Reduced": (of(user.Reduced, 0.1), "does not know whether Reduced does"),
    "Shadow": (of(user.Shadow, 0.1), "Shadow keeps tensors, a module or an"),
    "Wrapper": (of(user.Wrapper, 0.1), "Wrapper keeps tensors, a module or an"),
    # https://github.com/pytorch/xla/pull/6454: it would be ignored.
    "differentiable": (of(torch.optim.SGD, 0.1, differentiable=True), "differentiable=True"),
    # https://github.com/hiyouga/LlamaFactory/issues/5303,
    # https://github.com/pytorch/pytorch/pull/134107: optimizers of named_parameters().
    "names of some weights": (named_in_part, "named parameters to all"),
    # The other ranks would wait for the weight.
    "error of one owner": (fragile, "no root|on another rank"),
}

CLIPPED, SCALED = {"clip_grad_norm": 0.1}, {"loss_scale": 1.0}
WIDTH = 129  # matrices of the blocks are above 64 KiB, others below
DAMPENED = of(torch.optim.SGD, 0.01, momentum=0.9, dampening=0.5)  # loaded zeros are a state


def warming_up(optimizer: Any) -> None:
    for each in optimizers_of(optimizer):
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: step / 10)  # lr is 0 at first


def used_towers(model: Any, x: Tensor, _: Tensor) -> Tensor:
    loss: Tensor = model(x[:, :6], model.used).square().mean()
    return loss


def replicas(made: Training) -> dict[str, Any]:
    shape = (2, made.row.num_ranks // 2)
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))}


of_muon = partial(Row, resume_all, Net, muon)
ROWS = {
    **{
        f"{name} through stages": Row(
            through_stages,
            lambda: Towers(1),
            optimizer,
            used_towers,
            systems=(system := STAGES[number % 3],),
            options={"bucket_bytes": BUCKET_BYTES, **OF_STAGE[system]},
            num_parts=2,
        )
        for number, (name, optimizer) in enumerate(KINDS.items())
    },
    **{
        name: Row(resume, Net, optimizer, systems=STAGES, steps_before=1)
        for name, optimizer in BEFORE.items()
    },
    **{
        f"{name} at once": Row(resume_at_once, Net, optimizer)
        for name, optimizer in AT_ONCE.items()
    },
    **{
        f"{name} at once": Row(resume_at_once, Net, optimizer, systems=(EACH, "zero 2"))
        for name, optimizer in MORE_AT_ONCE.items()
    },
    **{
        f"{name} asked at once": Row(ask_at_once, WithUnused, optimizer, systems=(EACH, "zero 3"))
        for name, optimizer in {**MORE_AT_ONCE, "dampening": DAMPENED}.items()
    },
    "dampening loaded and asked at once": Row(
        loaded_and_asked, optimizer=DAMPENED, systems=(EACH, "offload", *STAGES)
    ),
    "dampening asked before": Row(optimizer=asked_before, systems=("offload", *STAGES)),
    # https://github.com/KellerJordan/Muon/issues/45,
    # https://github.com/deepspeedai/DeepSpeed/pull/7509: parts of a matrix have one dimension.
    "matrices and others": Row(optimizer=user.MuonWithAdam, systems=STAGES),
    # https://github.com/deepspeedai/DeepSpeed/pull/7869, and one that takes parts of weights.
    "optimizer without a gradient": Row(thawed, optimizer=first_frozen, systems=STAGES),
    # https://github.com/pytorch/pytorch/issues/136929,
    # https://github.com/NVIDIA/Megatron-LM/pull/7230: attributes.
    # https://github.com/facebookresearch/fairscale/pull/721: requires_grad.
    # https://github.com/facebookresearch/fairscale/pull/537: states that are no tensor.
    **{
        kind.__name__: Row(optimizer=partial(with_rates, kind), systems=STAGES, steps_before=1)
        for kind in (user.Attributes, user.Trainable, user.SetsData, user.SetsWholeData, user.Lists)
    },
    # https://github.com/pytorch/pytorch/issues/120814: they take no part in a trial as a graph.
    "compiled updates": Row(optimizer=of(user.Compiled), systems=("zero 2",)),
    "names of weights": Row(names_of_weights, optimizer=named, systems=STAGES),
    # https://github.com/pytorch/pytorch/pull/54736,
    # https://github.com/facebookresearch/fairscale/issues/601,
    # https://github.com/facebookresearch/fairscale/issues/380: states go to their weights.
    "groups in another order": Row(resume, optimizer=backwards, systems=STAGES),
    "schedule-free": Row(
        in_both_modes, optimizer=of(Averaged), systems=(*STAGES, "zero 2, file", "infinity")
    ),
    "schedule-free, whole": Row(in_both_modes, optimizer=of(user.AveragedRows), systems=STAGES),
    # https://github.com/facebookresearch/schedule_free/issues/22
    "saved in evaluation mode": Row(
        saved_in_evaluation_mode, optimizer=of(Averaged), systems=STAGES
    ),
    **{
        f"{name} is refused": Row(
            optimizer=optimizer,
            early=warming_up if name != "error of one owner" else lambda _: None,
            systems=(*STAGES[1:], "infinity") if name == "error of one owner" else STAGES[1:],
            refused=dict.fromkeys(ZERO, words),
        )
        for name, (optimizer, words) in REFUSED.items()
    },
    "state of another shape": Row(
        optimizer=of(user.ByRow),
        systems=STAGES,
        refused=dict.fromkeys(STAGES, r"rows of parameter \d must have .* shape \(13, 7\), got"),
        options={"elementwise": [user.ByRow]},
        steps_before=1,
    ),
    # Its state exists before the first step, but has no values there.
    "Adagrad on meta": Row(
        model=lambda: nn.Linear(7, 3, device="meta"),
        optimizer=of(torch.optim.Adagrad),
        systems=("zero 2",),
        refused={"zero 2": "Adagrad already has state on the meta device"},
    ),
    # https://github.com/facebookresearch/fairscale/pull/343: it would begin anew in each step.
    **{
        f"state of no weight, {word}": Row(
            optimizer=of(user.Counts),
            systems=("zero 1",),
            refused={"zero 1": "Counts has a state of no weight, 'k'"},
            options={word: [user.Counts]},
        )
        for word in ("elementwise", "whole")
    },
    # Alone an offloaded optimizer has the bits of its class.
    **{
        f"{name} alone": Row(
            there_and_back,
            Net,
            partial(of_matrices, optimizer),
            systems=("offload", "offload, file"),
            num_ranks=1,
            atol=0.0,
        )
        for name, optimizer in user.OFFLOADED.items()
    },
    **{
        f"{name} beside another": Row(
            there_and_back,
            optimizer=partial(first_offloaded, user.OFFLOADED[name]),
            systems=(system,),
            num_ranks=num_ranks,
        )
        for name, system, num_ranks in (("Adafactor", "zero 1", 3), ("Counting", "zero 2", 2))
    },
    **{
        f"{name} on {num_ranks}, {', '.join(options)}": Row(
            there_and_back,
            partial(Net, width=WIDTH if "infinity" in system else 13),
            user.OFFLOADED[name],
            systems=(system,),
            options=options,
            num_parts=num_parts,
            num_ranks=num_ranks,
        )
        for num_ranks, system, name, options, num_parts in (
            (2, "zero 2, file", "Counting", CLIPPED, 1),
            (6, "zero 2, host", "Muon64", SCALED, 1),  # more ranks than matrices
            (3, "zero 3, file", "Muon64", SCALED, 2),
            (2, "zero 3, host", "Adafactor", CLIPPED, 1),
            (1, "infinity, file", "Counting", {}, 1),
            (3, "infinity, file", "Muon64", CLIPPED, 2),
            (3, "infinity, host", "Counting", {}, 2),
        )
    },
    **{
        f"{kind} of two groups on {num_ranks}, infinity": Row(
            model=model,
            optimizer=partial(make_optimizer, kind=kind),
            systems=(f"infinity, {where}",),
            options=options,
            num_parts=num_parts,
            num_ranks=num_ranks,
            # A bit in a gradient that is nearly 0 moves AdamW's weight by a part of lr.
            atol=2e-3 if kind == "adamw" else 1e-5,
        )
        for num_ranks, kind, where, options, num_parts, model in (
            (1, "adamw", "file", CLIPPED, 2, partial(Net, width=WIDTH)),
            (3, "adamw", "host", {**CLIPPED, "loss_scale": 1024.0}, 1, partial(Net, width=WIDTH)),
            (3, "momentum", "file", {}, 2, partial(Net, width=WIDTH)),
            (4, "momentum", "file", CLIPPED, 1, tied_over_units),
        )
    },
    # Ranks and meshes; more ranks than matrices.
    "muon on 1": of_muon(systems=("zero 1", "zero 3"), num_ranks=1),
    "muon in buckets": of_muon(systems=("zero 1",), options={"bucket_bytes": 300}),
    "muon on 3 in buckets": of_muon(
        systems=("zero 2",), options={"bucket_bytes": 300, "loss_scale": 1.0}, num_ranks=3
    ),
    "muon on 3": of_muon(systems=("zero 3",), num_ranks=3),
    "muon on replicas": of_muon(systems=("zero 3",), options=replicas, num_ranks=4),
    "muon on 6": of_muon(systems=("zero 2",), num_ranks=6),
    "muon on replicas of 3": of_muon(systems=("zero 3",), options=replicas, num_ranks=6),
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    check(rank, ROWS[name], system)


def writes_and_refuses(system: str, model: Any, given: Any, **options: Any) -> None:
    model.scale.data.zero_()
    raise ValueError("refused")


@in_ranks(2)
def test_what_is_no_row_is_found(rank: int) -> None:
    """Ranks that train apart, what is not refused, and a refusal that has written a weight."""
    for row, system in (
        (Row(), APART),
        (Row(names_of_weights, optimizer=named), APART),
        (Row(refused={"zero 1": "stage"}), "zero 1"),
    ):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check(rank, row, system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "trained_by", writes_and_refuses)
        with pytest.raises(AssertionError, match="scale"):
            check(rank, Row(refused={"zero 1": "refused"}), "zero 1")
