"""LOMO and AdaLomo over several ranks: replicas, FSDP2's shards, our own, and split layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lomo_models import REUSED, Net, batches, changed, make, weights
from ranks import in_ranks
from rows import Row, Training, cases_of, check, is_nan, moves, overflows, sgd, squared, train
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_optimizers import AdaLomoOracle
from zero_models import assert_alike, assert_close

import ringcomm
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import offload, zero

LR = 0.3
TWO_PASSES: dict[str, Any] = {"clip_grad_norm": 0.1, "clip_mode": "two_pass"}
NO_GROUP: dict[str, Any] = {"group": None}  # shards have their own


def ids_of(step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Twelve rows of all ranks."""
    ids = batches(step + 1, rows=12)[step].chunk(num_ranks)[rank]
    return ids, ids


def own_loss(model: Any, ids: Tensor, _: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    return loss


def adalomo(model: nn.Module) -> Any:
    return AdaLomoOracle([*model.parameters()])


def row_of(name: str, options: Any, num_ranks: int = 3, is_ada: bool = False, **more: Any) -> Row:
    """A byte model, by Lomo or AdaLomo."""
    return Row(
        **{
            "model": partial(make, name),
            "optimizer": adalomo if is_ada else partial(sgd, lr=LR),
            "loss": own_loss,
            "batch": ids_of,
            "systems": ("AdaLomo" if is_ada else "Lomo",),
            "options": options,
            "num_ranks": num_ranks,
            "atol": 2e-5 if is_ada else 1e-6,
            **more,
        }
    )


def on_shards(
    name: str, sizes: tuple[int, ...], layers: tuple[str, ...], made: Training
) -> nn.Module:
    """Of fully_shard, over a mesh of replicas and shards if there are two sizes."""
    model, names = make(name).to(made.device), ("replicas", "shards")[-len(sizes) :]
    mesh = init_device_mesh(made.device.type, sizes, mesh_dim_names=names)
    for layer in (*map(model.get_submodule, layers), model):
        fully_shard(layer, mesh=mesh)
    return model


def four_layers() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 24, bias=False), nn.ReLU(), nn.Linear(24, 8, bias=False)
    )


