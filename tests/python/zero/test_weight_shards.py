"""WeightShards: the training of one process, to the bit where the mean is exact; memory; bytes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from ranks import in_ranks, place, run_ranks
from sharded_net import (
    DIM,
    VOCAB,
    Net,
    assert_near,
    descend,
    live_bytes,
    loss_of,
    make,
    sgd,
    trainable,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ringcomm.ops import shard_range
from ringcomm.parallel.shards import WeightShards, find_shards

STEPS = 3


def reference(mode: str, num_shares: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """One process that takes the shares one after the other: losses by step and share."""
    net = make(mode)
    losses: list[list[float]] = []
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        losses.append([])
        for share in range(num_shares):
            loss = loss_of(net, step, share)
            loss.backward()
            losses[-1].append(loss.item())
            for param in trainable(net):
                if param.grad is not None:  # 16 bits are summed in fp32, and rounded once
                    grad = param.grad.float()
                    sums[param] = sums[param] + grad if param in sums else grad
                    param.grad = None
        for param, total in sums.items():
            descend(param, (total / num_shares).to(param.dtype))
    return losses, net.state_dict()


# ---- training


def check_training(rank: int, mode: str, device: str) -> None:
    world_size = dist.get_world_size()
    torch.set_num_threads(1)
    losses, expected = reference(mode, world_size)
    net = make(mode).to(place(device, rank))
    if rank > 0:  # values are those of rank 0
        for param in net.parameters():
            param.data.fill_(float(rank))
    shards = WeightShards(net, mesh=init_device_mesh(device, (world_size,)))
    for step in range(STEPS):
        loss = loss_of(net, step, rank)
        loss.backward()
        assert live_bytes(net) == 0
        if world_size == 2 and device == "cpu":
            assert loss.item() == losses[step][rank]
        assert loss.item() == pytest.approx(losses[step][rank], rel=0, abs=1e-6)
        sgd(shards, net)
    assert_near(
        full_weights(shards), expected, atol=0 if world_size <= 2 and device == "cpu" else 1e-6
    )
    with torch.no_grad():  # evaluation, with and without all weights at once
        outside = loss_of(net, 9, rank)
        assert live_bytes(net) == 0
        with shards.gather():
            assert loss_of(net, 9, rank).item() == outside.item()
            assert_near(net.state_dict(), full_weights(shards), atol=0)
    shards.close()
    shards.close()
    assert_near(net.state_dict(), expected, atol=0 if world_size <= 2 and device == "cpu" else 1e-6)
    copy.deepcopy(net)
    assert all(find_shards(param) is None for param in net.parameters())


@pytest.mark.parametrize(
    ("world_size", "backend", "mode"),
    [
        (2, "ringcomm", "shared layer"),
        (2, "ringcomm", "shared weight"),
        (2, "ringcomm", "unused"),
        (2, "ringcomm", "checkpointed head"),
        (2, "ringcomm", "mixed"),
        (3, "ringcomm", "tied"),
        (4, "ringcomm", "reentrant"),
        (3, "gloo", "reentrant"),
        (1, "gloo", "tied"),
    ],
)
def test_training(world_size: int, backend: str, mode: str, device: str) -> None:
    run_ranks(world_size, check_training, mode, device, backend=backend)


# ---- memory


def watch(net: Net, seen: list[int]) -> None:
    """Notes the bytes of whole weights whenever a module or a gradient comes by."""
    for module in net.modules():
        module.register_forward_pre_hook(lambda *_: seen.append(live_bytes(net)))
        module.register_forward_hook(lambda *_: seen.append(live_bytes(net)))
    for block in net.blocks:
        block.register_full_backward_hook(lambda *_: seen.append(live_bytes(net)))
    for param in trainable(net):
        param.register_post_accumulate_grad_hook(lambda _: seen.append(live_bytes(net)))


@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@in_ranks(2)
def test_memory(rank: int, mode: str) -> None:
    net, other = make(mode), make(mode)
    num_bytes = live_bytes(net)
    block_bytes = live_bytes(net.blocks[0])
    root_bytes = num_bytes - 3 * block_bytes
    shards = WeightShards(net)
    pieces = [shards.shard_of(param) for param in net.parameters()]
    assert sum(piece.nbytes for piece in pieces) == sum(
        (end - begin) * param.element_size()
        for param in net.parameters()
        for begin, end in [shard_range(param.numel(), dist.get_world_size(), rank)]
    )
    versions = [param._version for param in net.parameters()]
    seen: list[int] = []
    watch(net, seen)
    for step in range(2):
        loss_of(net, step, rank).backward()
        assert live_bytes(net) == 0
    assert len(seen) > 50
    assert max(seen) == root_bytes + block_bytes  # shards and two units
    assert [param._version for param in net.parameters()] == versions
    unsharded: list[int] = []
    watch(other, unsharded)
    loss_of(other, 0, rank).backward()
    assert min(unsharded) == num_bytes


@in_ranks(2)
def test_two_backwards(rank: int) -> None:
    """A graph that is kept, a backward that fails, and a unit that autograd does not see."""
    net = make()
    shards = WeightShards(net)
    loss = loss_of(net, 0, rank)
    loss.backward(retain_graph=True)
    first = [param.grad.clone() for param in trainable(net) if param.grad is not None]
    net.zero_grad()
    loss.backward()
    second = [param.grad for param in trainable(net) if param.grad is not None]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    handle = net.blocks[1].get_parameter("up.bias").register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(net, 0, rank).backward()
    handle.remove()
    net.zero_grad()
    assert live_bytes(net) > 0
    for param in net.parameters():  # what the backward has left is old by now
        shards.shard_of(param).zero_()
    assert loss_of(net, 0, rank).item() == pytest.approx(torch.tensor(VOCAB).log().item())
    net.zero_grad()
    assert live_bytes(net) == 0


class Fused(torch.autograd.Function):
    """A product whose weight's gradient autograd does not see; a token stands for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None, torch.zeros(())


class FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM))
        self.token = torch.zeros((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Fused.apply(x, self.weight.detach(), self.token)
        return y


@in_ranks(2)
def test_release(rank: int) -> None:
    """The first layer's input has no gradient that would tell that the backward has left."""
    first, second = FusedLinear(), FusedLinear()
    layers = nn.Sequential(first, nn.ReLU(inplace=True), second)
    shards = WeightShards(layers)
    live: list[int] = []

    def note(_: Tensor) -> None:
        live.append(live_bytes(layers))
        shards.release(first.weight)
        live.append(live_bytes(layers))

    first.token.register_post_accumulate_grad_hook(note)
    layers(torch.ones(2, DIM)).sum().backward()
    assert live == [first.weight.nbytes, 0]
    assert live_bytes(layers) == 0


@in_ranks(2)
def test_freed_with_the_model(rank: int) -> None:
    net = make()
    shards = WeightShards(net)
    loss_of(net, 0, rank).backward()
    gone: list[weakref.ref[Any]] = [weakref.ref(shards), weakref.ref(net.embed.weight)]
    assert find_shards(net.embed.weight) is shards
    del shards
    gc.collect()
    assert find_shards(net.embed.weight) is gone[0]() is not None
    del net
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
