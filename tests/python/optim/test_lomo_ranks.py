"""LOMO and AdaLomo over several ranks: replicas, FSDP2's shards, our own, and split layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import whole
from full_states import full_weights
from lomo_models import REUSED, Net, batches, changed, make, train_sgd, weights
from ranks import in_ranks, place, run_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_models import assert_alike, assert_close

import ringcomm
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import offload, zero

LR = 0.3
ROWS = 12


def parts(rank: int, world_size: int, count: int = 4) -> list[Tensor]:
    """This rank's rows of each batch."""
    size = ROWS // world_size
    return [ids[rank * size : (rank + 1) * size] for ids in batches(count, rows=ROWS)]


def run(opt: Any, model: nn.Module, data: list[Tensor]) -> float | None:
    for ids in data:
        opt.backward(model(ids))
        apply_steps(opt)
    norm: float | None = opt.grad_norm
    return norm


# ---- replicas


TWO_PASSES: dict[str, Any] = {"clip_grad_norm": 0.1, "clip_mode": "two_pass"}
REPLICAS: list[tuple[str, dict[str, Any]]] = [
    ("tied", {"weight_decay": 0.1}),
    ("tied", {"clip_grad_value": 0.003}),
    ("tied", {"overlap": True, "clip_grad_value": 0.003}),
    ("tied", TWO_PASSES),
    # https://github.com/pytorch/pytorch/issues/81296
    *((name, options) for name in REUSED for options in ({}, {"clip_grad_norm": 1e6}, TWO_PASSES)),
]


@pytest.mark.parametrize(("name", "options"), REPLICAS, ids=str)
@in_ranks(3)
def test_replicas_make_the_steps_of_one_process(
    rank: int, device: str, name: str, options: Any
) -> None:
    """On three ranks; test_pairs.py has two."""
    at, sgd = place(device, rank), make(name)
    model = make(name).to(at)
    mesh = init_device_mesh(at.type, (3,)) if "overlap" in options else None
    opt = Lomo(model, LR, group=None if mesh else dist.group.WORLD, mesh=mesh, **options)
    norm = run(opt, model, [ids.to(at) for ids in parts(rank, 3)])
    assert all(param.grad is None for param in model.parameters())
    of_sgd: dict[str, Any] = {
        "weight_decay": options.get("weight_decay", 0.0),
        "clip_norm": options.get("clip_grad_norm"),
        "clip_value": options.get("clip_grad_value"),
    }
    norms = train_sgd(sgd, batches(4, rows=ROWS), LR, **of_sgd)
    assert_close(weights(model), weights(sgd), 1e-6)
    assert_alike(weights(model))
    assert not norms or norm == pytest.approx(norms[-1], rel=1e-5)


@in_ranks(2)
def test_weights_are_reduced_updated_and_gathered_in_one_pass(rank: int) -> None:
    """All but the first of each step, whose gradient is looked at before anything is written."""
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    before = ringcomm.stats()
    run(opt, model, parts(rank, 2, 1))
    after = ringcomm.stats()
    names = {name for (name, how), n in after.items() if n != before.get((name, how))}
    assert names == {"all_reduce", "reduce_scatter_update_all_gather"}


@pytest.mark.parametrize("overlap", [False, True])
@in_ranks([1, 2])
def test_each_backward_pass_of_a_step_is_checked(rank: int, overlap: bool) -> None:
    towers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    over: dict[str, Any] = {"group": dist.group.WORLD} if dist.get_world_size() > 1 else {}
    opt = Lomo(towers, LR, overlap=overlap, **over)
    before = weights(towers)
    towers[0](torch.ones(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="not finite; the pass has written no weight"):
        (towers[1](torch.ones(4, 3)).sum() * math.nan).backward()
    assert changed(towers, before) == {"0.weight", "0.bias"}
    opt.step()
    towers[1](torch.ones(4, 3)).sum().backward()  # and goes on
    opt.step()
    assert changed(towers, before) == before.keys()


class Seeded(nn.Module):
    """Weights and buffers from the seed of a rank, some frozen, and statistics of batches."""

    features: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("features", torch.randn(8, 8), persistent=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(self.frozen(x @ self.features))))).sum()


