"""What users of other libraries reported of sharded training: weights, states and loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_states import full_weights
from one_process import WIDTH, adamw, muon, network, pair, rows, same, train
from ranks import in_ranks
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from whole_optimizers import EachWeight, Muon64, elementwise

from ringcomm.parallel import get_state_dict as get_whole_state
from ringcomm.parallel import set_state_dict as set_whole_state
from ringcomm.parallel import zero

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def check_resumed(both: Any, rank: int, again: Any, optimizer: Any, atol: float = 1e-6) -> None:
    """`again` gets the state of a Pair, and both make the same steps."""
    values, state = get_whole_state(both.model, both.optimizer, full=True)
    set_whole_state(again, optimizer, values, copy.deepcopy(state))
    for model in (both.plain, both.model, again):
        model.requires_grad_(True)
    both.train(range(2, 4), rank)
    place = (rank, 2) if hasattr(optimizer, "no_sync") else (0, 1)
    train(again, optimizer, range(2, 4), *place)
    same(full_weights(again), full_weights(both.plain), atol)


class WithStored(nn.Module):
    """Frozen weights of 8 bits, which forward scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        stored = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), torch.arange(8).byte()
        self.floats, self.bytes = (nn.Parameter(x, requires_grad=False) for x in stored)
        self.last = nn.Linear(WIDTH, 3)
        self.dtypes: Any = ()

    def forward(self, x: torch.Tensor) -> Any:
        self.dtypes = self.floats.dtype, self.bytes.dtype
        return self.last(x @ self.floats.to(x.dtype) + self.bytes.to(x.dtype) / 8)


