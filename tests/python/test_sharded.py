"""FSDP2 and tensor parallelism by DTensor over ringcomm, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

WORLD = 2
STEPS = 4


class Block(nn.Module):
    """7 and 13: no shard is like another."""

    def __init__(self, dim: int = 8, hidden: int = 14) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


def batch(step: int) -> Tensor:
    return torch.randn(2 * WORLD, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rank: int | None, scale: float = 1.0) -> None:
    """On a rank with its own part of the batch; gradients times `scale`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x = batch(step)
        x = x if rank is None else x.chunk(WORLD)[rank]
        optimizer.zero_grad()
        (model(x).square().mean() * scale).backward()
        optimizer.step()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights, gathered where they are DTensors."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
        for name, value in model.state_dict().items()
    }


def check_close(results: list[Any], expected: dict[str, Tensor], atol: float) -> None:
    for state in results:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=atol, msg=name)


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[return-value]


def train_fsdp(rank: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model = shard(make_model(), **options)
    train(model, rank)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert float(norm.full_tensor()) > 0  # type: ignore[attr-defined]
    return full_state(model)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_fsdp2_equals_one_process(options: dict[str, Any]) -> None:
    reference = make_model()
    train(reference, None)
    results = run_ranks(WORLD, train_fsdp, options)
    check_close(results, full_state(reference), atol=1e-5)
    check_close(results, results[0], atol=0)


def train_fsdp_mixed(rank: int) -> dict[str, Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_model(), mp_policy=policy)
    train(model, rank)
    return full_state(model)


def test_fsdp2_in_bfloat16() -> None:
    """8 bits of mantissa: 2e-2 after four steps."""
    reference = make_model()
    train(reference, None)
    check_close(run_ranks(WORLD, train_fsdp_mixed), full_state(reference), atol=2e-2)


def train_fsdp_factor(rank: int, only_sums: bool) -> dict[str, Tensor]:
    model: Any = shard(make_model())
    model.set_force_sum_reduction_for_comms(only_sums)
    for layer in model:  # each has parameters of its own to reduce
        layer.set_force_sum_reduction_for_comms(only_sums)
        layer.set_gradient_divide_factor(3.0)
    train(model, rank)
    return full_state(model)


@pytest.mark.parametrize("only_sums", [True, False])
def test_fsdp2_with_a_divide_factor(only_sums: bool) -> None:
    reference = make_model()
    train(reference, None, scale=WORLD / 3.0)
    results = run_ranks(WORLD, train_fsdp_factor, only_sums)
    check_close(results, full_state(reference), atol=1e-5)


# ---- tensor parallelism


def parallelize(model: nn.Sequential, plan: str, src_data_rank: int | None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (WORLD,))
    styles: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if plan == "sequence":  # activations between the blocks are cut along the batch
        styles = {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0)),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
    for block in list(model)[:2]:
        parallelize_module(block, mesh, styles, src_data_rank=src_data_rank)
    if plan == "sequence":
        head: dict[str, Any] = {
            "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        }
        parallelize_module(model, mesh, head, src_data_rank=src_data_rank)
    return model


def train_tp(rank: int, plan: str, src_data_rank: int | None) -> list[float]:
    model = parallelize(make_model(), plan, src_data_rank)
    x = batch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x.chunk(WORLD)[rank] if plan == "sequence" else x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    return losses


def train_alone() -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_tensor_parallel_equals_one_process(plan: str) -> None:
    """Every rank cuts its own copy of the weights: src_data_rank=None needs no scatter."""
    for losses in run_ranks(WORLD, train_tp, plan, None):
        assert losses == pytest.approx(train_alone(), abs=1e-5)


def test_tensor_parallel_from_rank_0() -> None:
    """distribute_tensor scatters the weights of rank 0."""
    for losses in run_ranks(WORLD, train_tp, "tensor", 0):
        assert losses == pytest.approx(train_alone(), abs=1e-5)


def redistribute(rank: int) -> None:
    """Between layouts of a DTensor, as far as all_gather, all_reduce and reduce_scatter carry."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(7.0 * 3).view(7, 3)  # 4 rows and 3
    local = whole.chunk(WORLD)[rank]
    sharded = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    for op, factor in (("sum", 2.0), ("avg", 1.0), ("max", 1.0)):
        partial = DTensor.from_local(whole.clone(), mesh, [Partial(op)])
        assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), factor * whole)
        cut = partial.redistribute(mesh, [Shard(0)]).to_local()
        assert torch.equal(cut, (factor * whole).chunk(WORLD)[rank])
    dist.barrier()


def test_redistribute() -> None:
    run_ranks(WORLD, redistribute)


def test_reference_learns() -> None:
    """Else everything would equal everything."""
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    train(model, None)
    assert (before["0.up.weight"] - model.state_dict()["0.up.weight"]).abs().max() > 1e-2
