"""LOMO and AdaLomo in programs that users of similar optimizers have reported.

The reference is torch.optim.SGD in the same loop, or the same optimizer in a form that has no
problem.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pair_optimizers
import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from oracle import all_equal
from ranks import in_ranks
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from ringcomm.optim import AdaLomo, Lomo

Loop = Callable[[Any, Any], Any]
LR = 0.1
DEFERRED = {"clip_grad_norm": 1e6}
ROWS = [torch.randn(5, 6, generator=torch.Generator().manual_seed(i)) for i in range(8)]


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Linear(6, width), nn.Linear(width, width)
    return nn.Sequential(first, nn.Tanh(), second, nn.LayerNorm(width), nn.Linear(width, 3))


def steps(model: Any, opt: Any, rows: list[Tensor] = ROWS[:3]) -> None:
    for x in rows:
        train_step(model(x).square().mean(), opt)


def weights(model: nn.Module) -> list[Tensor]:
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    return [param.detach().clone() for param in model.parameters()]


def check_same_as_sgd(
    loop: Loop, build: Callable[[], Any] = net, tol: float = 1e-5, **options: Any
) -> None:
    """The loop changes the weights as with torch.optim.SGD."""
    model, reference = build(), build()
    before = weights(model)
    loop(reference, torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], LR))
    loop(model, Lomo(model, LR, **options))
    torch.testing.assert_close(weights(model), weights(reference), rtol=tol, atol=tol)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


both_modes = pytest.mark.parametrize("options", [{}, DEFERRED], ids=["immediate", "deferred"])

# ---- tensors of the user


@pytest.mark.parametrize("seed", range(4))
def test_norm_of_cancelling_tokens(seed: int) -> None:
    """The gradient of one context with several next tokens almost vanishes at the end of a run.

    https://github.com/jiaweizzhao/GaLore/issues/66: the reported norm was not the gradient's.
    """
    torch.manual_seed(seed)
    layer = nn.Linear(64, 64, bias=False)
    x, upstream = torch.randn(1, 64).repeat(12, 1) * 3, torch.randn(12, 64)
    upstream -= upstream.mean(0)
    opt = Lomo(layer, 1e-6, clip_grad_norm=1.0)
    (layer(x) * upstream).sum().backward()
    opt.step()
    assert opt.grad_norm is not None
    expected = float((upstream.double().T @ x.double()).norm())
    assert opt.grad_norm == pytest.approx(expected, rel=0.01)
    assert 0 <= opt.grad_norm < 1e-3


@pytest.mark.parametrize("mode", ["deferred", "two_pass"])
def test_norm_of_few_tokens(mode: str) -> None:
    """Both ways to compute the norm agree with the gradient's norm in float64."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(3, 64)
    twin = copy.deepcopy(model).double()
    twin(x.double()).square().sum().backward()
    grads = [param.grad for param in twin.parameters() if param.grad is not None]
    opt = Lomo(model, 1e-6, clip_grad_norm=1.0, clip_mode=mode)
    opt.backward(model(x).square().sum())
    opt.step()
    assert opt.grad_norm == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-6)


def refill_input(model: Any, opt: Any) -> None:
    buffer = torch.empty(5, 6)
    for x in ROWS[:3]:
        model(buffer.copy_(x)).square().mean().backward()
        buffer.fill_(9)
        apply_steps(opt)


def refill_numpy_input(model: Any, opt: Any) -> None:
    array = torch.empty(5, 6).numpy()
    for x in ROWS[:3]:
        array[:] = x.numpy()
        model(torch.from_numpy(array)).square().mean().backward()
        array[:] = 9
        apply_steps(opt)


@both_modes
@pytest.mark.parametrize("loop", [refill_input, refill_numpy_input])
def test_input_buffer_is_refilled_before_step(loop: Loop, options: dict[str, Any]) -> None:
    """https://github.com/OpenLMLab/LOMO/issues/41 asks what is kept until the update."""
    check_same_as_sgd(loop, lambda: net(64), **options)


@both_modes
def test_ids_change_before_step(options: dict[str, Any]) -> None:
    """As above, for indices."""

    def loop(model: Any, opt: Any) -> None:
        ids = torch.arange(5)
        for _ in range(3):
            model(ids).square().mean().backward()
            ids += 1
            apply_steps(opt)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))

    check_same_as_sgd(loop, build, **options)