@STAGES
@in_ranks(2)
def test_stored_weights_are_not_cast(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8414: float8 has its scales elsewhere."""

    def make(model: Any) -> Any:
        return torch.optim.AdamW(model.last.parameters(), 0.02, eps=1e-3)

    def check(model: Any) -> None:
        assert model.dtypes == (torch.float8_e4m3fn, torch.uint8)

    both = pair(stage, make, WithStored)
    both.train(range(3), rank, between=check)
    model = WithStored()
    if stage == 3:
        with pytest.raises(ValueError, match="would cast floats"):
            zero.shard(model, make(model), stage, param_dtype=torch.bfloat16)
        return
    optimizer = zero.shard(model, make(model), stage, param_dtype=torch.bfloat16)
    train(model, optimizer, range(1), rank, 2, between=check)


class WithNothing(nn.Module):
    """A layer without outputs, a weight without dimensions, and one of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.none = nn.Parameter(torch.zeros(0, WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.scale, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.first(x)) * self.scale
        return self.last(x + nn.functional.linear(x, self.none).sum(-1, keepdim=True)) * self.one


@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(2)
def test_weights_without_elements_or_dimensions(rank: int, stage: int, make: Any) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8297,
    https://github.com/deepspeedai/DeepSpeed/pull/8467,
    https://github.com/pytorch/pytorch/issues/130810: states after loading."""
    both = pair(stage, make, WithNothing)
    get_whole_state(both.model, both.optimizer, full=True)  # before the first step
    both.train(range(2), rank)
    both.optimizer.load_state_dict(both.optimizer.state_dict())
    again = WithNothing()
    check_resumed(both, rank, again, zero.shard(again, make(again), 3 - stage))


# ---- options


@STAGES
@pytest.mark.parametrize("make", [torch.optim.AdamW, Muon64])
@in_ranks(2)
def test_tensors_as_learning_rates(rank: int, stage: int, make: Any) -> None:
    """The user keeps the tensor, and a scheduler sets it.

    https://github.com/deepspeedai/DeepSpeed/pull/8202, .../pull/7633,
    https://github.com/pytorch/pytorch/issues/126670
    """
    rates = []

    def of(model: Any) -> Any:
        rates.append(torch.tensor(0.05))
        options = {"foreach": False, "eps": 1e-3} if make is torch.optim.AdamW else {}
        params = [param for param in model.parameters() if param.dim() == 2]
        for param in model.parameters():
            param.requires_grad_(param.dim() == 2)
        return make(params, rates[-1], **options)

    both = pair(stage, of, num_steps_before=1)
    made = (both.given, both.optimizer)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in made]
    for step in range(2):
        both.train(range(step, step + 1), rank)
        for each in schedulers:
            each.step()
    for rate in rates:
        rate.fill_(0.1)
    both.train(range(2, 4), rank)


@STAGES
@in_ranks(2)
def test_options_that_change_between_steps(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/fairscale/issues/66: others than the learning rate, and
    whole parameter groups."""

    def sgd(model: Any) -> Any:
        groups = [{"params": [p], "lr": 0.1 * 0.8**i} for i, p in enumerate(model.parameters())]
        return torch.optim.SGD(groups)

    both = pair(stage, sgd)
    for step in range(6):
        both.train(range(step, step + 1), rank)
        for each in (both.given, both.optimizer):
            for group in each.param_groups[::2]:
                group["momentum"] = (0.9, 0.5, 0.0)[step % 3]
                group.update(weight_decay=0.1 * step, nesterov=step % 3 == 0, maximize=step == 4)
            each.param_groups[1] = {**each.param_groups[1], "lr": 0.05 * step}


@STAGES
@in_ranks(2)
def test_a_graph_through_updates_is_refused(rank: int, stage: int) -> None:
    """https://github.com/pytorch/xla/pull/6454: differentiable=True would be ignored."""
    model = network()
    with pytest.raises(TypeError, match="differentiable=True"):
        zero.shard(model, torch.optim.SGD(model.parameters(), 0.1, differentiable=True), stage)


# ---- states that are saved and loaded


@elementwise
class Bits(EachWeight):
    """Whose states are integers and booleans."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def update(self, group: dict[str, Any], param: Any) -> None:
        state, is_up = self.state[param], param.grad > 0
        signs = state.setdefault("signs", torch.zeros_like(param, dtype=torch.uint8))
        flips = state.setdefault("flips", torch.zeros_like(param, dtype=torch.bool))
        state["signs"] = (signs << 1) | is_up.byte()
        state["flips"] = flips ^ is_up
        factor = torch.where(state["flips"], 1.0, -0.5) * (1 + (state["signs"] & 3))
        param.sub_(group["lr"] * factor * param.grad)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bits": lambda model: Bits(model.parameters()),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), 0.02, eps=1e-3),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), 0.1, t0=1),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1, initial_accumulator_value=0.3),
}


@STAGES
@pytest.mark.parametrize("kind", KINDS)
@in_ranks(2)
def test_states_go_on(rank: int, stage: int, kind: str) -> None:
    """https://github.com/pytorch/ao/issues/3314, https://github.com/pytorch/pytorch/issues/43706:
    states that are no floats; https://github.com/pytorch/pytorch/pull/74215: tensors without
    dimensions other than the step; https://github.com/huggingface/accelerate/issues/3855,
    https://github.com/hpcaitech/ColossalAI/pull/6433: states from before the first step.
    """
    both = pair(stage, KINDS[kind], num_steps_before=1)
    both.train(range(2), rank)
    again = network()
    both.optimizer.load_state_dict(both.optimizer.state_dict())
    check_resumed(both, rank, again, zero.shard(again, KINDS[kind](again), stage % 3 + 1), 2e-6)


@STAGES
@in_ranks(2)
def test_groups_in_another_order_than_the_model(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/pull/54736, https://github.com/facebookresearch/fairscale/issues/601"""

    def make(model: Any) -> Any:
        params: list[Any] = [*model.parameters()][::-1]
        groups: list[Any] = [{"params": params[::2], "lr": 0.05}, {"params": params[1::2]}]
        return torch.optim.AdamW(groups)

    both, alone = pair(stage, make), network()
    both.train(range(2), rank)
    check_resumed(both, rank, alone, make(alone))


@STAGES
@in_ranks(2)
def test_saved_while_frozen(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/104148: a layer is thawed after some steps, also
    where it has been trained before the state is loaded."""

    def make() -> Any:
        model = network()
        model[0].requires_grad_(False)
        return model

    both, again = pair(stage, adamw, make), make()
    both.train(range(2), rank)
    optimizer = zero.shard(again, adamw(again), stage)
    again[0].requires_grad_(True)
    train(again, optimizer, range(7, 9), rank, 2)
    check_resumed(both, rank, again, optimizer)


@STAGES
@in_ranks(2)
def test_a_learning_rate_finder(rank: int, stage: int) -> None:
    """https://github.com/fastai/fastai/issues/3185: states from before the first step come back."""
    both = pair(stage, adamw)
    saved = copy.deepcopy((both.model.state_dict(), both.optimizer.state_dict()))
    for group in both.optimizer.param_groups:
        group["lr"] *= 3
    train(both.model, both.optimizer, range(5, 8), rank, 2)
    both.model.load_state_dict(saved[0])
    both.optimizer.load_state_dict(saved[1])
    both.train(range(3), rank)


@STAGES
@in_ranks(2)
def test_evaluated_in_16_bits_and_saved(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/104770: a forward pass without a backward
    pass, then a checkpoint, which must have the float32 values."""
    models = network(), network()
    made = [zero.shard(m, adamw(m), stage, param_dtype=torch.bfloat16) for m in models]
    train(models[0], made[0], range(2), rank, 2)
    models[0].eval()
    with torch.inference_mode():
        expected = models[0](rows(5))
    values, state = get_state_dict(models[0], made[0])
    set_state_dict(
        models[1], made[1], model_state_dict=values, optim_state_dict=copy.deepcopy(state)
    )
    with torch.inference_mode():
        assert torch.equal(models[1](rows(5)), expected)
    for model, optimizer in zip(models, made, strict=True):
        train(model.train(), optimizer, range(2, 4), rank, 2)
    same(full_weights(models[1]), full_weights(models[0]), 0)


@in_ranks(3)
def test_largest_gradients(rank: int) -> None:
    """https://github.com/meta-pytorch/torchrec/pull/3199: at stage 3."""

    def clip(model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
        nn.utils.clip_grad_value_(model.parameters(), 0.008)

    both = pair(3, lambda model: torch.optim.SGD(model.parameters(), 1.0))
    both.train(range(3), rank, 3, between=clip)


@STAGES
@in_ranks(2)
def test_two_models_through_each_other(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/4923, https://github.com/Lightning-AI/pytorch-lightning/issues/19773:
    a generator's gradients pass a discriminator that has its own optimizer."""

    def trained(rank: int, world_size: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, size))
            for size in (WIDTH, 1)
        ]
        made = [adamw(model) for model in models]
        if world_size > 1:
            made = [zero.shard(*each, stage) for each in zip(models, made, strict=True)]
        maker, judge = models
        for step in range(3):
            x = rows(step, rank, world_size)
            made[1].zero_grad()
            fake = maker(x)
            (judge(x).mean() - judge(fake.detach()).mean()).backward()
            made[1].step()
            made[0].zero_grad()
            judge(fake).mean().backward()
            made[0].step()
        found = [full_weights(model) for model in models]
        return found[0] | {f"judge.{name}": value for name, value in found[1].items()}

    same(trained(rank, 2), trained(0, 1))


# ---- what programs do with a model beside its forward pass: right at stage 3, or refused by name


class Towers(nn.Module):
    """With a method beside forward, which uses weights of the model itself."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 4)
        self.is_reentrant = is_reentrant

    def encode(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=True) if self.is_reentrant else layer(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).square()


X = torch.linspace(-1, 1, 16).view(2, 8)


def made(**options: Any) -> tuple[Any, Any]:
    """A model after a step, and its optimizer."""
    model = Towers(**options)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    if not options:
        train_towers(model, optimizer)
    return model, optimizer


def train_towers(model: Any, optimizer: Any) -> None:
    train_step(model(X.clone().requires_grad_()).sum(), optimizer)


@in_ranks(2)
def test_methods_beside_forward(rank: int) -> None:
    """https://github.com/haotian-liu/LLaVA/issues/799"""
    alone = Towers()
    train_towers(alone, torch.optim.SGD(alone.parameters(), 0.1))
    model, _ = made()
    with pytest.raises(RuntimeError, match=r"this Linear are sharded .*register_fsdp_forward_meth"):
        model.encode(X)
    register_fsdp_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(X), alone.encode(X))
    torch.testing.assert_close(model(X), alone(X))


@in_ranks(2)
def test_what_would_have_no_effect(rank: int) -> None:
    """Weights that are set by `.data`, and weights that are passed to backward()."""

    def by_data(model: Any) -> None:
        model.head.weight.data = torch.ones(4, 8)

    def by_sharded_data(model: Any) -> None:
        model.layers[1][0].bias.data = 2 * model.layers[1][0].bias.data

    def by_vector(model: Any) -> None:
        vector_to_parameters(0 * parameters_to_vector(model.parameters()), model.parameters())

    for write in (by_data, by_sharded_data, by_vector):
        model, optimizer = made()
        wanted, _ = get_whole_state(model, full=True)
        write(model)
        for call in (lambda model=model: model(X), optimizer.step):
            with pytest.raises(RuntimeError, match=r"`\.data` of .* was set.*set_state_dict"):
                call()
        torch.testing.assert_close(get_whole_state(model, full=True)[0], wanted, rtol=0, atol=0)
    model, optimizer = made()
    model(X).sum().backward(inputs=list(model.parameters()))
    assert optimizer.clip_grad_norm_(1.0) == 0  # which has nothing to clip
    with pytest.raises(RuntimeError, match=r"backward\(inputs=weights\) does nothing at stage 3"):
        optimizer.step()
    train_towers(model, optimizer)  # goes on
    assert model(X).requires_grad  # not followed by a backward pass
    train_towers(model, optimizer)
    optimizer.step()  # without gradients: nothing, as in torch


@in_ranks(2)
def test_a_layer_in_two_reentrant_segments(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/2103"""
    model, optimizer = made(is_reentrant=True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.0\.weight .*reentrant.*use_reentrant=Fal"):
        train_towers(model, optimizer)


@STAGES
@in_ranks(2)
def test_weights_loaded_after_a_forward_pass_are_used(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/117421: no backward pass came between."""
    both = pair(stage, adamw)
    both.train(range(2), rank)
    both.model(rows(50, rank, 2))
    _, state = get_whole_state(both.model, both.optimizer, full=True)
    values = {name: 1.5 * value for name, value in network().state_dict().items()}
    set_whole_state(both.model, both.optimizer, values, state)
    both.plain.load_state_dict(values)
    torch.testing.assert_close(both.model(rows(50)), both.plain(rows(50)))
    both.train(range(2, 4), rank)


class FrozenNorms(nn.Module):
    """Recomputed blocks: the first is frozen, and of the others the norms are."""

    is_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        for frozen in (blocks[0], *(block[0] for block in blocks)):
            frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x)


class FrozenNormsReentrant(FrozenNorms):
    is_reentrant = True


@pytest.mark.parametrize("make", [FrozenNorms, FrozenNormsReentrant])
@in_ranks(2)
def test_frozen_weights_in_recomputed_blocks(rank: int, make: Any) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8130: the input needs no gradient, two passes a
    step. https://github.com/huggingface/transformers/issues/47254
    """

    def optimizer(model: Any) -> Any:
        trained = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, 0.02, eps=1e-3)

    both = pair(3, optimizer, make)
    for step in (0, 2, 4):
        for number in (step, step + 1):
            for model, place in ((both.plain, (0, 1)), (both.model, (rank, 2))):
                x = rows(number, *place)
                (model(x) - x[:, :3]).square().mean().backward()
        for each in (both.given, both.optimizer):
            each.step()
            each.zero_grad()
        same(full_weights(both.model), full_weights(both.plain), 2e-6)


@STAGES
@in_ranks(2)
def test_groups_in_another_order_than_the_weights(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/fairscale/issues/380: states go to their weights."""

    def optimizer(model: Any) -> Any:
        odd, even = [*model.parameters()][1::2][::-1], [*model.parameters()][::2][::-1]
        groups: list[Any] = [{"params": odd, "lr": 0.03}, {"params": even}]
        return torch.optim.AdamW(groups, 0.02, eps=1e-3)

    both = pair(stage, optimizer)
    both.train(range(2), rank)
    again = network()
    check_resumed(both, rank, again, zero.shard(again, optimizer(again), stage))
