"""LOMO in one process: the same steps as SGD, whatever the model, and nothing half done."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from lomo_models import MODELS, Bypass, LowRank, Net, batches, distance, make, train_sgd, weights
from torch import Tensor, nn

from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo

LR = 0.3


def train(opt: InBackwardOptimizer, model: Any, data: list[Tensor]) -> list[float]:
    """The ordinary loop; returns the norms that were clipped."""
    norms = []
    for begin in range(0, len(data), opt.options.accumulation_steps):
        for ids in data[begin : begin + opt.options.accumulation_steps]:
            opt.backward(model(ids))
        opt.step()
        opt.zero_grad()
        if opt.grad_norm is not None:
            norms.append(opt.grad_norm)
    return norms


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """The names of weights that are not what they were."""
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


# ---- the same steps as SGD


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.2, "clip_grad_value": 0.003},
        {"accumulation_steps": 3},
        {"clip_grad_norm": 0.1, "weight_decay": 0.2, "accumulation_steps": 2},
        {"clip_grad_norm": 0.1, "clip_mode": "two_pass"},
        {"loss_scale": 256.0},
        {"loss_scale": "dynamic", "clip_grad_norm": 0.1, "clip_mode": "two_pass"},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_steps_are_those_of_sgd(device: str, name: str, options: dict[str, Any]) -> None:
    """At most three times as far from float64 as torch's SGD, and an ulp of the largest weight."""
    model, sgd = make(name).to(device), make(name).to(device)
    exact = copy.deepcopy(sgd).double()
    data = [ids.to(device) for ids in batches(6)]
    torch_options = {
        "weight_decay": options.get("weight_decay", 0.0),
        "clip_norm": options.get("clip_grad_norm"),
        "clip_value": options.get("clip_grad_value"),
        "micro_batches": options.get("accumulation_steps", 1),
    }
    train_sgd(sgd, data, LR, **torch_options)
    norms = train_sgd(exact, data, LR, **torch_options)
    opt = Lomo(model, LR, **options)
    got = train(opt, model, data)
    assert distance(model, exact) <= 3 * distance(sgd, exact) + 2**-22
    assert distance(model, make(name).to(device)) > 1e-3  # it did train
    assert got == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_rounded_once(dtype: torch.dtype) -> None:
    model, sgd = make("plain", dtype=dtype), make("plain", dtype=dtype)
    exact = make("plain", dtype=dtype).double()
    data = batches(4)
    train_sgd(sgd, data, LR)
    train_sgd(exact, data, LR)
    train(Lomo(model, LR), model, data)
    assert distance(model, exact) <= 1.5 * distance(sgd, exact)


def test_weights_are_new_when_backward_returns_and_no_gradient_is_left() -> None:
    model = make("plain")
    before = weights(model)
    _kept = Lomo(model, LR)
    model(batches(1)[0]).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name  # which says that it is spent
        assert param.grad.untyped_storage().nbytes() == 0, name
    assert changed(model, before) == set(before)


@pytest.mark.parametrize("inside", [False, True], ids=["forward", "both"])
def test_autocast(inside: bool) -> None:
    model, sgd = make("plain"), make("plain")
    data = batches(3)
    opt = Lomo(model, LR)
    reference = torch.optim.SGD(sgd.parameters(), LR)
    for ids in data:
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = model(ids), sgd(ids)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        expected.backward()
        opt.step()
        reference.step()
        reference.zero_grad()
    exact = make("plain").double()
    train_sgd(exact, data, LR)
    assert distance(model, exact) <= 1.5 * distance(sgd, exact)


@pytest.mark.slow
def test_compiled_models_keep_their_buffers_for_two_passes() -> None:
    from torch._functorch import config

    model, sgd, (ids,) = make("plain"), make("plain"), batches(1)
    opt = Lomo(model, LR, clip_grad_norm=0.1, clip_mode="two_pass")
    before = weights(model)
    compiled: Any = torch.compile(model, backend="aot_eager", dynamic=True)
    with pytest.raises(RuntimeError, match='take clip_mode="deferred"'):
        opt.backward(compiled(ids))
    assert not changed(model, before)
    opt.zero_grad()
    torch.compiler.reset()
    with config.patch(donated_buffer=False):
        train(opt, compiled, [ids])
    train_sgd(sgd, [ids], LR, clip_norm=0.1)
    assert distance(model, sgd) < 1e-6


