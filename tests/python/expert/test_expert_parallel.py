"""Experts with replicas, DDP and fully_shard: their gradients, states, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from moe_models import (
    DIM,
    LR,
    Case,
    batch,
    expert_net,
    groups_of,
    loss_of,
    make_expert,
)
from ranks import in_ranks
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from zero_models import sent_bytes

import ringcomm
from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import expert, zero
from ringcomm.parallel.expert.dispatch import dispatch, plan_dispatch


@in_ranks(4)
def test_means(rank: int) -> None:
    """What is averaged, and its bytes; gradients that some rank has not."""
    net = expert_net(Case(4, 2), **groups_of(2))
    net.last.bias.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(3))
    net.register_parameter("unused", unused)
    loss_of(net, *batch(0, rank, 4)).backward()
    if rank > 0:
        net.first.bias.grad = None
        grad = None
    else:
        assert net.first.bias.grad is not None
        grad = net.first.bias.grad.clone()
    before = sent_bytes()["all_reduce"]
    expert.average_gradients(net)
    sent = sent_bytes()["all_reduce"] - before
    assert unused.grad is None
    assert net.last.bias.grad is None
    assert net.first.bias.grad is not None
    of_first = torch.zeros(DIM) if grad is None else grad / 4
    dist.broadcast(of_first, 0)
    torch.testing.assert_close(net.first.bias.grad, of_first)
    local = expert.expert_parameters(net)
    others = [p for n, p in net.named_parameters() if n not in local and p.requires_grad]
    num_elems = sum(param.numel() for param in others if param is not unused)
    of_experts = sum(param.numel() for param in local.values())
    # One shot: 3 peers get a small buffer whole; in a pair one does.
    assert sent == 3 * (4 * num_elems + len(others)) + 4 * of_experts + len(local)
    with pytest.raises(
        ValueError, match=r"2 data-parallel ranks, but moe.experts has experts over 2"
    ):
        expert.average_gradients(net, net.moe.experts.group)


@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks()
def test_the_second_derivative_of_an_exchange(rank: int) -> None:
    """The gradient of r ** 3 is 3 r ** 2, and that of its square 36 r ** 3, on any rank.

    https://github.com/NVIDIA/Megatron-LM/pull/6657: what one rank received is modified in place.
    """
    rows = torch.arange(1.0, 7.0).view(3, 2).add(rank).requires_grad_()
    counts = torch.tensor([1, 2] if rank == 0 else [2, 1])
    group = dist.group.WORLD
    assert group is not None
    plan = plan_dispatch(counts, rows.dtype, group, is_grad_needed=True)
    loss = dispatch(rows, plan)[0].pow(3).sum()
    (grad,) = torch.autograd.grad(loss, rows, create_graph=True)
    torch.testing.assert_close(grad, 3 * rows**2)
    grad.square().sum().backward()
    torch.testing.assert_close(rows.grad, 36 * rows.detach() ** 3)
    (grad,) = torch.autograd.grad(dispatch(rows * 1, plan)[0].mul_(2).pow(3).sum(), rows)
    torch.testing.assert_close(grad, 24 * rows**2)


@in_ranks(4)
def test_accumulation(rank: int) -> None:
    """Two micro-batches, averaged once; what would divide experts twice is refused."""
    net = expert_net(Case(3, 2), **groups_of(2))
    for micro_batch in range(2):
        loss_of(net, *batch(micro_batch, rank, 4)).backward()
    expert.average_gradients(net)
    grads = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    for _ in range(2):  # again at once, and with a micro-batch on top
        with pytest.raises(RuntimeError, match="already averaged these gradients: call it once"):
            expert.average_gradients(net)
        loss_of(net, *batch(2, rank, 4)).backward()
    for set_to_none in (False, True):
        net.zero_grad(set_to_none=set_to_none)
        for micro_batch in range(2):
            loss_of(net, *batch(micro_batch, rank, 4)).backward()
        expert.average_gradients(net)
        again = [param.grad for param in net.parameters() if param.grad is not None]
        torch.testing.assert_close(again, grads)


@in_ranks(2)
def test_ddp_without_the_list_is_refused(rank: int) -> None:
    net = expert_net(Case(4, 2))
    ddp = DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match=r"call ringcomm\.parallel\.expert\.ignore_in_ddp"):
        ddp(batch(0, rank, 3)[0])


@in_ranks(2)
def test_an_overflow_at_one_expert(rank: int) -> None:
    """An infinite gradient of one rank's expert: no rank takes the step."""
    net = expert_net(Case(2, 1))
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), LR)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for is_finite in (False, True):
        scaler.scale(loss_of(net, *batch(0, rank, 4))).backward()
        expert.average_gradients(net)
        if not is_finite and rank == 1:
            net.moe.experts["1"][0].bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        for name, value in net.state_dict().items():
            if "experts" not in name:
                assert torch.equal(value, before[name]) != is_finite


@in_ranks(2)
def test_all_experts_on_every_rank_are_replicas(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    net = expert_net(Case(4, 2), group=alone)  # all experts on every rank
    assert not expert.expert_parameters(net)
    zero.shard(net, torch.optim.SGD(net.parameters(), LR), 1)


@in_ranks(2)
def test_buffers(rank: int) -> None:
    """Experts with buffers, of other dtypes, and a model that is itself the layer."""

    def make() -> nn.Module:
        module = make_expert()
        module.register_buffer("steps", torch.tensor(rank))
        return module

    layer = MixtureOfExperts(DIM, make, 3, 1)
    whole = full_weights(layer)
    assert [int(whole[f"experts.{idx}.steps"]) for idx in range(3)] == [0, 0, 1]
    assert set(expert.expert_parameters(layer)) == {
        f"experts.{name}" for name, _ in layer.experts.named_parameters()
    }


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        MixtureOfExperts(DIM, make_expert, 2)
    assert ringcomm.stats() == {}