def train_seeded(rank: int, how: str) -> dict[str, Tensor]:
    """Weights and buffers after a step in which all ranks have the same rows."""
    model: Any = Seeded(rank)
    group = dist.group.WORLD
    if how == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group, over = mesh.get_group(0), mesh.get_group(1)
        model.up = ColumnParallelLinear.from_linear(model.up, gather_output=True, group=over)
    elif how == "fully_shard":  # which shards each rank's own weights
        buffers = [buffer.clone() for buffer in model.buffers()]
        model = Seeded(0)
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        fully_shard(model)
    opt = Lomo(model, 0.001, group=group if how in ("replicas", "tensor") else None)
    model(torch.arange(32.0).view(4, 8) / 8).backward()
    opt.step()
    found: Any = weights(model)
    values = {name: whole(value) for name, value in found.items()}
    return {**values, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


@pytest.mark.parametrize("how", ["replicas", "fully_shard", "tensor"])
def test_weights_and_buffers_start_from_those_of_rank_0(how: str) -> None:
    results = run_ranks(4 if how == "tensor" else 2, train_seeded, how)
    model = Seeded(0)
    opt = Lomo(model, 0.001)
    model(torch.arange(32.0).view(4, 8) / 8).backward()
    opt.step()
    for name, expected in {**weights(model), **dict(model.named_buffers())}.items():
        got = [result[name] for result in results]
        if how == "tensor":  # the parts of a layer are not each other's replicas
            assert torch.equal(got[2], got[0])
            assert torch.equal(got[3], got[1])
            assert name != "up.weight" or not torch.equal(got[0], got[1])
        else:
            torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got[1], expected, rtol=1e-5, atol=1e-6)


@in_ranks(2)
def test_an_overflow_on_one_rank_changes_nothing_on_any(rank: int) -> None:
    kinds: list[tuple[Any, Any]] = [(Lomo, "deferred"), (AdaLomo, "two_pass")]
    for kind, mode in kinds:
        model = make("plain")
        opt = kind(model, LR, group=dist.group.WORLD, loss_scale="dynamic", clip_mode=mode)
        before = weights(model)
        opt.backward(model(parts(rank, 2, 1)[0]) * (float("inf") if rank == 1 else 1.0))
        opt.step()
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert opt.loss_scale == 2.0**15
        run(opt, model, parts(rank, 2, 2))
        assert_alike(weights(model))


@in_ranks(2)
def test_what_one_rank_has_alone(rank: int) -> None:
    """A loss that is NaN is an error on all; a frozen weight counts as zeros."""
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    before = weights(model)
    loss = model(parts(rank, 2, 1)[0])
    with pytest.raises(RuntimeError, match=r"head\.weight, the first .* not finite"):
        (loss * float("nan") if rank == 0 else loss).backward()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    opt.zero_grad()
    if rank == 1:
        model.mix.requires_grad_(False)
    run(opt, model, parts(rank, 2, 1))
    assert_alike(weights(model))


@in_ranks(4)
def test_adalomo_over_hsdp_is_adalomo(rank: int) -> None:
    """Means over rows and columns, and the norm, are those of the whole; test_pairs.py has FSDP."""
    model = make("plain")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in (model.embed, model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    norm = run(AdaLomo(model, LR, clip_grad_norm=0.1), model, parts(rank, 4))
    assert all(param.grad is None for param in model.parameters())
    alone = make("plain")
    opt = AdaLomo(alone, LR, group="none", clip_grad_norm=0.1)
    assert norm == pytest.approx(run(opt, alone, batches(4, rows=ROWS)), rel=1e-4)
    assert_close(full_weights(model), weights(alone), 2e-5)


def _whole() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 24, bias=False), nn.ReLU(), nn.Linear(24, 8, bias=False)
    )


CLIPPED = {"clip_grad_norm": 0.01}


@pytest.mark.parametrize(
    ("world_size", "kind", "options", "sharded_by"),
    [
        (4, Lomo, CLIPPED, ""),
        (2, AdaLomo, {**CLIPPED, "clip_mode": "two_pass"}, ""),
        (4, AdaLomo, {"loss_scale": 8.0}, ""),
        (4, AdaLomo, CLIPPED, "fully_shard"),
    ],
    ids=str,
)
@in_ranks()
def test_split_layers(rank: int, world_size: int, kind: Any, options: Any, sharded_by: str) -> None:
    """Norms and means over the whole of each matrix, and replicated weights counted once.

    On 2 or 4 ranks of tensor parallelism, or on 2 whose parts are sharded over 2.
    """
    sizes = (2, 2) if sharded_by else (1, world_size)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    group = mesh.get_group(1)
    alone = _whole()
    norm, up, relu, down = _whole()
    model = nn.Sequential(
        norm,
        ColumnParallelLinear.from_linear(up, group=group),
        relu,
        RowParallelLinear.from_linear(down, group=group),
    )
    if sharded_by == "fully_shard":
        fully_shard(model, mesh=mesh["data"])
    opt = kind(model, 0.1, **options)
    given = kind(alone, 0.1, **options, group="none")
    for step in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        for net, each in ((model, opt), (alone, given)):
            each.backward(net(x).square().mean())
            each.step()
    found = {name: whole(param) for name, param in model.named_parameters()}
    for name, dim in (("1.weight", 0), ("3.weight", 1)):
        pieces = [torch.empty_like(found[name]) for _ in range(group.size())]
        dist.all_gather(pieces, found[name].contiguous(), group)
        found[name] = torch.cat(pieces, dim)
    norms = opt.grad_norm, given.grad_norm
    assert norms == (None, None) or norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_close(found, weights(alone), 1e-5)


