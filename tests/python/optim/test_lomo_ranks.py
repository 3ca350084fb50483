"""LOMO and AdaLomo over several ranks: replicas, FSDP2's shards, our own, and split layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import whole
from lomo_models import Net, batches, distance, make, train_sgd, weights
from ranks import place, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcomm
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import WeightShards

LR = 0.3
ROWS = 12


def parts(rank: int, world_size: int, count: int = 4) -> list[Tensor]:
    """This rank's rows of each batch."""
    size = ROWS // world_size
    return [ids[rank * size : (rank + 1) * size] for ids in batches(count, rows=ROWS)]


def run(opt: Any, model: nn.Module, data: list[Tensor]) -> float | None:
    for ids in data:
        opt.backward(model(ids))
        opt.step()
        opt.zero_grad()
    norm: float | None = opt.grad_norm
    return norm


# ---- replicas


def train_replica(
    rank: int, device: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], float | None]:
    at = place(device, rank)
    model = make("tied").to(at)
    is_overlapped = "overlap" in options
    mesh = init_device_mesh(at.type, (dist.get_world_size(),)) if is_overlapped else None
    opt = Lomo(model, LR, group=None if mesh else dist.group.WORLD, mesh=mesh, **options)
    norm = run(opt, model, [ids.to(at) for ids in parts(rank, dist.get_world_size())])
    assert all(param.grad is None for param in model.parameters())
    return {name: value.cpu() for name, value in weights(model).items()}, norm


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"overlap": True, "clip_grad_value": 0.003},
        {"clip_grad_norm": 0.1, "clip_mode": "two_pass"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_replicas_make_the_steps_of_one_process(device: str, options: dict[str, Any]) -> None:
    """On three ranks; test_pairs.py has two."""
    results = run_ranks(3, train_replica, device, options)
    sgd = make("tied")
    norms = train_sgd(
        sgd,
        batches(4, rows=ROWS),
        LR,
        weight_decay=options.get("weight_decay", 0.0),
        clip_norm=options.get("clip_grad_norm"),
        clip_value=options.get("clip_grad_value"),
    )
    for name, param in sgd.named_parameters():
        torch.testing.assert_close(results[0][0][name], param.detach(), rtol=0, atol=1e-6)
        for other, _ in results[1:]:
            assert torch.equal(other[name], results[0][0][name]), name
    if norms:
        assert results[0][1] == pytest.approx(norms[-1], rel=1e-5)


def count_passes(rank: int) -> set[str]:
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    before = ringcomm.stats()
    run(opt, model, parts(rank, 2, 1))
    after = ringcomm.stats()
    return {name for (name, how), n in after.items() if n != before.get((name, how))}


def test_weights_are_reduced_updated_and_gathered_in_one_pass() -> None:
    """All but the first of each step, whose gradient is looked at before anything is written."""
    for names in run_ranks(2, count_passes):
        assert names == {"all_reduce", "reduce_scatter_update_all_gather"}


# ---- what goes wrong on one rank


def overflow_on_one(rank: int, kind: str, mode: str) -> list[Any]:
    model = make("plain")
    opt = {"lomo": Lomo, "adalomo": AdaLomo}[kind](
        model, LR, group=dist.group.WORLD, loss_scale="dynamic", clip_mode=mode
    )
    before = weights(model)
    loss = model(parts(rank, 2, 1)[0])
    opt.backward(loss * (float("inf") if rank == 1 else 1.0))
    opt.step()
    unchanged = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    scale = opt.loss_scale
    run(opt, model, parts(rank, 2, 2))
    return [unchanged, scale, {n: t.clone() for n, t in weights(model).items()}]


@pytest.mark.parametrize(("kind", "mode"), [("lomo", "deferred"), ("adalomo", "two_pass")])
def test_an_overflow_on_one_rank_changes_nothing_on_any(kind: str, mode: str) -> None:
    results = run_ranks(2, overflow_on_one, kind, mode)
    for unchanged, scale, _ in results:
        assert unchanged
        assert scale == 2.0**15
    for name, value in results[0][2].items():
        assert torch.equal(value, results[1][2][name])


def nan_on_one(rank: int) -> str:
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    before = weights(model)
    loss = model(parts(rank, 2, 1)[0])
    with pytest.raises(RuntimeError, match="not finite") as caught:
        (loss * float("nan") if rank == 0 else loss).backward()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    opt.zero_grad()
    run(opt, model, parts(rank, 2, 1))
    return str(caught.value)


def test_a_loss_that_is_nan_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, nan_on_one)
    assert first == second
    assert "head.weight" in first


def freeze_on_one(rank: int) -> dict[str, Tensor]:
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    if rank == 1:
        model.mix.requires_grad_(False)
    run(opt, model, parts(rank, 2, 1))
    return weights(model)


