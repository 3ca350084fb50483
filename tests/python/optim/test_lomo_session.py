"""LOMO in what users do between its steps: as torch's SGD, or refused aloud."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lomo_models import LR, LowRank, Net, batches, changed, distance, make, train, weights
from ranks import in_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from ringcomm.optim import AdaLomo, Lomo

Action = Callable[[Any, Tensor, Any], Any]


def with_rows(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the output of the embedding, in the place of an input with a gradient."""
    rows: list[Tensor] = []
    hook = model.embed.register_forward_hook(lambda _m, _a, out: rows.append(out))
    loss = model(ids)
    hook.remove()
    return loss, rows[0]


def evaluate(model: Any, ids: Tensor, _: Any) -> Any:
    model.eval()
    with torch.no_grad():
        loss = model(ids)
    model.train()
    return [loss]


def input_gradient(model: Any, ids: Tensor, _: Any) -> Any:
    loss, rows = with_rows(model, ids)
    return torch.autograd.grad(loss, rows)


def backward_to_inputs(model: Any, ids: Tensor, _: Any) -> Any:
    loss, rows = with_rows(model, ids)
    rows.retain_grad()
    loss.backward(inputs=[rows])
    return [rows.grad]


def weight_gradients(model: Any, ids: Tensor, _: Any) -> Any:
    return torch.autograd.grad(model(ids), list(model.parameters()))


def transforms(model: Any, ids: Tensor, _: Any) -> Any:
    params = {name: param.detach() * 1.5 for name, param in model.named_parameters()}
    call = torch.func.functional_call
    found = torch.func.grad(lambda given: call(model, given, ids))(params)
    own = call(model, dict(model.named_parameters()), ids)
    outs = torch.vmap(model.up)(torch.ones(2, 3, 16))
    return [*found.values(), own.detach(), outs.detach()]


def copies(model: Any, ids: Tensor, _: Any) -> Any:
    # https://github.com/jiaweizzhao/GaLore/issues/66: weights are read while gradients wait.
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        train_twin = torch.optim.SGD(twin.parameters(), LR)
        twin(ids).backward()
        train_twin.step()
    return [param for twin in twins for param in twin.parameters()]


def reload(model: Any, _: Tensor, opt: Any) -> Any:
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    state, of_opt = torch.load(file)
    model.load_state_dict(state)
    opt.load_state_dict(of_opt)
    return []


def fail_in_forward(model: Any, ids: Tensor, _: Any) -> Any:
    hook = model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    hook.remove()
    return []


def fail_in_backward(model: Any, ids: Tensor, opt: Any) -> Any:
    """Before a weight is written."""
    hooks: list[Any] = []
    add = model.head.register_forward_hook(
        lambda _m, args, _o: hooks.append(args[0].register_hook(lambda _: 1 / 0))
    )
    weight = model.head.weight.requires_grad_(False)
    with pytest.raises(ZeroDivisionError):
        model(ids).backward()
    weight.requires_grad_(True)
    add.remove()
    opt.zero_grad()
    return []


def freeze(model: Any, ids: Tensor, opt: Any) -> Any:
    """For one step, from before the forward pass; and one weight from between the passes.

    https://github.com/oval-group/dfw/pull/5, https://github.com/pytorch/pytorch/issues/115607:
    blocks that take turns.
    """
    opt.zero_grad()
    model.up.requires_grad_(False)
    loss = model(ids)
    model.down.requires_grad_(False)
    train_step(loss, opt)
    model.requires_grad_(True)
    return []


def hand_written(model: Any, _: Tensor, __: Any) -> Any:
    with torch.no_grad():
        model.up.weight.clamp_(-0.1, 0.1)
        model.mix.weight.data = model.mix.weight.data * 0.9
    return []