@in_ranks(2)
def test_copies_in_tensor_parallelism_count_once(rank: int) -> None:
    """As of key and value heads, where there are fewer than ranks."""
    linear = _whole()[1]
    linear.bias = nn.Parameter(torch.zeros(24))
    layer = ColumnParallelLinear.from_linear(linear, num_replicas=2)
    opt = AdaLomo(layer, 0.1, clip_grad_norm=0.01)
    opt.backward(layer(torch.ones(6, 8)).square().mean() / 2)  # gradients are summed over copies
    given = AdaLomo(linear, 0.1, group="none", clip_grad_norm=0.01)
    given.backward(linear(torch.ones(6, 8)).square().mean())
    for each in (opt, given):
        each.step()
    assert opt.grad_norm == pytest.approx(given.grad_norm, rel=1e-5)
    assert_close(weights(layer), weights(linear), 1e-6)


@in_ranks(2)
def test_models_that_reduce_by_themselves(rank: int) -> None:
    with pytest.raises(ValueError, match="pass its `module` to Lomo"):
        Lomo(nn.parallel.DistributedDataParallel(Net()), LR)


SHARDED: list[tuple[int, str, Any, dict[str, Any]]] = [
    (2, "plain", Lomo, {"loss_scale": "dynamic"}),
    (2, "plain", Lomo, {"loss_scale": 1024.0, "clip_grad_norm": 0.1}),
    (3, "tied", Lomo, {"weight_decay": 0.1}),
    (2, "checkpoint", Lomo, {"clip_grad_norm": 0.1, "clip_mode": "two_pass"}),
    (3, "plain", AdaLomo, {}),
    (2, "plain", AdaLomo, {"clip_grad_norm": 0.1, "loss_scale": "dynamic"}),
]


@pytest.mark.parametrize(("world_size", "name", "kind", "options"), SHARDED, ids=str)
@in_ranks()
def test_fully_shard(rank: int, world_size: int, name: str, kind: Any, options: Any) -> None:
    """A block that runs twice; AdaLomo's means are of whole matrices, though ranks have rows."""
    model, alone, data = make(name), make(name), batches(3, rows=ROWS)
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    opt = kind(model, LR, **options)
    for ids in parts(rank, world_size, 3):
        opt.backward(model(ids))
        apply_steps(opt)
    clip, decay = options.get("clip_grad_norm"), options.get("weight_decay", 0.0)
    if kind is Lomo:
        norm = [None, *train_sgd(alone, data, LR, clip_norm=clip, weight_decay=decay)][-1]
    else:
        norm = run(AdaLomo(alone, LR, clip_grad_norm=clip, group="none"), alone, data)
    assert_close(full_weights(model), weights(alone), 1e-5)
    assert clip is None or opt.grad_norm == pytest.approx(norm, rel=1e-5)
    if options.get("loss_scale") == "dynamic":  # an overflow of one rank changes nothing on any
        before = full_weights(model)
        opt.backward(model(ids) * (torch.inf if rank == 0 else 1.0))
        apply_steps(opt)
        assert opt.loss_scale == 2.0**15
        assert_close(full_weights(model), before, 0)


@in_ranks(2)
def test_fully_shard_with_a_layer_in_two_reentrant_segments(rank: int) -> None:
    """torch loses a gradient: https://github.com/deepspeedai/DeepSpeed/issues/2103."""
    model = make("reused twice")
    fully_shard(model.layer)
    fully_shard(model)
    opt = Lomo(model, LR)
    with pytest.raises(RuntimeError, match=r"layer\.\w+ is used by several segments.*reentrant"):
        model(batches(1)[0]).backward()
    opt.close()


@in_ranks(2)
def test_offloaded_weights_are_refused(rank: int) -> None:
    """Also frozen ones beside those that it trains."""
    for is_frozen in (False, True):
        model = make("plain").requires_grad_(not is_frozen)
        model.head.requires_grad_()
        own = offload.Offloaded(torch.optim.SGD(model.parameters()), to="cpu")
        optimizer: Any = zero.shard(model, own, 3, offload_weights=True)
        with pytest.raises(ValueError, match=r"sharded by zero\.shard\(offload_weights=True\): cl"):
            Lomo(model, LR)
        optimizer.close()