def split(num_data: int, made: Training) -> nn.Module:
    """In tensor parallelism, whose parts are sharded if there are several data ranks."""
    sizes = (num_data, made.row.num_ranks // num_data)
    mesh = init_device_mesh(made.device.type, sizes, mesh_dim_names=("data", "tensor"))
    norm, up, relu, down = four_layers().to(made.device)
    model = nn.Sequential(
        norm,
        ColumnParallelLinear.from_linear(up, group=mesh.get_group(1)),
        relu,
        RowParallelLinear.from_linear(down, group=mesh.get_group(1)),
    )
    if num_data > 1:
        fully_shard(model, mesh=mesh["data"])
    return model


def same_rows(step: int, *_: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    return x, x


def overlapped(made: Training) -> dict[str, Any]:
    mesh = init_device_mesh(made.device.type, (3,))
    return {"mesh": mesh, "overlap": True, "clip_grad_value": 0.003}


DYNAMIC: dict[str, Any] = {"loss_scale": "dynamic"}
CLIPPED: dict[str, Any] = {"clip_grad_norm": 0.01}
# test_pairs.py has two ranks, and fully_shard over them.
ROWS = {
    "decay": row_of("tied", {}, optimizer=partial(sgd, lr=LR, weight_decay=0.1)),
    "values": row_of("tied", {"clip_grad_value": 0.003}),
    "values, overlapped": row_of("tied", overlapped),
    "two passes": row_of("tied", TWO_PASSES),
    # https://github.com/pytorch/pytorch/issues/81296
    **{
        f"{name} {options}": row_of(name, options)
        for name in REUSED
        for options in ({}, {"clip_grad_norm": 1e6}, TWO_PASSES)
    },
    "overflow": row_of("plain", DYNAMIC, 2, program=partial(overflows, "")),
    "overflow, two passes": row_of(
        "plain", DYNAMIC | TWO_PASSES, 2, True, program=partial(overflows, "")
    ),
    "a loss that is NaN": row_of("plain", {}, 2, program=is_nan),
    "to the CPU and back": row_of("plain", {}, 2, program=moves),
    "to the CPU and back, AdaLomo": row_of("plain", {}, 2, True, program=moves),
    "16 bits, AdaLomo": row_of(
        *("plain", {}, 2, True), model=partial(make, "plain", dtype=torch.bfloat16), atol=2e-2
    ),
    # A block that runs twice; AdaLomo's means are of whole matrices, though ranks have rows.
    **{
        f"shards of {name} over {sizes}, {options}, {is_ada}": row_of(
            name,
            NO_GROUP | options,
            torch.Size(sizes).numel(),
            is_ada,
            on_ranks=partial(on_shards, name, sizes, layers),
            program=partial(overflows, "") if options.get("loss_scale") == "dynamic" else train,
        )
        for sizes, name, layers, is_ada, options in (
            ((2,), "plain", ("up", "down"), False, DYNAMIC),
            ((2,), "plain", ("up", "down"), False, {"loss_scale": 1024.0, "clip_grad_norm": 0.1}),
            ((3,), "tied", ("up", "down"), False, {}),
            ((2,), "checkpoint", ("up", "down"), False, TWO_PASSES),
            ((3,), "plain", ("up", "down"), True, {}),
            ((2,), "plain", ("up", "down"), True, {"clip_grad_norm": 0.1} | DYNAMIC),
            ((2, 2), "plain", ("embed", "up", "down"), True, {"clip_grad_norm": 0.1}),
        )
    },
    # Norms and means over the whole of each matrix, and replicated weights counted once.
    **{
        f"split layers on {num_ranks}, {num_data}, {options}": row_of(
            "",
            NO_GROUP | options,
            num_ranks,
            is_ada,
            model=four_layers,
            on_ranks=partial(split, num_data),
            loss=squared,
            batch=same_rows,
        )
        for num_ranks, num_data, is_ada, options in (
            (4, 1, False, CLIPPED),
            (2, 1, True, {**CLIPPED, "clip_mode": "two_pass"}),
            (4, 1, True, {"loss_scale": 8.0}),
            (4, 2, True, CLIPPED),
        )
    },
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(
    rank: int, device: str, name: str, system: str, world_size: int, backend: str
) -> None:
    check(rank, ROWS[name], system, device)


def parts(rank: int, world_size: int, count: int) -> list[Tensor]:
    """This rank's rows of each batch."""
    return [ids_of(step, rank, world_size)[0] for step in range(count)]


def run(opt: Any, model: nn.Module, data: list[Tensor]) -> None:
    for ids in data:
        opt.backward(model(ids))
        apply_steps(opt)


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


@in_ranks(4)
def test_parts_of_layers_start_from_those_of_the_first_data_rank(rank: int) -> None:
    """Parts are not each other's replicas. Whole weights and buffers: test_starts.py."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(rank)
    layer = ColumnParallelLinear.from_linear(nn.Linear(8, 8), group=mesh.get_group(1))
    layer.weight.data.fill_(float(rank))
    _kept = Lomo(layer, LR, group=mesh.get_group(0))
    assert torch.equal(layer.weight, torch.full_like(layer.weight, rank % 2))


@in_ranks(2)
def test_weights_in_another_order_on_one_rank(rank: int) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    params = list(model.parameters())[:: -1 if rank else 1]
    with pytest.raises(ValueError, match=r"ranks disagree on the weights: rank 0 has 0\.weight"):
        Lomo(params, LR, model=model, group=dist.group.WORLD)


@in_ranks(2)
def test_a_weight_that_one_rank_has_frozen(rank: int) -> None:
    """Counts as zeros there."""
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    if rank == 1:
        model.mix.requires_grad_(False)
    run(opt, model, parts(rank, 2, 1))
    assert_alike(weights(model))


@in_ranks(2)
def test_copies_in_tensor_parallelism_count_once(rank: int) -> None:
    """As of key and value heads, where there are fewer than ranks."""
    linear = four_layers()[1]
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