ACTIONS: list[Action] = [
    evaluate,
    input_gradient,
    backward_to_inputs,
    weight_gradients,
    transforms,
    copies,
    reload,
    fail_in_forward,
    fail_in_backward,
    freeze,
    hand_written,
]
KEEPS_GRADIENTS = {evaluate, input_gradient, backward_to_inputs, weight_gradients, transforms}
KEEPS_GRADIENTS |= {copies, fail_in_forward}


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_between_steps(kind: Any, action: Action) -> None:
    """And between micro-batches. The oracle: SGD; of AdaLomo itself, where nothing is fused."""
    for options in ({}, {"accumulation_steps": 2}, {"clip_grad_norm": 100.0}):
        ours, theirs = make("plain"), make("plain")
        opt: Any = kind(ours, LR, **options)
        other: Any = torch.optim.SGD(theirs.parameters(), LR)
        if kind is AdaLomo:
            with pytest.warns(UserWarning, match="without their model"):
                other = AdaLomo(theirs.parameters(), LR, **options)
        num_parts = options.get("accumulation_steps", 1)
        for i, ids in enumerate(batches(4)):
            is_last = i % num_parts == num_parts - 1
            both = [(ours, opt), (theirs, other)]
            for model, by in both:
                model(ids).backward()
                if is_last:
                    apply_steps(by)
            if is_last or action in KEEPS_GRADIENTS:
                got, expected = (action(model, ids, by) for model, by in both)
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            assert is_last or opt.held_bytes > 0
        assert distance(ours, theirs) < 1e-5
        assert distance(ours, make("plain")) > 1e-3


def test_copies_are_plain_models() -> None:
    """Of a model that trains they are torch's own, and an optimizer of theirs can train them."""
    ours, twin = make("tied"), make("tied")
    calls: list[int] = []
    ours.up.register_forward_pre_hook(lambda *_: calls.append(1))
    opt, alone = Lomo(ours, LR), Lomo(twin, LR)
    train(opt, ours, batches(1))
    train(alone, twin, batches(1))
    ema: Any = AveragedModel(ours)
    calls.clear()
    ema.module(batches(1)[0])
    assert len(calls) == 2  # hooks of users are copied
    ours.up._forward_pre_hooks.popitem(last=False)
    saved = pickle.dumps(ours)
    assert b"ringcomm" not in saved
    for model in (ema.module, copy.deepcopy(ours), pickle.loads(saved)):
        assert not changed(model, weights(ours))
        assert [type(m) for m in model.modules()] == [type(m) for m in Net(tied=True).modules()]
        assert not any(m._forward_pre_hooks for m in model.modules() if m is not ema.module.up)
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
        copied = Lomo(model, LR)
        train(copied, model, batches(2))
        copied.close()
    train(opt, ours, batches(2))
    train(alone, twin, batches(2))
    assert distance(ours, twin) == distance(ours, model) == 0
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"Lomo cannot be copied .* copy state_dict\(\) instead"
        ):
            refused(opt)


@pytest.mark.parametrize("is_late", [False, True])
def test_hooks_after_the_gradient(is_late: bool) -> None:
    """They see it, and may change it, of fused layers and of others."""
    ours, theirs = make("plain"), make("plain")
    seen: dict[int, list[Tensor]] = {id(ours): [], id(theirs): []}

    def watch(model: nn.Module) -> None:
        def call(param: Tensor) -> None:
            assert param.grad is not None
            seen[id(model)].append(param.grad.clone())
            param.grad.mul_(2)

        for name in ("head.weight", "mix.weight", "norm.bias", "embed.weight"):
            model.get_parameter(name).register_post_accumulate_grad_hook(call)

    watch(theirs)
    if not is_late:
        watch(ours)
    opt, sgd = Lomo(ours, LR), torch.optim.SGD(theirs.parameters(), LR)
    if is_late:
        watch(ours)
    for ids in batches(4):
        for model, by in ((ours, opt), (theirs, sgd)):
            train_step(model(ids), by)
    torch.testing.assert_close(seen[id(ours)], seen[id(theirs)], rtol=1e-4, atol=1e-6)
    assert distance(ours, theirs) < 1e-6


def test_a_hook_between_forward_and_backward() -> None:
    model = make("plain")
    opt, before = Lomo(model, LR), weights(model)
    loss = model(batches(1)[0])
    model.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=r"a hook of head\.weight was registered after"):
        loss.backward()
    assert not changed(model, before)
    opt.zero_grad()
    train(opt, model, batches(1))


# ---- gradients that are dropped


