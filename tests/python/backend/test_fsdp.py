"""FSDP2 (`fully_shard`) and FSDP1 over ringcomm: the loss curve of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, batch, make_model, single_process, train, weights_of
from ranks import in_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2


def shard(mesh_shape: tuple[int, ...] = (WORLD,), **options: Any) -> Any:
    """Each layer by itself; two dimensions of the mesh are replicas and shards."""
    model = make_model()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "shard")[-len(mesh_shape) :])
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def run_fsdp2(rank: int, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> Run:
    model = shard(mesh_shape, **options)
    losses = train(model, rank, dist.get_world_size())
    return Run(losses, weights_of(model))


@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [
        ((2,), {"reshard_after_forward": False}),
        ((4,), {"reshard_after_forward": 2}),  # to shards among two of the four
        ((2, 2), {}),  # HSDP
    ],
    ids=str,
)
def test_fsdp2(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    world_size = 2 if mesh_shape == (2,) else 4
    results = run_ranks(world_size, run_fsdp2, mesh_shape, options)
    assert_same_run(results, single_process())


def test_fsdp2_in_bfloat16() -> None:
    """8 bits of mantissa: 2e-2 after five steps."""
    bfloat16, float32 = torch.bfloat16, torch.float32
    # The loss's inputs have one dtype: torch 2.11 has no mse_loss of two.
    policy = MixedPrecisionPolicy(bfloat16, reduce_dtype=bfloat16, output_dtype=float32)
    results = run_ranks(WORLD, run_fsdp2, (WORLD,), {"mp_policy": policy})
    assert_same_run(results, single_process(), atol=2e-2)


def run_with_a_divide_factor(rank: int, only_sums: bool) -> Run:
    model = shard()
    model.set_force_sum_reduction_for_comms(only_sums)
    for layer in model:  # each has parameters of its own to reduce
        layer.set_force_sum_reduction_for_comms(only_sums)
        layer.set_gradient_divide_factor(3.0)
    return Run(train(model, rank, WORLD), weights_of(model))


@pytest.mark.parametrize("only_sums", [True, False])
def test_fsdp2_with_a_divide_factor(only_sums: bool) -> None:
    results = run_ranks(WORLD, run_with_a_divide_factor, only_sums)
    assert_same_run(results, single_process(scale=WORLD / 3.0))


@in_ranks(WORLD)
def test_fsdp2_accumulates_and_clips(rank: int) -> None:
    """Two micro-batches, one reduction: twice the gradient; the norm of all shards together."""
    model, reference = shard(), make_model()
    for micro_step in range(2):
        model.set_requires_gradient_sync(micro_step == 1)
        for module, (x, y) in ((model, batch(0, rank, WORLD)), (reference, batch(0))):
            nn.functional.mse_loss(module(x), y).backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=0, atol=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-5)


def run_fsdp1(rank: int, options: dict[str, Any]) -> Run:
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType

    if options.get("sharding_strategy") == ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
        options = {**options, "device_mesh": mesh}
    model = FullyShardedDataParallel(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        **options,
    )
    losses = train(model, rank, dist.get_world_size())
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()
    ):
        return Run(losses, weights_of(model))


@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": True, "limit_all_gathers": False},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    ],
    ids=str,
)
def test_fsdp1(options: dict[str, Any]) -> None:
    is_hybrid = options.get("sharding_strategy") == ShardingStrategy.HYBRID_SHARD
    results = run_ranks(4 if is_hybrid else WORLD, run_fsdp1, options)
    assert_same_run(results, single_process())