class WeightIsInput(nn.Module):
    """Layers whose input is a weight, or a part of one, that is trained too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 6)
        self.first, self.second = nn.Linear(6, 50), nn.Linear(6, 50)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(self.table.weight[2:8]) + self.second(self.table.weight).mean(0)
        return torch.tanh(x @ rows)


@both_modes
def test_weight_is_the_input_of_a_layer(options: dict[str, Any]) -> None:
    """https://github.com/zyushun/Adam-mini/issues/11: tables that are used in several ways."""
    check_same_as_sgd(steps, WeightIsInput, tol=1e-4, **options)


def test_activation_is_modified_before_step() -> None:
    """A kept activation that a hook's user overwrites is an error, before a weight is written.

    https://github.com/OpenLMLab/LOMO/issues/41
    """
    model, kept = net(64), []
    before = weights(model)
    model[1].register_forward_hook(lambda _m, _a, out: kept.append(out.detach()))
    opt = Lomo(model, LR, clip_grad_norm=1e6)
    model(ROWS[0]).square().mean().backward()
    kept[0].zero_()
    with pytest.raises(RuntimeError, match=r"layer of 2\.weight.*modified in place"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    steps(model, opt)


def relu(y: Tensor) -> Tensor:
    return functional.relu_(y)


def view(y: Tensor) -> Tensor:
    y.view(-1)[:2].zero_()
    return y


@pytest.mark.parametrize("change", [relu, view])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 2, 3, 6)])
def test_output_is_modified_in_place(shape: tuple[int, ...], change: Callable[..., Tensor]) -> None:
    """https://github.com/gustavecortal/gpt-j-fine-tuning-example/issues/1."""

    def loop(model: Any, opt: Any) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            train_step(change(model[4](change(model[0](x)))).square().mean(), opt)

    check_same_as_sgd(loop)


def test_output_of_an_embedding_is_modified_in_place() -> None:
    """As above; with ids of two dimensions the output would be a view."""

    def loop(model: Any, opt: Any) -> None:
        model(torch.tensor([[1, 2], [3, 1]])).mul_(0.5).square().sum().backward()
        opt.step()

    check_same_as_sgd(loop, lambda: copy.deepcopy(WeightIsInput().table))


# ---- layouts and dtypes


def transpose(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().t().contiguous().t())


class Layouts(nn.Module):
    """A matrix, a layer, a table and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(6, 4))
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.conv: Any = nn.Conv2d(2, 3, (2, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x @ self.matrix) + self.table(torch.arange(len(x))))
        return self.conv(y.view(-1, 2, 2, 1).expand(-1, 2, 2, 2)).flatten(1)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"clip_grad_value": 0.01}])
def test_weights_in_other_layouts(kind: Any, options: dict[str, Any]) -> None:
    """Layers made of a Conv1D by weight.t(), and channels_last.

    https://github.com/huggingface/transformers/issues/41535
    """
    found = []
    for is_strided in (False, True):
        model = Layouts()
        if is_strided:
            model.matrix = transpose(model.matrix)
            model.layer.weight = transpose(model.layer.weight)
            model.table.weight = transpose(model.table.weight)
            model.conv.to(memory_format=torch.channels_last)
        opt = kind(model, LR, **options)
        steps(model, opt)
        states = [value for state in opt.state.values() for value in state.values()]
        found.append([*weights(model), *states])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (torch.ones(4, 16)[:, ::2], "gaps or overlaps"),
        (torch.ones(1).expand(4), "gaps or overlaps"),
        (torch.ones(4, dtype=torch.complex64), "float32, float16 or bfloat16"),
    ],
)
def test_weights_are_refused_when_the_optimizer_is_made(weight: Tensor, match: str) -> None:
    """Not in the first backward pass: https://github.com/pytorch/pytorch/issues/114299."""
    model = nn.Module()
    model.odd = nn.Parameter(weight)
    with pytest.raises(ValueError, match=f"odd .*{match}"):
        Lomo(model, LR)


def test_model_is_cast_after_the_optimizer_was_made() -> None:
    """https://github.com/pytorch/ao/issues/4616: dtypes that differ in the backward pass."""
    model = net()
    opt = Lomo(model, LR)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"was cast to torch\.bfloat16"):
        model(ROWS[0].bfloat16()).square().mean().backward()
    opt.close()


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_torch_does(dtype: torch.dtype, given: torch.dtype) -> None:
    """autocast leaves float64 and integers alone: https://github.com/pytorch/pytorch/pull/36171."""
    layer = nn.Linear(6, 3).to(dtype)
    outcomes = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            try:
                outcomes.append(layer(ROWS[0].to(given)).dtype)
            except RuntimeError:
                outcomes.append(None)
        Lomo(layer, LR)
    assert outcomes[0] == outcomes[1]


# ---- recomputation