@pytest.mark.parametrize("how", ["optimizer", "model", "model to zeros", "one"])
def test_micro_batches_are_dropped(how: str) -> None:
    ours, theirs = make("plain"), make("plain")
    opt, sgd = Lomo(ours, LR, accumulation_steps=2), torch.optim.SGD(theirs.parameters(), LR)
    first, second, third = batches(3)
    for model, by in ((ours, opt), (theirs, sgd)):
        model(first).backward()
        if how == "optimizer":
            by.zero_grad(set_to_none=False)
        elif how == "model":
            model.zero_grad()
        elif how == "one":
            model.up.weight.grad = None
        elif by is opt:
            with pytest.raises(RuntimeError, match=r"zero_grad\(\) of Lomo"):
                model.zero_grad(set_to_none=False)
            return
        model(second).backward()
        if how != "one":
            model(third).backward()
        by.step()
    assert distance(ours, theirs) < 1e-6


@in_ranks(2)
def test_micro_batches_are_dropped_under_fully_shard(rank: int) -> None:
    for how in ("optimizer", "model", "model to zeros"):
        ours, theirs = make("plain"), make("plain")
        for layer in (ours.up, ours.down, ours):
            fully_shard(layer)
        opt, sgd = Lomo(ours, LR, accumulation_steps=2), torch.optim.SGD(theirs.parameters(), LR)
        first, second, third = batches(3, rows=4)
        mine = slice(2 * rank, 2 * rank + 2)
        ours(first[mine]).backward()
        if how == "model to zeros":
            with pytest.raises(RuntimeError, match=r"zero_grad\(\) of Lomo"):
                ours.zero_grad(set_to_none=False)
            return
        (opt if how == "optimizer" else ours).zero_grad()
        for ids in (second, third):
            ours(ids[mine]).backward()
            theirs(ids).backward()
        opt.step()
        sgd.step()
        for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}])
def test_a_step_cannot_be_dropped_by_the_model(options: dict[str, Any]) -> None:
    model = make("plain")
    opt = Lomo(model, LR, **options)
    for drop in (model.zero_grad, lambda: setattr(model.up.weight, "grad", None)):
        model(batches(1)[0]).backward()
        drop()
        before = weights(model)
        with pytest.raises(
            RuntimeError, match=r"between backward\(\) and step\(\), but its gradient"
        ):
            opt.step()
        assert not changed(model, before)
    train(opt, model, batches(1))
    model.zero_grad()  # after step(), as Trainer does
    train(opt, model, batches(1))


def test_a_deferred_step_is_dropped() -> None:
    model = make("plain")
    opt, before = Lomo(model, LR, clip_grad_norm=0.1), weights(model)
    model(batches(1)[0]).backward()
    opt.zero_grad()
    opt.step()
    assert not changed(model, before)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_a_discriminator_that_is_not_frozen(kind: Any) -> None:
    """In the generator's pass; test_zero_calls.py has one that is."""
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [kind(model, 0.1) for model in (maker, judge)]
    (-judge(maker(torch.ones(6, 4))).mean()).backward()
    optimizers[0].step()
    with pytest.raises(RuntimeError, match=r"cannot undo the update of .*discriminator"):
        optimizers[1].zero_grad()


# ---- models and states that change


def test_a_weight_unfrozen_later() -> None:
    model = LowRank()
    opt = Lomo(model, LR)
    model.base.requires_grad_(True)
    before = weights(model)
    with pytest.raises(ValueError, match=r"base\.weight requires grad since Lomo was made"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)
    opt.zero_grad()
    opt.add_param_group({"params": list(model.base.parameters())})
    train(opt, model, batches(1))
    assert {"base.weight", "base.bias"} <= changed(model, before)


def test_closed_between_forward_and_backward() -> None:
    ours, theirs = make("plain"), make("plain")
    opt, before = Lomo(ours, LR), weights(ours)
    losses = [model(batches(1)[0]) for model in (ours, theirs)]
    opt.close()
    for loss in losses:
        loss.backward()
    grads = [[param.grad for param in model.parameters()] for model in (ours, theirs)]
    torch.testing.assert_close(*grads)
    assert not changed(ours, before)


def test_states_that_are_cleared() -> None:
    """They begin from zeros, as of a new optimizer in the same step."""
    models = [make("plain"), make("plain")]
    data = batches(4)
    for model in models:
        opt = AdaLomo(model, 0.01)
        train(opt, model, data[:2])
        if model is models[0]:
            opt.state.clear()
        else:
            opt.close()
            opt = AdaLomo(model, 0.01)
            opt.param_groups[0]["step"] = 2
        train(opt, model, data[2:])
    assert distance(*models) == 0
