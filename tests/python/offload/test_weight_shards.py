"""Weights of ZeRO-Infinity: the training of one process; memory, pieces, units, and what goes
wrong."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights, load_full_weights
from ranks import in_ranks
from rows import Row, Training, cases_of, check, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm import parallel
from ringcomm.parallel import offload, zero
from ringcomm.parallel.model.cut import find_shards

DIM = 130  # a matrix of a block is more than what travels packed
VOCAB = 11
LR = 0.1


class Block(nn.Module):
    """A frozen weight before a trainable one, and parameters of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(DIM, 3)
        self.frozen = nn.Linear(3, DIM).requires_grad_(False)
        self.up = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        low = self.adapter(x.to(self.adapter.weight.dtype))
        x = x + self.frozen(torch.tanh(low.float()))
        return x + self.gain * torch.tanh(self.up(x))


class Net(nn.Module):
    """A language model in small; `mode` says what is unusual about it."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed.weight, std=0.1)  # losses near 1, tied as well: 1e-6 is some ulp
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        if mode == "tied":
            self.head.weight = self.embed.weight
        if mode == "shared layer":
            self.blocks.append(self.blocks[0])
        if mode == "shared weight":
            self.blocks[2].up = self.blocks[1].up

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if self.mode == "unused" and i == 1:
                continue
            is_again = self.mode == "reentrant"
            x = checkpoint(block, x, use_reentrant=True) if is_again else block(x)
        if self.mode == "checkpointed head":
            return checkpoint(lambda h: self.head(self.norm(h)), x, use_reentrant=False)
        return self.head(self.norm(x)) * self.scale


def make(mode: str = "plain") -> Net:
    torch.manual_seed(3)
    net = Net(mode)
    if mode == "mixed":  # dtypes within a unit
        for block in net.blocks:
            block.adapter.to(torch.bfloat16)
    return net


def loss_of(net: nn.Module, step: int, share: int) -> Tensor:
    return entropy(net, *batch_of(step, share))


def sharded(net: nn.Module, **options: Any) -> Any:
    own = offload.Offloaded(torch.optim.SGD(net.parameters(), LR))
    return zero.shard(net, own, 3, offload_weights=True, **options)


def live_bytes(net: nn.Module) -> int:
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in net.parameters()}
    return sum(storages.values())


def batch_of(step: int, rank: int, *_: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return ids, ids.roll(1)


def entropy(net: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), target.flatten())


def filled(mode: str, made: Training) -> Net:
    """Values are those of rank 0."""
    net = make(mode)
    for param in net.parameters() if made.rank > 0 else ():
        param.data.fill_(float(made.rank))
    return net


def until_closed(made: Training) -> None:
    """Weights are freed between passes; close() leaves a model of torch."""
    net, loss = made.model, partial(entropy, made.model, *batch_of(9, made.rank))
    for step in range(3):
        made.backward(step)
        assert made.is_alone or live_bytes(net) == 0
        made.step()
    if made.is_alone:
        return
    with torch.no_grad():  # evaluation
        outside = loss().item()
        assert live_bytes(net) == 0
    made.optimizer.close()
    made.optimizer.close()
    assert loss().item() == outside
    loss().backward()  # by torch alone
    assert type(net.head.weight.grad) is Tensor
    copy.deepcopy(net)
    assert all(find_shards(param) is None for param in net.parameters())


ROWS = {
    mode: Row(
        until_closed,
        partial(make, mode),
        sgd,
        on_ranks=partial(filled, mode),
        loss=entropy,
        batch=batch_of,
        systems=("infinity",),
        num_ranks=num_ranks,
        atol=2e-3 if mode == "mixed" else 1e-6,  # a bit of bfloat16
    )
    for num_ranks, mode in (
        (2, "shared layer"),
        (2, "shared weight"),
        (2, "unused"),
        (2, "checkpointed head"),
        (2, "mixed"),
        (3, "tied"),
        (4, "reentrant"),
        (1, "plain"),
    )
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    check(rank, ROWS[name], system)


# ---- memory


def watch(net: Net, seen: list[int]) -> None:
    """Notes the bytes of whole weights whenever a module or a gradient comes by."""
    for module in net.modules():
        module.register_forward_pre_hook(lambda *_: seen.append(live_bytes(net)))
        module.register_forward_hook(lambda *_: seen.append(live_bytes(net)))
    for block in net.blocks:
        block.register_full_backward_hook(lambda *_: seen.append(live_bytes(net)))


@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@in_ranks(2)
def test_memory(rank: int, mode: str) -> None:
    net, other = make(mode), make(mode)
    num_bytes = live_bytes(net)
    block_bytes = live_bytes(net.blocks[0])
    root_bytes = num_bytes - 3 * block_bytes
    sharded(net)
    versions = [param._version for param in net.parameters()]
    seen: list[int] = []
    watch(net, seen)
    for step in range(2):
        loss_of(net, step, rank).backward()
        assert live_bytes(net) == 0
    assert len(seen) > 20
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
    optimizer = sharded(net)
    loss = loss_of(net, 0, rank)
    loss.backward(retain_graph=True)
    first = [grad.clone() for _, grad in optimizer._shards()]
    optimizer.zero_grad()
    loss.backward()
    second = [grad.clone() for _, grad in optimizer._shards()]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    handle = net.blocks[1].get_parameter("up.bias").register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(net, 0, rank).backward()
    handle.remove()
    assert live_bytes(net) > 0
    nothing = {name: torch.zeros_like(value) for name, value in full_weights(net).items()}
    load_full_weights(net, nothing)  # what the backward has left is old by now
    assert loss_of(net, 0, rank).item() == pytest.approx(torch.tensor(VOCAB).log().item())
    optimizer.zero_grad()
    assert live_bytes(net) == 0


@in_ranks(2)
def test_freed_with_the_model(rank: int) -> None:
    net = make()
    optimizer = sharded(net)
    loss_of(net, 0, rank).backward()
    shards = optimizer._weights
    gone: list[weakref.ref[Any]] = [weakref.ref(shards), weakref.ref(net.embed.weight)]
    assert find_shards(net.embed.weight) is shards
    del shards, optimizer
    gc.collect()
    assert find_shards(net.embed.weight) is gone[0]() is not None
    del net
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Call(nn.Module):
    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self) -> None:
        return None


@pytest.mark.parametrize("world_size", [3, 4])
@in_ranks()
def test_pieces(rank: int, world_size: int) -> None:
    sizes = [(0,), (), (2,), (5, 7), (130, 129)]
    params = nn.ParameterList([torch.arange(float(torch.Size(s).numel())).view(s) for s in sizes])
    shards = sharded(Call(params))._weights
    for param in params:
        begin, end = shards.range_of(param)
        assert shards.unit_of(param).read_shard(param).tolist() == list(range(begin, end))
        mean = (torch.arange(param.numel()) % 7 * (world_size + 1)).view(param.shape)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            grad = (mean * 2 * (rank + 1) // (world_size + 1)).to(dtype)
            strided = grad.t().contiguous().t() if grad.dim() == 2 else grad
            piece = shards.reduce_scatter(param, strided)
            assert piece.dtype == dtype
            assert torch.equal(piece, mean.flatten()[begin:end].to(dtype))


def units_of(net: nn.Module, **options: Any) -> set[str]:
    """The names of the modules whose weights come together."""
    names = {id(module): name for name, module in net.named_modules()}
    optimizer = sharded(net, **options)
    found = {names[id(unit.module)] for unit in optimizer._weights.units}
    optimizer.close()
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


def wrong_models() -> Iterator[tuple[nn.Module, type[Exception], str]]:
    def linear(weight: Tensor) -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight = nn.Parameter(weight)
        return module

    yield linear(torch.ones(2, 3).t()), ValueError, "is not contiguous"
    yield nn.LazyLinear(2), ValueError, "uninitialized parameter"
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    rows = dist.tensor.distribute_tensor(torch.ones(2, 2), mesh)
    yield linear(rows), ValueError, "weight is a DTensor: only stage 3 without offload_weights"
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = nn.Parameter(one.weight.data)
    yield nn.Sequential(one, two), ValueError, "0.weight and 1.weight are two parameters in the"
    yield nn.ParameterList([torch.ones(2)]), ValueError, "that can be called, got ParameterList"


@in_ranks(2)
def test_errors(rank: int) -> None:
    for module, kind, text in wrong_models():
        with pytest.raises(kind, match=text):
            sharded(module)
    net = make()
    with pytest.raises(ValueError, match="parts of the model, got another Linear"):
        sharded(net, units=[nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="units must be modules, got int"):
        sharded(net, units=[3])
    part, whole = make(), torch.compile(net, backend="eager")
    part.blocks[1].compile(backend="eager")
    for compiled in (cast(nn.Module, whole), part):
        with pytest.raises(RuntimeError, match=r"torch\.compile is not supported with offload"):
            sharded(compiled)
    assert find_shards(net.embed.weight) is None
    with pytest.raises(AttributeError, match=r"WeightShards is gone; use torch\.distr"):
        parallel.WeightShards  # noqa: B018
    again = offload.Offloaded(torch.optim.SGD(net.parameters(), LR))
    optimizer = sharded(net)
    with pytest.raises(ValueError, match=r"embed.weight is already sharded by zero.shard\(offload"):
        zero.shard(net, again, 3, offload_weights=True)
    for read in (net.state_dict, net.blocks[1].state_dict):
        with pytest.raises(RuntimeError, match=r"read it by ringcomm\.parallel\.get_state_dict"):
            read()
    with pytest.raises(RuntimeError, match=r"call ringcomm.parallel.set_state_dict"):
        net.load_state_dict({})
    for duplicate in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match="sharded weights cannot be copied"):
            duplicate(net.blocks[0].get_parameter("up.weight"))
    with pytest.raises(RuntimeError, match="sharded weights cannot be copied"):
        copy.deepcopy(net)
    moves: list[Any] = [net.bfloat16, lambda: net.to(torch.device("cpu", 0)), net.head.double]
    for move in moves:
        with pytest.raises(RuntimeError, match=r"call these before zero\.shard"):
            move()
    with pytest.raises(RuntimeError, match="weights of this Linear are freed: call the whole"):
        net.head(torch.ones(1, DIM))
    handle = net.norm.bias.register_hook(lambda _: optimizer.zero_grad())
    with pytest.raises(RuntimeError, match="in a backward pass"):
        loss_of(net, 0, rank).backward()
    handle.remove()
    optimizer.close()
    assert net.double().head.weight.dtype == torch.float64


@pytest.mark.parametrize("in_backward", [False, True])
@in_ranks(2, fresh=True, may_die=[1])
def test_a_rank_that_dies(rank: int, in_backward: bool) -> None:
    net = make()
    sharded(net)

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


@in_ranks(2)
def test_reading_a_freed_weight_raises(rank: int) -> None:
    """Kernels would read from address 0, and end the process."""
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(200, 200)), nn.Sequential(nn.Linear(200, 3)))
    plain = copy.deepcopy(model)
    owner = sharded(model)
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
