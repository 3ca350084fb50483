"""DistributedDataParallel, its hooks, and FSDP: the loss curve of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import (
    Run,
    assert_same_run,
    assert_weights,
    make_model,
    single_process,
    train,
    weights_of,
)
from ranks import hosts, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def run_of(model: Any, rank: int) -> Run:
    return Run(train(model, rank, dist.get_world_size()), weights_of(model))


def wrap(**options: Any) -> DistributedDataParallel:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())  # DDP takes rank 0's
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **options})


def train_ddp(rank: int, options: dict[str, Any]) -> Run:
    return run_of(wrap(**options), rank)


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"gradient_as_bucket_view": True}, "aa"),
        ({"static_graph": True}, "aa"),
        ({"find_unused_parameters": True}, "--"),
        ({}, "abba"),
    ],
    ids=str,
)
def test_equals_one_process(options: dict[str, Any], env: str) -> None:
    results = run_ranks(len(env), train_ddp, options, env=hosts(env))
    assert_same_run(results, single_process())


def test_equals_gloo_bitwise() -> None:
    """With 2 ranks there is one order of summation, and division by 2 is exact."""
    ours = run_ranks(WORLD, train_ddp, {})
    assert_same_run(ours, single_process())
    theirs = run_ranks(WORLD, train_ddp, {}, backend="gloo")
    assert ours[0].losses == theirs[0].losses
    assert_weights(ours[0].weights, theirs[0].weights, atol=0)


# ---- communication hooks


def chained_hook(state: Any, bucket: Any) -> Any:
    """Sums in two exchanges, the second from the callback of the first."""
    buffer = bucket.buffer()
    half = buffer.numel() // 2
    work: Any = dist.all_reduce(buffer[:half], async_op=True)

    def second(future: Any) -> Tensor:
        rest: Any = dist.all_reduce(buffer[half:], async_op=True)
        rest.get_future().wait()
        return buffer

    return work.get_future().then(second).then(lambda future: future.value() / WORLD)


chained_hook.__annotations__.clear()  # DDP compares them with types, and these are strings


def train_with_hook(rank: int, name: str) -> Run:
    # One bucket where the hook issues collectives from callbacks: with several, their order would
    # depend on the ranks' timing.
    options = {"bucket_cap_mb": 25.0} if name in ("chained", "power_sgd") else {}
    model, group = wrap(**options), dist.group.WORLD
    hooks: dict[str, tuple[Any, Any]] = {
        "fp16": (group, default_hooks.fp16_compress_hook),
        "chained": (None, chained_hook),
        "power_sgd": (
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        "noop": (None, debugging_hooks.noop_hook),
    }
    model.register_comm_hook(*hooks[name])
    return run_of(model, rank)


# fp16 rounds gradients to 11 bits, five times; PowerSGD is an approximation.
ATOL = {"fp16": 1e-3, "chained": 1e-5, "power_sgd": 0.1}


@pytest.mark.parametrize("name", ATOL)
def test_hooks(name: str) -> None:
    assert_same_run(run_ranks(WORLD, train_with_hook, name), single_process(), ATOL[name])


def test_noop_hook() -> None:
    """Each rank trains alone, to the last bit: the control of what the others compare."""
    results = run_ranks(WORLD, train_with_hook, "noop")
    for rank, result in enumerate(results):
        model = make_model()
        assert result.losses == train(model, rank, WORLD)
        assert_weights(result.weights, weights_of(model), atol=0)
    with pytest.raises(AssertionError):
        assert_same_run(results, single_process(), atol=1e-3)


# ---- FSDP2 and FSDP1


def shard(mesh_shape: tuple[int, ...] = (WORLD,), **options: Any) -> Any:
    """Each layer by itself; two dimensions of the mesh are replicas and shards."""
    model = make_model()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "shard")[-len(mesh_shape) :])
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def with_a_divide_factor(only_sums: bool) -> Any:
    """By premul_sum, or by sums."""
    model = shard()
    model.set_force_sum_reduction_for_comms(only_sums)
    for layer in model:  # each has parameters of its own to reduce
        layer.set_force_sum_reduction_for_comms(only_sums)
        layer.set_gradient_divide_factor(3.0)
    return model


def fsdp1(strategy: ShardingStrategy, **options: Any) -> Any:
    model = FullyShardedDataParallel(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        **options,
    )
    FullyShardedDataParallel.set_state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()
    )
    return model


def hybrid() -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    return fsdp1(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, use_orig_params=True)


# The loss's inputs have one dtype: torch 2.11 has no mse_loss of two.
IN_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32)
FACTOR = WORLD / 3.0  # of gradients
# On how many ranks, the scale of the gradients, and the tolerance; 8 bits of mantissa give 2e-2
# after five steps.
SHARDED: dict[str, tuple[Callable[[], Any], int, float, float]] = {
    "bf16": (lambda: shard(mp_policy=IN_BF16), 2, 1.0, 2e-2),
    # To shards among two of the four.
    "reshard": (lambda: shard((4,), reshard_after_forward=2), 4, 1.0, 1e-5),
    "hsdp": (lambda: shard((2, 2)), 4, 1.0, 1e-5),
    "divide factor": (lambda: with_a_divide_factor(False), 2, FACTOR, 1e-5),
    "divide factor, sums": (lambda: with_a_divide_factor(True), 2, FACTOR, 1e-5),
    "fsdp1": (lambda: fsdp1(ShardingStrategy.SHARD_GRAD_OP), 2, 1.0, 1e-5),
    "fsdp1, hybrid": (hybrid, 4, 1.0, 1e-5),
}


def train_sharded(rank: int, name: str) -> Run:
    return run_of(SHARDED[name][0](), rank)


@pytest.mark.parametrize("name", SHARDED)
def test_fsdp(name: str) -> None:
    _, world_size, scale, atol = SHARDED[name]
    results = run_ranks(world_size, train_sharded, name)
    assert_same_run(results, single_process(scale=scale), atol)