def test_parameters_alone_say_that_nothing_is_fused() -> None:
    model, sgd = make("plain"), make("plain")
    with pytest.warns(UserWarning, match="without their model"):
        opt = Lomo(model.parameters(), LR)
    assert type(model.up) is nn.Linear
    data = batches(3)
    train(opt, model, data)
    train_sgd(sgd, data, LR)
    assert distance(model, sgd) < 1e-6


# ---- an optimizer like torch's


def test_groups_schedulers_and_hooks() -> None:
    model, sgd = make("plain"), make("plain")
    data = batches(5)

    def groups(of: Any) -> list[dict[str, Any]]:
        matrices = [param for param in of.parameters() if param.dim() > 1]
        return [{"params": matrices}, {"params": [of.norm.weight, of.norm.bias], "lr": 0.05}]

    opt = Lomo(groups(model), LR, model=model)
    opt.add_param_group({"params": [model.up.bias, model.mix.bias], "lr": 0.01})
    assert type(model.up).__name__ == "FusedLinear"
    reference = torch.optim.SGD(groups(sgd), LR)
    reference.add_param_group({"params": [sgd.up.bias, sgd.mix.bias], "lr": 0.01})
    calls: list[str] = []
    opt.register_step_post_hook(lambda *_: calls.append("step"))
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(each, start_factor=0.0001, total_iters=4)
        for each in (opt, reference)
    ]
    for ids in data:

        def closure(ids: Tensor = ids) -> Tensor:
            opt.zero_grad()
            loss: Tensor = model(ids)
            loss.backward()
            return loss

        expected = sgd(ids)
        expected.backward()
        torch.testing.assert_close(opt.step(closure), expected)
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
        opt.zero_grad()
        reference.zero_grad()
    assert distance(model, sgd) < 1e-6
    assert calls == ["step"] * 5


@pytest.mark.parametrize("is_late", [False, True])
def test_hooks_of_weights_see_their_gradients(is_late: bool) -> None:
    """Of layers that are fused otherwise: what a hook returns is the gradient, as in torch."""
    ours, theirs = make("plain"), make("plain")

    def double(model: nn.Module) -> None:
        for name in ("embed.weight", "up.weight"):
            model.get_parameter(name).register_hook(lambda grad: 2 * grad)

    double(theirs)
    if not is_late:
        double(ours)
    opt = Lomo(ours, LR)
    if is_late:
        double(ours)
    train(opt, ours, batches(2))
    train_sgd(theirs, batches(2), LR)
    assert distance(ours, theirs) < 1e-6


def test_gradients_set_by_hand_are_applied_by_step() -> None:
    """So are those of fewer micro-batches than accumulation_steps."""
    model = make("plain")
    before = weights(model)
    opt = Lomo(model, LR)
    opt.step()  # nothing to do
    model.up.weight.grad = torch.ones_like(model.up.weight)
    opt.step()
    assert torch.equal(model.up.weight, before["up.weight"] - torch.tensor(LR))
    assert model.up.weight.grad is None
    assert torch.equal(model.down.weight, before["down.weight"])
    opt.close()
    model, sgd = make("plain"), make("plain")
    opt = Lomo(model, LR, accumulation_steps=3)
    for ids in batches(2):
        model(ids).backward()
    opt.step()
    train_sgd(sgd, batches(2), LR, micro_batches=2)
    assert distance(model, sgd) < 1e-6


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lomo, {"master": "split", "clip_grad_norm": 0.1, "loss_scale": "dynamic"}),
        (AdaLomo, {"stochastic_rounding": True, "seed": 5, "accumulation_steps": 2}),
    ],
)
def test_a_resumed_run_has_the_same_bits(kind: type[Any], options: dict[str, Any]) -> None:
    data = batches(8)
    model = make("plain", dtype=torch.bfloat16)
    opt = kind(model, 0.05, **options)
    train(opt, model, data[:4])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(opt, model, data[4:])

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = make("plain", seed=9, dtype=torch.bfloat16)
    again.load_state_dict(saved["model"])
    resumed = kind(again, 0.05, **options)
    resumed.load_state_dict(saved["opt"])
    train(resumed, again, data[4:])
    assert not changed(again, weights(model))
    assert resumed.loss_scale == opt.loss_scale


