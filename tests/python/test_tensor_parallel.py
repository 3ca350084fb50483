"""DTensor over ringcomm: tensor and sequence parallelism, loss_parallel, with FSDP2, layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curves import STEPS, Run, assert_same_run, batch, make_model, sgd, single_process, weights_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

WORLD = 2


def parallelize(
    model: nn.Sequential, mesh: DeviceMesh, *, is_sequence: bool, src_data_rank: int | None
) -> None:
    """Blocks cut by columns, then rows; "sequence": what is between them is cut by rows of x."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    head: Any = ColwiseParallel(output_layouts=Replicate())
    if is_sequence:
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0)),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        head = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    for block in list(model)[:-1]:
        parallelize_module(block, mesh, plan, src_data_rank=src_data_rank)
    last = str(len(model) - 1)
    parallelize_module(model, mesh, {last: head}, src_data_rank=src_data_rank)


def train_on(model: nn.Module, share: Callable[[Tensor], Tensor], dp: int, num_dp: int) -> Run:
    """Every rank of a tensor-parallel group sees all rows; `share` cuts what goes in."""
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dp, num_dp)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(share(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, weights_of(model))


def run_tensor_parallel(rank: int, is_sequence: bool, src_data_rank: int | None) -> Run:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    if src_data_rank is not None:  # its weights count, not those of the others
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
    parallelize(model, mesh, is_sequence=is_sequence, src_data_rank=src_data_rank)
    share = (lambda x: x.chunk(WORLD)[rank]) if is_sequence else (lambda x: x)
    return train_on(model, share, 0, 1)


@pytest.mark.parametrize("src_data_rank", [None, 0])
@pytest.mark.parametrize("is_sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel(is_sequence: bool, src_data_rank: int | None) -> None:
    results = run_ranks(WORLD, run_tensor_parallel, is_sequence, src_data_rank)
    assert_same_run(results, single_process())


def run_with_fsdp(rank: int) -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    parallelize(model, mesh["tp"], is_sequence=False, src_data_rank=None)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return train_on(model, lambda x: x, mesh["dp"].get_local_rank(), 2)


def test_with_fsdp2() -> None:
    assert_same_run(run_ranks(4, run_with_fsdp), single_process())


# ---- loss_parallel


def classify(model: nn.Module, unwrap: Callable[[Tensor], Tensor]) -> Run:
    """Cross entropy over 3 classes, of which one rank has 2."""
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y.argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(unwrap(loss).item())
    return Run(losses, weights_of(model))


def run_loss_parallel(rank: int) -> Run:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"2": head}, src_data_rank=None)
    with loss_parallel():
        return classify(model, lambda loss: loss.full_tensor())  # type: ignore[attr-defined]


def test_loss_parallel() -> None:
    expected = classify(make_model(), lambda loss: loss)
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    assert_same_run(run_ranks(WORLD, run_loss_parallel), expected)


# ---- layouts


def redistribute(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    rows = torch.arange(7.0 * 3).view(7, 3)  # 4 rows and 3
    local = rows.chunk(WORLD)[rank]
    sharded = DTensor.from_local(local, mesh, [Shard(0)], shape=rows.shape, stride=rows.stride())
    assert torch.equal(sharded.full_tensor(), rows)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), rows)
    for op, factor in (("sum", 2.0), ("avg", 1.0), ("max", 1.0)):
        partial = DTensor.from_local(rows.clone(), mesh, [Partial(op)])
        assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), factor * rows)
        cut = partial.redistribute(mesh, [Shard(0)]).to_local()
        assert torch.equal(cut, (factor * rows).chunk(WORLD)[rank])


def test_redistribute() -> None:
    run_ranks(WORLD, redistribute)


def transpose_shards(rank: int) -> None:
    """From rows to columns: all_to_all, or what DTensor takes for it on a CPU."""
    mesh = init_device_mesh("cpu", (WORLD,))
    rows = torch.arange(7.0 * 5).view(7, 5)
    sharded = DTensor.from_local(
        rows.chunk(WORLD)[rank], mesh, [Shard(0)], shape=rows.shape, stride=rows.stride()
    )
    columns = sharded.redistribute(mesh, [Shard(1)]).to_local()
    assert torch.equal(columns, rows.chunk(WORLD, dim=1)[rank])


def test_redistribute_rows_to_columns() -> None:
    run_ranks(WORLD, transpose_shards)


def distribute(rank: int) -> None:
    """Rank 0's tensor, cut for a mesh of 2 x 2; the other ranks' is not looked at."""
    mesh = init_device_mesh("cpu", (2, 2))
    rows = torch.arange(7.0 * 3).view(7, 3)
    given = rows if rank == 0 else torch.zeros_like(rows)
    tensor = distribute_tensor(given, mesh, [Shard(0), Shard(1)])
    expected = rows.chunk(2)[rank // 2].chunk(2, dim=1)[rank % 2]
    assert torch.equal(tensor.to_local(), expected)
    assert torch.equal(tensor.full_tensor(), rows)


def test_distribute_tensor() -> None:
    run_ranks(4, distribute)
