"""WeightShards: pieces, state dicts, units, and what goes wrong."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights, load_full_weights
from ranks import in_ranks, run_ranks
from sharded_net import DIM, loss_of, make
from torch import Tensor, nn

import ringcomm
from ringcomm.parallel import offload, zero
from ringcomm.parallel.shards import WeightShards, find_shards

# ---- gradients and shards


class Call(nn.Module):
    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self) -> None:
        return None


def check_pieces(rank: int) -> None:
    world_size = dist.get_world_size()
    sizes = [(0,), (), (2,), (5, 7), (130, 129)]
    params = nn.ParameterList([torch.arange(float(torch.Size(s).numel())).view(s) for s in sizes])
    shards = WeightShards(Call(params))
    for param in params:
        begin, end = shards.range_of(param)
        assert shards.shard_of(param).tolist() == list(range(begin, end))
        mean = (torch.arange(param.numel()) % 7 * (world_size + 1)).view(param.shape)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            grad = (mean * 2 * (rank + 1) // (world_size + 1)).to(dtype)
            strided = grad.t().contiguous().t() if grad.dim() == 2 else grad
            piece = shards.reduce_scatter(param, strided)
            assert piece.dtype == dtype
            assert torch.equal(piece, mean.flatten()[begin:end].to(dtype))
    shards.shard_of(params[4]).mul_(2)
    with shards.gather(), shards.gather():
        assert torch.equal(params[4].flatten(), torch.arange(130.0 * 129) * 2)
        assert torch.equal(params[3].flatten(), torch.arange(35.0))


@pytest.mark.parametrize(("world_size", "backend"), [(3, "gloo"), (4, "ringcomm")])
def test_pieces(world_size: int, backend: str) -> None:
    run_ranks(world_size, check_pieces, backend=backend)


# ---- units


def units_of(net: nn.Module, **options: Any) -> set[str]:
    """The names of the modules whose weights come together."""
    names = {id(module): name for name, module in net.named_modules()}
    shards = WeightShards(net, **options)
    found = {names[id(unit.module)] for unit in shards.units}
    shards.close()
    return found


@in_ranks(2)
def test_units(rank: int) -> None:
    net = make()
    assert units_of(net) == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert units_of(net, units=[]) == {""}
    nested = [net.blocks[0], net.blocks[0].up, net.blocks[0].up]
    assert units_of(net, units=nested) == {"", "blocks.0", "blocks.0.up"}
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    assert units_of(layers) == {"0", "2"}
    pairs = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})])
    assert units_of(nn.Sequential(pairs)) == {"0.0.a", "0.0.b"}


# ---- errors


def wrong_models() -> Iterator[tuple[nn.Module, type[Exception], str]]:
    def linear(weight: Tensor) -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight = nn.Parameter(weight)
        return module

    yield linear(torch.ones(2, 3).t()), ValueError, "dense and contiguous, but weight is not"
    yield linear(torch.ones(2, 2, device="meta")), ValueError, "meta device"
    yield nn.LazyLinear(2), TypeError, "weight is an UninitializedParameter of a lazy module"
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    sharded = dist.tensor.distribute_tensor(torch.ones(2, 2), mesh)
    yield linear(sharded), TypeError, "plain tensors, but weight is a DTensor"
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = nn.Parameter(one.weight.data)
    yield nn.Sequential(one, two), ValueError, "0.weight and 1.weight are two parameters in the"
    yield nn.ParameterList([torch.ones(2)]), ValueError, "that can be called, got a ParameterList"


@in_ranks(2)
def test_errors(rank: int) -> None:
    for module, kind, text in wrong_models():
        with pytest.raises(kind, match=text):
            WeightShards(module)
    net = make()
    with pytest.raises(ValueError, match="parts of the model, got another Linear"):
        WeightShards(net, units=[nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="units must be modules, got int"):
        WeightShards(net, units=[3])  # type: ignore[list-item]
    assert find_shards(net.embed.weight) is None
    shards = WeightShards(net)
    with pytest.raises(ValueError, match=r"embed.weight is already sharded"):
        WeightShards(net)
    for read in (net.state_dict, net.blocks[1].state_dict):
        with pytest.raises(RuntimeError, match=r"call ringcomm.parallel.get_state_dict"):
            read()
    with pytest.raises(RuntimeError, match=r"call ringcomm.parallel.set_state_dict"):
        net.load_state_dict({})
    state = full_weights(shards)
    with shards.gather(), pytest.raises(RuntimeError, match="inside gather"):
        load_full_weights(shards, state)
    for duplicate in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match="sharded weights cannot be copied"):
            duplicate(net.blocks[0].get_parameter("up.weight"))
    with pytest.raises(RuntimeError, match="sharded weights cannot be copied"):
        copy.deepcopy(net)
    moves: list[Any] = [net.bfloat16, lambda: net.to(torch.device("cpu", 0)), net.head.double]
    for move in moves:
        with pytest.raises(RuntimeError, match=r"call these before WeightShards or zero\.shard"):
            move()
    with pytest.raises(RuntimeError, match="weights of this Linear are freed: call the whole"):
        net.head(torch.ones(1, DIM))
    other = nn.Parameter(torch.ones(2))
    for call in (shards.shard_of, shards.range_of, shards.release):
        with pytest.raises(ValueError, match=r"\(2,\) is not a parameter of these shards"):
            call(other)
    for grad in (torch.ones(3), torch.ones(DIM).to_sparse()):
        with pytest.raises(ValueError, match=r"gradient must be dense, \(130,\) on cpu, got"):
            shards.reduce_scatter(net.norm.bias, grad)
    handle = net.norm.bias.register_post_accumulate_grad_hook(lambda _: shards.release_all())
    with pytest.raises(RuntimeError, match="in a backward pass"):
        loss_of(net, 0, rank).backward()
    handle.remove()
    shards.close()
    assert net.double().head.weight.dtype == torch.float64


@pytest.mark.parametrize("in_backward", [False, True])
@in_ranks(2, fresh=True, may_die=[1])
def test_a_rank_that_dies(rank: int, in_backward: bool) -> None:
    net = make()
    WeightShards(net)

    def die(_: Any) -> None:
        if rank == 1:
            os._exit(7)

    loss = None
    if in_backward:
        loss = loss_of(net, 0, rank)
        loss.register_hook(die)
    else:
        die(None)
    with pytest.raises(ringcomm.PeerDiedError, match="rank 1"):
        loss_of(net, 0, rank) if loss is None else loss.backward()


# ---- freed weights


READS: dict[str, Any] = {
    "detach": lambda p: p.detach().clone(),
    "data": lambda p: p.data,
    "sum": lambda p: p.sum(),
    "__getitem__": lambda p: p[0, 0],
    "matmul": lambda p: torch.ones(1, len(p)) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(p.shape[1]), p),
    "__eq__": lambda p: p == p,
    "constant_": lambda p: nn.init.constant_(p, 1.0),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "__format__": lambda p: f"{p}",
    "_foreach_norm": lambda p: torch._foreach_norm([p]),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "view": lambda p: nn.utils.parameters_to_vector([p]),
}
COPIES: list[Any] = [copy.copy, copy.deepcopy, pickle.dumps, lambda p: torch.save(p, os.devnull)]


@pytest.mark.parametrize("offloads", [False, True])
@in_ranks(2)
def test_reading_a_freed_weight_raises(rank: int, offloads: bool) -> None:
    """Kernels would read from address 0, and end the process."""
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(200, 200)), nn.Sequential(nn.Linear(200, 3)))
    plain = copy.deepcopy(model)
    given = offload.SGD(model.parameters(), lr=0.1)
    owner: Any = None if offloads else WeightShards(model)
    if offloads:
        owner = zero.shard(model, given, 3, offload_weights=True)
    before = full_weights(model)
    for _ in range(2):
        param = model[0][0].weight
        for name, call in READS.items():
            # torch 2.11 asks no subclass before a collective.
            message = rf"{name}(\(\) of a weight that is sharded| got a tensor whose memory was)"
            with pytest.raises(RuntimeError, match=message):
                call(param)
        for call in COPIES:
            with pytest.raises(RuntimeError, match="sharded weights cannot be copied"):
                call(param)
        assert repr(param) == "FreedWeight(shape=(200, 200), dtype=torch.float32)"
        assert torch.zeros_like(param).shape == param.shape == (200, 200)
        assert isinstance(param, nn.Parameter)
        model(torch.ones(2, 200)).sum().backward()
    plain.load_state_dict(before)
    assert torch.equal(model(torch.ones(2, 200)), plain(torch.ones(2, 200)))
    owner.close()
    assert type(param) is nn.Parameter
    assert torch.equal(param.detach(), before["0.0.weight"])