def test_stochastic_rounding_moves_what_rounding_to_nearest_loses() -> None:
    """Weights near 1 and steps of 2^-12: lost where they are rounded to nearest."""
    moved = {}
    for rounds in (False, True):
        layer = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        nn.init.ones_(layer.weight)
        opt = Lomo(layer, 2.0**-12, stochastic_rounding=rounds)
        for _ in range(64):
            layer(torch.full([1, 64], -1.0, dtype=torch.bfloat16)).sum().backward()
            opt.step()
        moved[rounds] = float(layer.weight.detach().double().mean()) - 1
    assert moved[False] == 0
    assert moved[True] == pytest.approx(64 * 2.0**-12, rel=0.05)


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
    assert opt.state_dict()["param_groups"] == state["param_groups"]
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

    with pytest.raises(RuntimeError, match=r"not finite.*no weight has been written"):
        step()
    assert not changed(model, before)
    opt.zero_grad()
    train(opt, model, batches(1))  # and goes on


def test_few_tokens_hold_what_a_layer_had_and_many_its_gradient() -> None:
    for tokens, is_dense in ((4, False), (400, True)):
        layer = nn.Linear(64, 64, bias=False)
        opt = Lomo(layer, LR, clip_grad_norm=1.0)
        layer(torch.randn(tokens, 64)).sum().backward()
        held = opt._path.slots[0].held
        assert held is not None
        assert (len(held.parts) == 1) is is_dense
        assert held.nbytes == (64 * 64 * 4 if is_dense else tokens * 128 * 4)


# ---- what is refused


def test_backward_twice() -> None:
    model = make("plain")
    opt = Lomo(model, LR)
    model(batches(1)[0]).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"head\.weight got a gradient after its update"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)
    opt.zero_grad()
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
    opt.zero_grad()
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
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "exclude each other"),
        ({"clip_mode": "deferred"}, "has no effect without clip_grad_norm or loss_scale"),
        ({"clip_mode": "later", "clip_grad_norm": 1.0}, "clip_mode is None or one of"),
        ({"loss_scale": "big"}, "loss_scale must be None"),
        ({"loss_scale": -2.0}, "loss_scale must be None"),
        ({"accumulation_steps": 0}, "accumulation_steps must be 1 or more"),
        (
            {"accumulation_steps": 2, "clip_grad_norm": 1.0, "clip_mode": "two_pass"},
            "cannot accumulate",
        ),
        ({"stochastic_rounding": True}, "for bfloat16 weights, and there are none"),
        ({"master": "split"}, "for bfloat16 weights, and there are none"),
        ({"master": "split", "stochastic_rounding": True}, "stochastic_rounding has no effect"),
        ({"master": "fp32"}, "master is None or one of split"),
        ({"seed": -1}, "seed is a number of 32 bits"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], match: str) -> None:
    model = make("plain")
    with pytest.raises(ValueError, match=match):
        Lomo(model, **options)
    Lomo(model, LR)  # nothing is left of the one that failed


def test_models_that_are_wrong() -> None:
    model, other = Net(), Net()
    with pytest.raises(ValueError, match="none of the model's"):
        Lomo([other.up.weight], LR, model=model)
    with pytest.raises(ValueError, match="the two differ"):
        Lomo(model, LR, model=other)
    with pytest.raises(ValueError, match="does not require grad"):
        Lomo([LowRank().base.weight], LR, model=None)
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        Lomo(Net().requires_grad_(False), LR)
    with pytest.raises(ValueError, match="sparse gradients"):
        Lomo(nn.Sequential(nn.Embedding(4, 4, sparse=True)), LR)
    opt = Lomo(model, LR)
    with pytest.raises(ValueError, match=r"embed\.weight has an optimizer"):
        AdaLomo(model, LR)
    opt.close()
    AdaLomo(model, LR)


def test_a_learning_rate_that_is_negative() -> None:
    """Of a group, where no hook is left, or by a scheduler."""
    model = make("plain")
    groups = [{"params": [model.up.weight]}, {"params": [model.down.weight], "lr": -1.0}]
    with pytest.raises(ValueError, match=r"the lr of down\.weight is 0 or more"):
        Lomo(groups, LR, model=model)
    opt = Lomo(model, LR)
    opt.param_groups[0]["lr"] = -0.1
    before = weights(model)
    with pytest.raises(ValueError, match=r"the lr of head\.weight is 0 or more"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)


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
    opt = Lomo(model, LR)
    model.to(torch.float64)
    model.to(torch.float32)
    train(opt, model, batches(2))
