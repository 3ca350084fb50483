"""LOMO in one process: SGD's steps, whatever the model, and an optimizer like torch's."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lomo_models import LR, MODELS, batches, changed, distance, make, train, train_sgd, weights
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ringcomm.ops import weight_update_cuda
from ringcomm.optim import AdaLomo, Lomo


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


class Names(TorchDispatchMode):
    """The operators that are called, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(4, 6), (6,)])
def test_adalomo_takes_four_operators_for_a_weight(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one launch on CUDA."""
    update, names = AdaLomo.update, Names()

    def recorded(*args: Any) -> None:
        with names:
            update(*args)

    monkeypatch.setattr(AdaLomo, "update", recorded)
    weight = nn.Parameter(torch.ones(shape))
    opt = AdaLomo([weight], LR, group="none")
    opt.backward(weight.square().sum())
    views = {"aten::detach", "aten::view", "aten::slice", "aten::promote_types"}
    ours = ("square_sums", "adalomo_moments_", "adalomo_squares", "adalomo_update_")
    assert [name for name in names.found if name not in views] == [f"ringcomm::{op}" for op in ours]


@pytest.mark.parametrize(("num_elems", "num_sums"), [(131_072, 0), (1_100_000, 1)])
def test_adalomo_sums_many_parts_before_they_are_read(
    num_elems: int, num_sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, where each program reads all of them. Here nothing is launched."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(weight_update_cuda, "kernels", MagicMock())
    monkeypatch.setattr(
        weight_update_cuda, "launch", lambda _, *args, **constants: launched.append(args)
    )
    monkeypatch.setattr("ringcomm.optim.lomo._ops", weight_update_cuda)
    weight = nn.Parameter(torch.ones(num_elems))
    opt = AdaLomo([weight], LR, group="none")
    with Names() as names:
        opt.backward(weight.dot(torch.ones(num_elems)))
    grid, *args = launched[-1]
    assert len(launched) == 4
    assert names.found.count("aten::sum") == num_sums
    squares, num_squares = args[7:9]
    assert squares.shape == (2, num_squares)
    assert num_squares <= 1024
    assert grid[0] == -(-num_elems // 128)


@pytest.mark.parametrize("options", [{"clip_grad_norm": 1.0}, {"loss_scale": 2.0}])
def test_facts_of_kept_gradients_are_one_operator(options: dict[str, Any]) -> None:
    weights: list[Tensor] = [nn.Parameter(torch.ones(size)) for size in (3, 0, 5)]
    opt = Lomo(weights, LR, group="none", **options)
    loss = opt.scale(torch.cat(weights).square().sum())
    with Names() as names:
        loss.backward()
        opt.step()
    assert names.found.count("aten::_foreach_norm") == 1
    assert not {"aten::aminmax", "aten::linalg_vector_norm"} & {*names.found}


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
        apply_steps(reference)
    exact = make("plain").double()
    train_sgd(exact, data, LR)
    assert distance(model, exact) <= 1.5 * distance(sgd, exact)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_torch_does(dtype: torch.dtype, given: torch.dtype) -> None:
    """autocast leaves float64 and integers alone: https://github.com/pytorch/pytorch/pull/36171."""
    layer = nn.Linear(6, 3).to(dtype)
    outcomes = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            try:
                outcomes.append(layer(torch.ones(5, 6).to(given)).dtype)
            except RuntimeError:
                outcomes.append(None)
        Lomo(layer, LR)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"clip_grad_value": 0.01}])
def test_weights_in_other_layouts(kind: Any, options: dict[str, Any]) -> None:
    """Layers made of a Conv1D by weight.t(), and channels_last.

    https://github.com/huggingface/transformers/issues/41535
    """
    found = []
    for is_strided in (False, True):
        torch.manual_seed(0)
        matrix: Any = nn.ParameterList([torch.randn(6, 4)])
        model: Any = nn.ModuleList([matrix, nn.Linear(4, 4), nn.Embedding(5, 4)])
        model.append(nn.Conv2d(2, 3, (2, 2)))
        if is_strided:
            matrix[0] = nn.Parameter(matrix[0].detach().t().contiguous().t())
            for layer in model[1:3]:
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
            model[3].to(memory_format=torch.channels_last)
        opt = kind(model, 0.1, **options)
        for step in range(3):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            y = torch.tanh(model[1](x @ matrix[0]) + model[2](torch.arange(5)))
            y = model[3](y.view(-1, 2, 2, 1).expand(-1, 2, 2, 2))
            train_step(y.square().mean(), opt)
        states = [value for state in opt.state.values() for value in state.values()]
        found.append([*weights(model).values(), *states])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1e6}, {"clip_grad_value": 9.0}])
def test_layers_without_features(kind: Any, options: dict[str, Any]) -> None:
    """https://github.com/pytorch/pytorch/issues/48152, https://github.com/salute-developers/GigaAM/pull/33"""
    none, some = nn.Linear(0, 4), nn.Linear(6, 0)
    opt = kind(nn.ModuleList([none, some]), 0.1, **options)
    bias = none.bias.detach().clone()
    (none(torch.ones(5, 0)).sum() + some(torch.ones(5, 6)).sum()).backward()
    opt.step()
    if kind is Lomo:
        torch.testing.assert_close(none.bias.detach(), bias - 0.1 * 5)
    assert torch.isfinite(none.bias).all()


@pytest.mark.slow
def test_compiled_models_keep_their_buffers_for_two_passes() -> None:
    from torch._functorch import config

    model, sgd, (ids,) = make("plain"), make("plain"), batches(1)
    opt = Lomo(model, LR, clip_grad_norm=0.1, clip_mode="two_pass")
    before = weights(model)
    compiled: Any = torch.compile(model, backend="aot_eager", dynamic=True)
    with pytest.raises(RuntimeError, match='use clip_mode="deferred"'):
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


def test_groups_schedulers_and_hooks() -> None:
    """https://github.com/hpcaitech/ColossalAI/issues/3483: a step that hooks do not see."""
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
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
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
    assert calls == ["before", "after"] * 5


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
