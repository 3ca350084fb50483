"""What users of other libraries reported of mixtures of experts with sharded optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from one_process import adamw, muon, same
from ranks import in_ranks
from steps import apply_steps
from torch import Tensor, nn
from whole_optimizers import Averaged

from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import zero
from ringcomm.parallel.optimizer_classes import optimizers_of

ROWS = 24
STAGES = pytest.mark.parametrize("stage", [1, 2])


class Net(nn.Module):
    """Layers around experts that the ranks of a group share."""

    def __init__(self, num_experts: int, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        top_k = min(2, num_experts)
        self.moe = MixtureOfExperts(7, self.make_expert, num_experts, top_k, group=group)
        self.last = nn.Linear(7, 3)

    @staticmethod
    def make_expert() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(x + self.moe(x))


def averaged(model: nn.Module) -> Any:
    made = Averaged(model.parameters())
    made.train()
    return made


def only(*names: str) -> Callable[[nn.Module], None]:
    """Trains the weights with these parts of names alone."""

    def freeze(model: nn.Module) -> None:
        for own, param in model.named_parameters():
            param.requires_grad_(any(name in own for name in names))

    return freeze


def two_experts_alone(model: Any) -> None:
    """All tokens go to the first two, which are rank 0's."""
    with torch.no_grad():
        model.first.bias.fill_(9)
        model.moe.router.weight.zero_()
        model.moe.router.weight[:2] = torch.tensor([[5.0], [4.0]])


def nets(num_experts: int = 4) -> list[Any]:
    """In one process, and over two ranks."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return [Net(num_experts, alone), Net(num_experts, dist.new_group([0, 1]))]


def step(
    model: Any, optimizer: Any, number: int, part: slice = slice(None), world_size: int = 1
) -> None:
    """The gradient of a sum: the mean over ranks is divided out, so that ranks may differ."""
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number))[part]
    loss = model(x).square().sum() * world_size / ROWS
    (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
    if world_size == 1 and (clip := getattr(model, "clip", None)):
        model.norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    apply_steps(*optimizers_of(optimizer))


def compare(
    rank: int,
    stage: int,
    make: Callable[[nn.Module], Any] = adamw,
    *,
    prepare: Callable[[Any], None] = lambda _: None,
    after_first: Callable[[Any], None] = lambda _: None,
    clip: float | None = None,
    num_first: int = ROWS // 2,
    num_experts: int = 4,
) -> None:
    """Steps in one process and on two ranks, of which the first has `num_first` rows."""
    models = nets(num_experts)
    for model in models:
        prepare(model)
        model.clip = clip
    given, own = (make(model) for model in models)
    optimizer = zero.shard(models[1], own, stage, clip_grad_norm=clip, bucket_bytes=300)
    part = slice(num_first) if rank == 0 else slice(num_first, None)
    for number in range(4):
        step(models[0], given, number)
        step(models[1], optimizer, number, part, 2)
        if clip is not None:
            assert optimizer.grad_norm == pytest.approx(float(models[0].norm), rel=1e-4)
        for model in models:
            if number == 0:
                after_first(model)
    same(full_weights(models[1]), full_weights(models[0]), 5e-6)


@STAGES
@in_ranks(2)
def test_parts_that_are_thawed(rank: int, stage: int) -> None:
    """With Muon, of which experts have an owner among their replicas."""
    compare(rank, stage, muon, prepare=only("last"), after_first=lambda m: m.requires_grad_(True))


@STAGES
@pytest.mark.parametrize("make", [adamw, muon])
@in_ranks(2)
def test_a_rank_without_a_gradient(rank: int, stage: int, make: Any) -> None:
    """https://github.com/ScienceOne-AI/DeepSeek-671B-SFT-Guide/issues/7: a rank has no experts, or
    no tokens for them, and the others wait for it."""
    clip = 0.01 if make is adamw else None
    compare(rank, stage, make, prepare=only("experts"), clip=clip, num_experts=1)

    def prepare(model: Any) -> None:
        two_experts_alone(model)
        only("experts")(model)

    compare(rank, stage, make, prepare=prepare, clip=clip)


@STAGES
@in_ranks(2)
def test_a_rank_without_tokens(rank: int, stage: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4851, https://github.com/NVIDIA-NeMo/Automodel/pull/935:
    of its own, or for its experts."""
    compare(rank, stage, num_first=ROWS, clip=0.05)
    compare(rank, stage, prepare=two_experts_alone, clip=0.05)


@STAGES
@in_ranks(2)
def test_schedule_free_experts(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/7156: their states are sharded, too."""
    compare(rank, stage, averaged)


@STAGES
@in_ranks(2)
def test_an_overflow_of_one_expert(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/5259: which one rank has."""
    model = nets()[1]
    optimizer = zero.shard(model, adamw(model), stage, loss_scale="dynamic")
    before = full_weights(model)
    if rank == 1:
        next(model.moe.experts.parameters()).register_hook(lambda grad: grad * math.inf)
    step(model, optimizer, 0, slice(rank * 12, rank * 12 + 12), 2)
    same(full_weights(model), before, 0)
    assert optimizer.loss_scale == 2**15
