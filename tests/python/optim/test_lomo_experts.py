"""LOMO of models with sharded experts; test_expert_training.py has the steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import Case, batch, expert_net, groups_of, loss_of
from ranks import in_ranks
from steps import train_step
from torch.distributed.fsdp import fully_shard
from zero_models import assert_alike

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import expert

LR = 0.2


@in_ranks(2)
def test_experts_are_updated_in_the_backward_pass(rank: int) -> None:
    """Without replicas; other gradients are kept until step(). Rounding is alike on all ranks."""
    model = expert_net(Case(3, 2)).bfloat16()
    mine = expert.expert_parameters(model)
    others = {name: param for name, param in model.named_parameters() if name not in mine}
    opt = Lomo(model, LR, group=dist.group.WORLD, stochastic_rounding=True)
    for step in range(2):
        before = {name: param.clone() for name, param in model.named_parameters()}
        loss_of(model, *(value.bfloat16() for value in batch(step, rank, 8))).backward()
        assert all(param.equal(before[name]) for name, param in others.items())
        assert not all(param.equal(before[name]) for name, param in mine.items())
        assert opt.held_bytes == sum(param.nbytes for param in others.values())
        opt.step()
        assert not any(param.equal(before[name]) for name, param in others.items())
    assert_alike({name: param.detach() for name, param in others.items()})


@in_ranks(2)
def test_a_loss_that_is_not_finite_raises_on_all_ranks(rank: int) -> None:
    """And writes no weight that is not finite."""
    model = expert_net(Case(4, 2))
    opt = Lomo(model, LR, group=dist.group.WORLD)
    loss = loss_of(model, *batch(0, rank, 4)) * (torch.nan if rank else 1.0)
    loss.backward()
    with pytest.raises(RuntimeError, match="is not finite"):
        opt.step()
    assert all(param.isfinite().all() for param in model.parameters())
    train_step(loss_of(model, *batch(1, rank, 4)), opt)
    assert all(param.isfinite().all() for param in model.parameters())


@in_ranks(4)
def test_what_is_refused(rank: int) -> None:
    words = "models with sharded experts over data-parallel ranks only: pass their group="
    none: tuple[Any, ...] = ({}, {"group": "none"})
    for options in none:
        with pytest.raises(ValueError, match=words):
            Lomo(expert_net(Case(3, 2)), LR, **options)
    model = expert_net(Case(3, 2))  # a rank has no experts, and raises too
    fully_shard(model, ignored_params={*expert.expert_parameters(model).values()})
    with pytest.raises(ValueError, match=words):
        AdaLomo(model, LR)
    groups = groups_of(2)
    forgotten = expert_net(Case(3, 2), group=groups["group"])
    with pytest.raises(ValueError, match=r"Lomo is given 4 data-parallel ranks, but moe\.experts"):
        Lomo(forgotten, LR, group=dist.group.WORLD)