def test_a_weight_frozen_on_one_rank_counts_as_zeros() -> None:
    first, second = run_ranks(2, freeze_on_one)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# ---- FSDP2


def train_hsdp(rank: int) -> tuple[dict[str, Tensor], float | None]:
    model = make("plain")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in (model.embed, model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    norm = run(AdaLomo(model, LR, clip_grad_norm=0.1), model, parts(rank, 4))
    assert all(param.grad is None for param in model.parameters())
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}, norm


def test_adalomo_over_hsdp_is_adalomo() -> None:
    """Means over rows and columns, and the norm, are those of the whole; test_pairs.py has FSDP."""
    model = make("plain")
    expected = run(AdaLomo(model, LR, clip_grad_norm=0.1), model, batches(4, rows=ROWS))
    for found, norm in run_ranks(4, train_hsdp):
        assert norm == pytest.approx(expected, rel=1e-4)
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=2e-5)


# ---- tensor parallelism


def _whole() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 24, bias=False), nn.ReLU(), nn.Linear(24, 8, bias=False)
    )


def train_columns(
    rank: int, kind: str, options: dict[str, Any], sharded_by: str
) -> tuple[dict[str, Tensor], float | None]:
    """On 2 or 4 ranks of tensor parallelism, or on 2 whose parts are sharded over 2."""
    sizes = (2, 2) if sharded_by else (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    data, group = mesh.get_group(0), mesh.get_group(1)
    norm, up, relu, down = _whole()
    model = nn.Sequential(
        norm,
        ColumnParallelLinear.from_linear(up, group=group),
        relu,
        RowParallelLinear.from_linear(down, group=group),
    )
    shards = WeightShards(model, data) if sharded_by == "WeightShards" else None
    if sharded_by == "fully_shard":
        fully_shard(model, mesh=mesh["data"])
    opt = {"lomo": Lomo, "adalomo": AdaLomo}[kind](model, 0.1, **options)
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        opt.backward(model(torch.randn(6, 8, generator=generator)).square().mean())
        opt.step()
    with nullcontext() if shards is None else shards.gather():
        found = {name: whole(param) for name, param in model.named_parameters()}
    for name, dim in (("1.weight", 0), ("3.weight", 1)):
        pieces = [torch.empty_like(found[name]) for _ in range(group.size())]
        dist.all_gather(pieces, found[name].contiguous(), group)
        found[name] = torch.cat(pieces, dim)
    return found, opt.grad_norm


CLIPPED = {"clip_grad_norm": 0.01}


@pytest.mark.parametrize(
    ("world_size", "kind", "options", "sharded_by"),
    [
        (4, "lomo", CLIPPED, ""),
        (2, "adalomo", {**CLIPPED, "clip_mode": "two_pass"}, ""),
        (4, "adalomo", {"loss_scale": 8.0}, ""),
        (4, "adalomo", CLIPPED, "fully_shard"),
        (4, "adalomo", CLIPPED, "WeightShards"),
    ],
    ids=str,
)
def test_split_layers(world_size: int, kind: str, options: dict[str, Any], sharded_by: str) -> None:
    """Norms and means over the whole of each matrix, and replicated weights counted once."""
    model = _whole()
    opt = {"lomo": Lomo, "adalomo": AdaLomo}[kind](model, 0.1, **options)
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        opt.backward(model(torch.randn(6, 8, generator=generator)).square().mean())
        opt.step()
    for found, norm in run_ranks(world_size, train_columns, kind, options, sharded_by):
        assert norm is opt.grad_norm or norm == pytest.approx(opt.grad_norm, rel=1e-5)
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-5)


def train_copies(rank: int) -> tuple[dict[str, Tensor], float | None]:
    linear = _whole()[1]
    linear.bias = nn.Parameter(torch.zeros(24))
    layer = ColumnParallelLinear.from_linear(linear, num_replicas=2)
    opt = AdaLomo(layer, 0.1, clip_grad_norm=0.01)
    opt.backward(layer(torch.ones(6, 8)).square().mean() / 2)  # gradients are summed over copies
    opt.step()
    return weights(layer), opt.grad_norm


def test_copies_in_tensor_parallelism_count_once() -> None:
    """As of key and value heads, where there are fewer than ranks."""
    linear = _whole()[1]
    linear.bias = nn.Parameter(torch.zeros(24))
    opt = AdaLomo(linear, 0.1, clip_grad_norm=0.01)
    opt.backward(linear(torch.ones(6, 8)).square().mean())
    opt.step()
    for found, norm in run_ranks(2, train_copies):
        assert norm == pytest.approx(opt.grad_norm, rel=1e-5)
        for name, param in linear.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-6)


def test_models_that_reduce_by_themselves() -> None:
    run_ranks(2, _refused)


def _refused(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(ValueError, match="give the model itself, and group="):
        Lomo(model, LR)
    assert distance(model, make("plain")) >= 0