class Gated(nn.Module):
    """A segment that reads the last layer's weight without a gradient."""

    def __init__(self, how: str, *, is_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how, self.is_reentrant = how, is_reentrant

    def segment(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            with torch.no_grad():
                gate = torch.sigmoid(self.head(x))
        elif self.how == "detached":
            gate = functional.linear(x.detach(), self.head.weight.detach())
        elif self.how == "data":
            gate = self.head.weight.data.norm()
        elif self.how == "number":
            gate = torch.tensor(self.head.weight.tolist()).norm()
        else:  # what is no value
            weight: Any = self.head.weight
            assert weight.is_contiguous()
            assert (weight.numel(), weight.size(0)) == (36, 6)
            gate = torch.ones(weight.shape, dtype=weight.dtype, device=weight.device).mean()
        return torch.tanh(self.body(x)) * gate

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        return self.head(checkpoint(self.segment, x, use_reentrant=self.is_reentrant))


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("how", ["layer", "detached", "data", "number"])
def test_segment_reads_a_weight_after_its_update(how: str, is_reentrant: bool) -> None:
    """https://github.com/pytorch/tutorials/pull/2568: weights change while the pass still runs."""
    if how == "layer" and is_reentrant:  # a use that is seen: the update waits for the segment
        check_same_as_sgd(steps, lambda: Gated(how, is_reentrant=True))
        return
    model = Gated(how, is_reentrant=is_reentrant)
    opt = Lomo(model, LR)
    with pytest.raises(RuntimeError, match=r"head\.weight was read inside a backward pass"):
        model(ROWS[0]).square().mean().backward()
    opt.zero_grad()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    opt.close()
    check_same_as_sgd(steps, lambda: Gated(how, is_reentrant=is_reentrant), **DEFERRED)


def test_a_backward_pass_that_clones_what_is_written_is_refused() -> None:
    """torch.autograd.graph.allow_mutation_on_saved_tensors() raises a KeyError of its own for
    custom operators that write their arguments."""
    model = nn.Linear(6, 2)
    before = model.weight.detach().clone()
    opt = Lomo(model, LR)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = model(ROWS[0]).square().mean()
        with pytest.raises(RuntimeError, match=r"allow_mutation_on_saved_tensors\(\) is active"):
            loss.backward()
    assert torch.equal(model.weight, before)
    opt.zero_grad()
    model(ROWS[0]).square().mean().backward()
    opt.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("is_reentrant", [False, True])
@both_modes
def test_segment_reads_shape_and_dtype(is_reentrant: bool, options: dict[str, Any]) -> None:
    """As models of transformers do: https://github.com/huggingface/transformers/pull/41535."""
    check_same_as_sgd(steps, lambda: Gated("shape", is_reentrant=is_reentrant), **options)


class Reused(nn.Module):
    """Weights in reentrant segments, and beside them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layer, self.table = how, nn.Linear(6, 6), nn.Embedding(6, 6)

    def segment(self, x: Tensor) -> Tensor:
        if self.how == "tied":
            return torch.tanh(self.layer(x)) @ self.table.weight.t()
        if self.how == "functional":
            return functional.linear(torch.tanh(self.layer(x)), self.layer.weight)
        return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Any:
        if self.how == "tied":
            x = x + self.table(torch.arange(len(x)))
        elif self.how == "before":
            x = self.layer(x)
        elif self.how == "eval":
            self.eval()
        x = x if x.requires_grad else x.clone().requires_grad_()
        x = checkpoint(self.segment, x, use_reentrant=True)
        if self.how == "nested":
            x = checkpoint(
                lambda y: checkpoint(self.segment, y, use_reentrant=True), x, use_reentrant=True
            )
        elif self.how == "eval":
            x = checkpoint(self.segment, x, use_reentrant=True)
        elif self.how in ("after", "functional"):
            x = self.layer(x)
        return x


REUSED = ["tied", "functional", "before", "after", "eval", "nested"]


@both_modes
@pytest.mark.parametrize("how", REUSED)
def test_reentrant_segment_shares_a_weight(how: str, options: dict[str, Any]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/988, and 81296 of pytorch."""
    check_same_as_sgd(steps, lambda: Reused(how), **options)


@in_ranks(2)
def test_ranks_with_reentrant_segments_that_share_a_weight(rank: int) -> None:
    """As above, with replicas and shards. https://github.com/pytorch/pytorch/issues/81296"""
    for how in REUSED:
        wanted = Reused(how)
        steps(wanted, torch.optim.SGD(wanted.parameters(), LR))
        for options in ({}, DEFERRED, {"clip_grad_norm": 1e6, "clip_mode": "two_pass"}):
            model = Reused(how)
            opt = Lomo(model, LR, group=dist.group.WORLD, **options)
            for x in ROWS[:3]:
                opt.backward(model(x).square().mean())
                opt.step()
            opt.close()
            torch.testing.assert_close(weights(model), weights(wanted))


def test_passes_without_gradients_in_training_mode_delay_nothing() -> None:
    """Pseudo-labels of the model itself: gradients must not wait for step().

    https://github.com/OpenLMLab/LOMO/issues/41
    """
    model = net()
    opt = Lomo(model, LR)
    with torch.no_grad():
        wanted = model(ROWS[1])
    (model(ROWS[0]) - wanted).square().mean().backward()
    assert opt.held_bytes == 0
    opt.step()


@pytest.mark.parametrize("how", ["fused", "replicas", "shards", "hooks"])
@in_ranks(1)
def test_lomo_names_itself_where_a_graph_runs_again(rank: int, how: str) -> None:
    """https://github.com/kozistr/pytorch_optimizer/issues/64: weights are updated between two
    backward passes through one graph."""
    model = net()
    if how == "shards":
        fully_shard(model)
    params = model.parameters() if how == "hooks" else model
    group: Any = {"fused": "none", "shards": None}.get(how, dist.group.WORLD)
    optimizer = Lomo(params, 0.1, model=model, group=group)
    loss = model(torch.ones(2, 6)).sum()
    loss.backward(retain_graph=True)
    before = None if how == "shards" else full_weights(model)
    with pytest.raises(RuntimeError, match=r"after its update by Lomo: .*accumulation_steps=N"):
        (2 * loss).backward()
    assert before is None or all_equal([*full_weights(model).values()], [*before.values()])
    optimizer.step()
    optimizer.zero_grad()
    kept = model(torch.ones(2, 6, requires_grad=True)).sum()
    torch.autograd.grad(kept, [*model.parameters()][1], retain_graph=True)  # no update
    optimizer.zero_grad()


class Looped(nn.Module):
    """A layer that runs in two segments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("build", [Looped, lambda: Reused("before"), lambda: Reused("nested")])
def test_zero_grad_between_the_passes_keeps_the_uses_by_segments(build: Any) -> None:
    def loop(model: Any, opt: Any) -> None:
        for x in ROWS[:3]:
            loss = model(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    check_same_as_sgd(loop, build)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, nullcontext])
def test_segments_without_a_backward_pass_delay_nothing(without_gradients: Any) -> None:
    """An evaluation with a model's checkpoints, or a loss that is dropped."""
    model = Looped()
    opt = Lomo(model, LR)
    for x in ROWS[:2]:
        with without_gradients():
            model(x)
        model(x).square().mean().backward()
        assert opt.held_bytes == 0
        opt.step()


@in_ranks(2)
def test_fully_shard_with_a_layer_in_two_reentrant_segments(rank: int) -> None:
    """torch loses a gradient: https://github.com/deepspeedai/DeepSpeed/issues/2103."""
    model = Looped()
    fully_shard(model.layer)
    fully_shard(model)
    opt = Lomo(model, LR)
    with pytest.raises(RuntimeError, match=r"layer\.\w+ is used by several segments.*reentrant"):
        model(ROWS[0]).square().mean().backward()
    opt.close()


def first_layer(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model[0](x)
    return result


def nested_rows(model: Any, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return first_layer(model, rows).values()


def padded_rows(model: Any, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([x[:2], x[2:]])
    return first_layer(model, rows).to_padded_tensor(0.0)


def dual_numbers(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, ROWS[7])))
    return torch.cat([primal, tangent])


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "nested": nested_rows,  # https://github.com/Lightning-AI/pytorch-lightning/issues/21588
    "padded": padded_rows,
    "sparse": lambda model, x: model(x.relu().to_sparse()),
    "compressed": lambda model, x: model(x.relu().to_sparse_csr()),
    "dual": dual_numbers,  # https://github.com/pytorch/pytorch/issues/137720
    # https://github.com/microsoft/nni/issues/5134, https://github.com/pytorch/pytorch/issues/20862
    "traced": lambda model, x: torch.jit.trace(model, x)(x),
}


@both_modes
@pytest.mark.filterwarnings("ignore")  # of prototypes, and of torch.jit
@pytest.mark.parametrize("use", USES)
def test_uses_that_torch_has_a_layer_for(use: str, options: dict[str, Any]) -> None:
    """Nested and sparse inputs, forward-mode differentiation, and tracing."""

    def loop(model: Any, opt: Any) -> None:
        for x in ROWS[:2]:
            train_step(USES[use](model, x).square().mean(), opt)

    check_same_as_sgd(loop, **options)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.parametrize("options", [{}, DEFERRED, {"clip_grad_value": 9.0}])
def test_layers_without_features(kind: Any, options: dict[str, Any]) -> None:
    """https://github.com/pytorch/pytorch/issues/48152, https://github.com/salute-developers/GigaAM/pull/33"""
    none, some = nn.Linear(0, 4), nn.Linear(6, 0)
    model = nn.ModuleList([none, some])
    bias = none.bias.detach().clone()
    opt = kind(model, LR, **options)
    (none(torch.ones(5, 0)).sum() + some(ROWS[0]).sum()).backward()
    opt.step()
    if kind is Lomo:
        torch.testing.assert_close(none.bias.detach(), bias - LR * 5)
    assert torch.isfinite(none.bias).all()


# ---- parameter groups, schedulers, wrappers

SCHEDULERS = {**pair_optimizers.SCHEDULERS, "SWALR": lambda opt: swa_utils.SWALR(opt, 0.05)}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    """https://github.com/huggingface/transformers/issues/30371: a warm-up that had no effect."""

    def loop(model: Any, opt: Any) -> None:
        scheduler = SCHEDULERS[name](opt)
        for x in ROWS[:5]:
            steps(model, opt, [x])
            scheduler.step()

    check_same_as_sgd(loop)


@both_modes
def test_a_layer_is_thawed_later(options: dict[str, Any]) -> None:
    """https://github.com/amdegroot/ssd.pytorch/issues/109."""

    def build() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    def loop(model: Any, opt: Any) -> None:
        steps(model, opt)
        model[0].requires_grad_(True)
        opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        steps(model, opt)

    check_same_as_sgd(loop, build, **options)


def two_groups(kind: Any, model: Any) -> Any:
    rest = [param for layer in model[1:] for param in layer.parameters()]
    groups = [{"params": list(model[0].parameters()), "lr": LR}, {"params": rest, "lr": 0.01}]
    return kind(groups, LR, **({"model": model} if kind is Lomo else {}))


def test_param_groups_are_reordered() -> None:
    """Each weight keeps the learning rate of the group that it is in."""
    model, reference = net(), net()
    opts = two_groups(Lomo, model), two_groups(torch.optim.SGD, reference)
    for each, opt in zip((model, reference), opts, strict=True):
        opt.param_groups.reverse()
        steps(each, opt)
    torch.testing.assert_close(weights(model), weights(reference))


def test_weights_are_taken_out_of_a_param_group() -> None:
    """Block-wise optimizers replace the list: https://github.com/ContinualAI/avalanche/pull/1362."""
    model = net()
    opt = two_groups(Lomo, model)
    opt.param_groups[1]["params"] = list(model[4].parameters())
    before = weights(model)
    with pytest.raises(ValueError, match="param_groups has 4 weights, but Lomo trains 8"):
        model(ROWS[0]).square().mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.slow
def test_compiled_model_with_a_layer_frozen_for_a_step() -> None:
    """https://github.com/pytorch/pytorch/issues/115607."""

    def loop(model: Any, opt: Any) -> None:
        compiled = torch.compile(model, backend="eager")
        for i, x in enumerate(ROWS[:4]):
            model[2].requires_grad_(i != 1)
            steps(compiled, opt, [x])
        model[2].requires_grad_(True)

    check_same_as_sgd(loop)


def test_low_rank_adapters() -> None:
    """https://github.com/LoganBooker/prodigy-plus-schedule-free/issues/7, with peft."""
    peft = pytest.importorskip("peft")

    def build() -> Any:
        model = net()
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["0", "2"], modules_to_save=["4"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same_as_sgd(steps, build)


@pytest.mark.parametrize("is_reentrant", [False, True])
@both_modes
def test_nested_segments_with_dropout(is_reentrant: bool, options: dict[str, Any]) -> None:
    """https://github.com/LoganBooker/prodigy-plus-schedule-free/issues/7."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(inplace=True))
                for _ in range(4)
            )

        def run_two(self, x: Tensor, begin: int) -> Any:
            for block in self.blocks[begin : begin + 2]:
                x = checkpoint(block, x, use_reentrant=is_reentrant)
            return x

        def forward(self, x: Tensor) -> Any:
            torch.manual_seed(5)
            x = x.clone().requires_grad_()
            for begin in (0, 2):
                x = checkpoint(self.run_two, x, begin, use_reentrant=is_reentrant)
            return x

    check_same_as_sgd(steps, Nested, **options)
