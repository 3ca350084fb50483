"""LOMO in one process: nothing is half done, what is refused, and how it comes and goes."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lomo_models import (
    LR,
    Bypass,
    Gated,
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
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from zero_models import assert_alike

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
    opt._use.loss_scale.growth_interval = 2
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


IN_RANKS: list[tuple[type[Any], dict[str, Any]]] = [
    (Lomo, {}),
    (Lomo, {"overlap": True}),
    (Lomo, {"loss_scale": 1024.0}),
    (Lomo, {"clip_grad_norm": 100.0, "clip_mode": "two_pass"}),
    (AdaLomo, {}),
]


@pytest.mark.parametrize("then", ["zero_grad", "step"])
@pytest.mark.parametrize(
    ("world_size", "kind", "num_before", "options"),
    [
        *((1, kind, *case) for kind in (Lomo, AdaLomo) for case in CUT_OFF),
        *((2, kind, 0, {"weight_decay": 0.1, **options}) for kind, options in IN_RANKS),
    ],
    ids=str,
)
@in_ranks()
def test_a_backward_pass_that_raises(
    rank: int, world_size: int, kind: Any, num_before: int, options: Any, then: str
) -> None:
    """zero_grad() drops what waits. step() makes a step by the gradients that had arrived."""
    ours, theirs = make("plain"), make("plain")
    over = {"group": dist.group.WORLD} if world_size > 1 else {}
    opt = kind(ours, LR, **options, **over)
    num_parts, mode = opt.options.accumulation_steps, opt.options.mode
    of_step = {key: options[key] for key in ("weight_decay", "clip_grad_norm") if key in options}
    oracle = kind(theirs.parameters(), LR, **of_step, model=theirs, group="none")
    data = batches(3 * num_parts, rows=2)
    for begin in range(0, len(data), num_parts):
        parts = data[begin : begin + num_parts]
        mine = [ids.chunk(world_size)[rank] for ids in parts]
        if begin == num_parts:
            grads = gradients_of(theirs, parts[: num_before + 1], fails=True)
            hook = fail_last(ours, opt, mine[: num_before + 1])
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
        train(opt, ours, mine)
        assert distance(ours, theirs) < 1e-5
        assert opt.param_groups[0]["step"] == oracle.param_groups[0]["step"]
    assert_alike(weights(ours))


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


@pytest.mark.parametrize("how", ["fused", "replicas", "shards", "hooks"])
@in_ranks(1)
def test_a_graph_that_runs_again(rank: int, how: str) -> None:
    """https://github.com/kozistr/pytorch_optimizer/issues/64: weights are updated between two
    backward passes through one graph."""
    model = make("plain")
    if how == "shards":
        fully_shard(model)
    given = model.parameters() if how == "hooks" else model
    group: Any = {"fused": "none", "shards": None}.get(how, dist.group.WORLD)
    optimizer = Lomo(given, 0.1, model=model, group=group)
    loss = model(batches(1)[0])
    loss.backward(retain_graph=True)
    before = None if how == "shards" else weights(model)
    with pytest.raises(RuntimeError, match=r"after its update by Lomo: .*accumulation_steps=N"):
        (2 * loss).backward()
    assert before is None or not changed(model, before)
    optimizer.step()
    optimizer.zero_grad()
    kept = model(batches(1)[0])
    torch.autograd.grad(kept, model.norm.weight, retain_graph=True)  # no update
    optimizer.zero_grad()


def test_a_model_is_cast_after_the_optimizer_was_made() -> None:
    """https://github.com/pytorch/ao/issues/4616: dtypes that differ in the backward pass."""
    model = make("plain")
    opt = Lomo(model, LR)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"was cast to torch\.bfloat16"):
        model(batches(1)[0]).backward()
    opt.close()


