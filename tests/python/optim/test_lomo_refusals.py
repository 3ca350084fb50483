"""LOMO in one process: nothing is half done, what is refused, and how it comes and goes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from lomo_models import (
    LR,
    Bypass,
    LowRank,
    Net,
    batches,
    changed,
    distance,
    fail_last,
    gradients_of,
    make,
    step_by_hand,
    train,
    train_sgd,
    weights,
)
from torch import Tensor, nn

from ringcomm.optim import AdaLomo, Lomo

# ---- nothing half done


@pytest.mark.parametrize(
    ("kind", "where", "mode", "clip"),
    [
        (Lomo, "head", "deferred", None),
        (Lomo, "norm", "two_pass", 0.1),
        (AdaLomo, "embed", "deferred", 0.1),
        (AdaLomo, "head", "two_pass", None),
    ],
)
def test_an_overflow_changes_nothing_and_halves_the_scale(
    kind: type[Any], where: str, mode: Any, clip: float | None
) -> None:
    model = make("plain")
    opt = kind(model, LR, loss_scale="dynamic", clip_mode=mode, clip_grad_norm=clip)
    opt._path.loss_scale.growth_interval = 2
    train(opt, model, batches(1))
    before, state = weights(model), copy.deepcopy(opt.state_dict())
    assert opt.loss_scale == 2.0**16

    def spoil(_m: Any, _a: Any, out: Tensor) -> None:  # one element of a gradient
        out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf))

    hook = model.get_submodule(where).register_forward_hook(spoil)
    opt.backward(model(batches(1)[0]))
    hook.remove()
    opt.step()
    assert not changed(model, before)
    assert opt.loss_scale == 2.0**15
    for key, entry in opt.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, state["state"][key][name])
    scale = {"loss_scale": 2.0**15, "loss_scale_good_steps": 0}
    groups = [{**group, **scale} for group in state["param_groups"]]
    assert opt.state_dict()["param_groups"] == groups
    train(opt, model, batches(2))
    assert opt.loss_scale == 2.0**16  # has regrown
    assert changed(model, before)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}])
def test_a_loss_that_is_nan_writes_nothing(options: dict[str, Any]) -> None:
    model = make("plain")
    opt = Lomo(model, LR, **options)
    before = weights(model)

    def step() -> None:
        (model(batches(1)[0]) * float("nan")).backward()
        opt.step()

    with pytest.raises(RuntimeError, match=r"not finite.*written"):
        step()
    assert not changed(model, before)
    opt.zero_grad()
    train(opt, model, batches(1))  # and goes on


def test_few_tokens_hold_what_a_layer_had_and_many_its_gradient() -> None:
    for tokens, is_dense in ((4, False), (400, True)):
        layer = nn.Linear(64, 64, bias=False)
        opt = Lomo(layer, LR, clip_grad_norm=1.0)
        layer(torch.randn(tokens, 64)).sum().backward()
        deferred = opt._path.slots[0].deferred
        assert deferred is not None
        assert (len(deferred.parts) == 1) is is_dense
        assert deferred.nbytes == (64 * 64 * 4 if is_dense else tokens * 128 * 4)


CUT_OFF: list[tuple[int, dict[str, Any]]] = [  # micro-batches before the exception, and options
    (0, {}),
    (0, {"weight_decay": 0.1}),
    (0, {"accumulation_steps": 2}),
    (1, {"accumulation_steps": 2, "weight_decay": 0.1}),
    (0, {"clip_grad_norm": 0.1}),
    (0, {"loss_scale": 1024.0}),
    (1, {"loss_scale": "dynamic", "accumulation_steps": 2}),
    (0, {"clip_grad_norm": 0.1, "clip_mode": "two_pass"}),
]


@pytest.mark.parametrize("then", ["zero_grad", "step"])
@pytest.mark.parametrize(("num_before", "options"), CUT_OFF, ids=str)
@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.filterwarnings("ignore:.*got parameters without their model")
def test_a_backward_pass_that_raises(kind: Any, num_before: int, options: Any, then: str) -> None:
    """zero_grad() drops what waits. step() makes a step by the gradients that had arrived."""
    ours, theirs = make("plain"), make("plain")
    opt = kind(ours, LR, **options)
    num_parts, mode = opt.options.accumulation_steps, opt.options.mode
    of_step = {key: options[key] for key in ("weight_decay", "clip_grad_norm") if key in options}
    oracle = kind(theirs.parameters(), LR, **of_step)
    data = batches(3 * num_parts)
    for begin in range(0, len(data), num_parts):
        parts = data[begin : begin + num_parts]
        if begin == num_parts:
            cut = parts[: num_before + 1]
            grads = gradients_of(theirs, cut, fails=True)
            hook = fail_last(ours, opt, cut)
            if then == "step":
                opt.step()
                if mode != "two_pass":
                    step_by_hand(oracle, theirs, grads)
            elif mode == "immediate":
                steps = oracle.param_groups[0]["step"]
                step_by_hand(oracle, theirs, grads, at_least=num_parts)
                oracle.param_groups[0]["step"] = steps
            opt.zero_grad()
            hook.remove()
            assert opt.held_bytes == 0
            assert distance(ours, theirs) < 1e-5
        step_by_hand(oracle, theirs, gradients_of(theirs, parts, fails=False))
        train(opt, ours, parts)
        assert distance(ours, theirs) < 1e-5
        assert opt.param_groups[0]["step"] == oracle.param_groups[0]["step"]


# ---- what is refused


def test_backward_twice() -> None:
    model = make("plain")
    opt = Lomo(model, LR)
    model(batches(1)[0]).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"head\.weight got a gradient after its update"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)
    with pytest.raises(RuntimeError, match=r"cannot undo the update of .*call step\(\) first"):
        opt.zero_grad()
    opt.step()
    model(batches(1)[0]).backward()


@pytest.mark.parametrize("how", ["clip_grad_norm_", "clip_grad_value_", "GradScaler", "no step"])
def test_torchs_own_clipping_and_scaling_raise(how: str) -> None:
    model = torch.nn.Linear(4, 4)
    opt = Lomo(model, LR)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "GradScaler")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    calls: dict[str, Any] = {
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "GradScaler": lambda: scaler.step(opt),
        "no step": lambda: model.bias.sum().backward(),
    }
    words = "got a gradient after its update" if how == "no step" else "Use clip_grad_norm="
    with pytest.raises(RuntimeError, match=words):
        calls[how]()
    opt.step()
    assert model.weight.grad is None


def test_a_loss_scale_wants_scale_and_two_passes_want_backward() -> None:
    for options, match in (
        ({"loss_scale": 8.0}, r"opt\.scale\(loss\)\.backward\(\)"),
        ({"clip_grad_norm": 1.0, "clip_mode": "two_pass"}, r"opt\.backward\(loss\)"),
    ):
        model = make("plain")
        opt = Lomo(model, LR, **options)
        before = weights(model)
        with pytest.raises(RuntimeError, match=match):
            model(batches(1)[0]).backward()
        assert not changed(model, before)
        opt.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": 0.0}, "lr must be a positive"),
        ({"lr": float("nan")}, "lr must be a positive"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be a positive"),
        ({"clip_grad_value": -1.0}, "clip_grad_value must be a positive"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "cannot be used together"),
        ({"clip_mode": "deferred"}, "has no effect without clip_grad_norm or loss_scale"),
        ({"clip_mode": "later", "clip_grad_norm": 1.0}, "clip_mode must be None or one of"),
        ({"loss_scale": "big"}, "loss_scale must be None"),
        ({"loss_scale": -2.0}, "loss_scale must be None"),
        ({"accumulation_steps": 0}, "accumulation_steps must be 1 or more"),
        (
            {"accumulation_steps": 2, "clip_grad_norm": 1.0, "clip_mode": "two_pass"},
            "cannot accumulate",
        ),
        ({"stochastic_rounding": True}, "for bfloat16 weights, but the model has none"),
        ({"master": "split"}, "for bfloat16 weights, but the model has none"),
        ({"master": "split", "stochastic_rounding": True}, "stochastic_rounding has no effect"),
        ({"master": "fp32"}, "master must be None or one of split"),
        ({"seed": -1}, "seed must be a number of 32 bits"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], match: str) -> None:
    model = make("plain")
    with pytest.raises(ValueError, match=match):
        Lomo(model, **options)
    Lomo(model, LR)  # nothing is left of the one that failed


def test_models_that_are_wrong() -> None:
    model, other = Net(), Net()
    with pytest.raises(ValueError, match="not a parameter of the model"):
        Lomo([other.up.weight], LR, model=model)
    with pytest.raises(ValueError, match="two different models were given"):
        Lomo(model, LR, model=other)
    with pytest.raises(ValueError, match="does not require grad"):
        Lomo([LowRank().base.weight], LR, model=None)
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        Lomo(Net().requires_grad_(False), LR)
    with pytest.raises(ValueError, match="sparse gradients"):
        Lomo(nn.Sequential(nn.Embedding(4, 4, sparse=True)), LR)
    opt = Lomo(model, LR)
    with pytest.raises(ValueError, match=r"embed\.weight already has an optimizer"):
        AdaLomo(model, LR)
    opt.close()
    AdaLomo(model, LR)


def test_a_learning_rate_that_is_negative() -> None:
    """Of a group, where no hook is left, or by a scheduler."""
    model = make("plain")
    groups = [{"params": [model.up.weight]}, {"params": [model.down.weight], "lr": -1.0}]
    with pytest.raises(ValueError, match=r"the lr of down\.weight must be 0 or more"):
        Lomo(groups, LR, model=model)
    opt = Lomo(model, LR)
    opt.param_groups[0]["lr"] = -0.1
    before = weights(model)
    with pytest.raises(ValueError, match=r"the lr of head\.weight must be 0 or more"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)
    opt.close()
    # The first group's weights are updated last.
    groups = [{"params": [*model.embed.parameters()]}, {"params": [*model.head.parameters()]}]
    for part in (model.up, model.down, model.norm):
        part.requires_grad_(False)
    opt = Lomo(groups, LR, model=model)
    opt.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"the lr of embed\.weight must be 0 or more"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)


def test_a_group_that_cannot_be_added_is_not_there() -> None:
    model = make("plain")
    opt = Lomo([{"params": [*model.head.parameters()]}], LR, model=model)
    frozen = model.up.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"up\.weight"):
        opt.add_param_group({"params": [frozen]})
    for other in model.parameters():
        other.requires_grad_(
            other is not frozen and any(other is p for p in model.head.parameters())
        )
    before = weights(model)
    model(batches(1)[0]).backward()
    opt.step()
    assert changed(model, before)


# ---- coming and going


def test_a_model_is_torchs_own_again() -> None:
    for ends in ("close", "del"):
        model = Net()
        opt = Lomo(model, LR)
        assert type(model.up) is not nn.Linear
        if ends == "close":
            opt.close()
        del opt
        gc.collect()
        assert type(model.up) is nn.Linear
        assert type(model.embed) is nn.Embedding
        before = weights(model)
        model(batches(1)[0]).backward()
        assert not changed(model, before)
        assert model.up.weight.grad is not None


def test_models_go_with_their_optimizer() -> None:
    model = Net()
    opt = Lomo(model, LR, clip_grad_norm=1.0)
    model(batches(1)[0]).backward()
    params = [weakref.ref(param) for param in model.parameters()]
    del opt, model
    gc.collect()
    assert all(ref() is None for ref in params)


def test_evaluation_in_between_and_copies() -> None:
    model, sgd = make("reentrant"), make("reentrant")
    data = batches(3)
    opt = Lomo(model, LR)
    for ids in data:
        with torch.no_grad():
            model(ids)  # in training mode: counted as a use that is to come
        twin = copy.deepcopy(model)  # an ordinary one
        twin(ids).backward()
        assert twin.up.weight.grad is not None
        model(ids).backward()
        opt.step()
    train_sgd(sgd, data, LR)
    assert distance(model, sgd) < 1e-6


def test_weights_used_behind_their_layers_back_can_be_moved() -> None:
    model = Bypass()
    sgd = copy.deepcopy(model)
    opt = Lomo(model, LR)
    model.to(torch.float64)
    model.to(torch.float32)
    train(opt, model, batches(2))
    train_sgd(sgd, batches(2), LR)
    assert distance(model, sgd) < 1e-6