def test_an_activation_is_modified_before_the_step() -> None:
    """A kept activation that a hook's user overwrites is an error, before a weight is written.

    https://github.com/OpenLMLab/LOMO/issues/41
    """
    model, kept = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64)), list[Tensor]()
    before = weights(model)
    model[1].register_forward_hook(lambda _m, _a, out: kept.append(out.detach()))
    opt = Lomo(model, LR, clip_grad_norm=1e6)
    model(torch.ones(5, 6)).square().mean().backward()
    kept[0].zero_()
    with pytest.raises(RuntimeError, match=r"layer of 2\.weight.*modified in place"):
        opt.step()
    assert not changed(model, before)
    model(torch.ones(5, 6)).square().mean().backward()
    opt.step()
    assert changed(model, before)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("how", ["layer", "detached", "data", "number"])
def test_a_segment_that_reads_a_weight_after_its_update(how: str, is_reentrant: bool) -> None:
    """https://github.com/pytorch/tutorials/pull/2568: weights change while the pass still runs.

    Deferred updates come after it.
    """
    torch.manual_seed(0)
    model = Gated(how, is_reentrant=is_reentrant)
    sgd = copy.deepcopy(model)
    if (how, is_reentrant) != ("layer", True):  # which the models of test_lomo.py have
        opt = Lomo(model, LR)
        with pytest.raises(RuntimeError, match=r"head\.weight was read inside a backward pass"):
            model(batches(1)[0]).backward()
        opt.zero_grad()
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
        opt.close()
        model.load_state_dict(sgd.state_dict())
    train(Lomo(model, LR, clip_grad_norm=1e6), model, batches(3))
    train_sgd(sgd, batches(3), LR)
    assert distance(model, sgd) < 1e-5


def test_a_backward_pass_that_clones_what_is_written() -> None:
    """torch.autograd.graph.allow_mutation_on_saved_tensors() raises a KeyError of its own for
    custom operators that write their arguments."""
    model = make("plain")
    before, opt = weights(model), Lomo(model, LR)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = model(batches(1)[0])
        with pytest.raises(RuntimeError, match=r"allow_mutation_on_saved_tensors\(\) is active"):
            loss.backward()
    assert not changed(model, before)
    opt.zero_grad()
    train(opt, model, batches(1))
    assert changed(model, before)


def test_weights_are_taken_out_of_a_param_group() -> None:
    """Block-wise optimizers replace the list: https://github.com/ContinualAI/avalanche/pull/1362."""
    model = make("plain")
    groups = [{"params": [*part.parameters()]} for part in (model.up, model.head, model.mix)]
    opt = Lomo(groups, LR, model=model)
    opt.param_groups[2]["params"] = [model.mix.bias]
    before = weights(model)
    with pytest.raises(ValueError, match="param_groups has 4 weights, but Lomo trains 5"):
        model(batches(1)[0]).backward()
    assert not changed(model, before)


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
    # Not in the first backward pass: https://github.com/pytorch/pytorch/issues/114299.
    for weight, words in (
        (torch.ones(4, 16)[:, ::2], "gaps or overlaps"),
        (torch.ones(1).expand(4), "gaps or overlaps"),
        (torch.ones(4, dtype=torch.complex64), "float32, float16 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"0 .*{words}"):
            Lomo(nn.ParameterList([nn.Parameter(weight)]), LR)
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


@pytest.mark.parametrize("without_gradients", [torch.no_grad, nullcontext])
@pytest.mark.parametrize("name", ["plain", "reentrant", "reused twice"])
def test_passes_without_a_backward_pass_delay_nothing(name: str, without_gradients: Any) -> None:
    """An evaluation in training mode, as for pseudo-labels, or a loss that is dropped: gradients
    must not wait for step().

    https://github.com/OpenLMLab/LOMO/issues/41
    """
    model = make(name)
    opt = Lomo(model, LR)
    for ids in batches(2):
        with without_gradients():
            model(ids)
        model(ids).backward()
        assert opt.held_bytes == 0
        opt.step()


def test_weights_used_behind_their_layers_back_can_be_moved() -> None:
    model = Bypass()
    sgd = copy.deepcopy(model)
    opt = Lomo(model, LR)
    model.to(torch.float64)
    model.to(torch.float32)
    train(opt, model, batches(2))
    train_sgd(sgd, batches(2), LR)
    assert distance(model, sgd) < 1e-6
