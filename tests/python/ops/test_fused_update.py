"""reduce_scatter_update_all_gather_: bits against its parts, steps against torch.optim, a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from update_runs import BF16, F16, F32, OPTIMIZERS, Run, average, sizes, start

from ringcomm import Options, ops
from ringcomm.ops import LomoStep, SGDStep

NUM_STEPS = 5
# A slice of 256 KiB and an element, on each rank.
TWO_SLICES = 65_537

# ---- the parts

_own_group: list[dist.ProcessGroup] = []


def own_group() -> dist.ProcessGroup:
    """A group of this rank alone: there the operator is the update and nothing else."""
    if not _own_group:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _own_group.append(groups[dist.get_rank()])
    return _own_group[0]


def unfused_step(run: Run, step: int) -> None:
    grad = run.grad(step)
    if grad.numel() > 0 and grad.numel() % run.world_size == 0:
        reduced = ops.reduce_scatter(grad, "avg")
    else:
        reduced = ops.all_reduce(grad, "avg")[run.shard]
    ops.reduce_scatter_update_all_gather_(
        run.param[run.shard],
        reduced.clone(),
        run.state,
        optimizer=run.optimizer,
        step=step,
        group=own_group(),
    )
    for rank in range(run.world_size):
        begin, end = ops.shard_range(grad.numel(), run.world_size, rank)
        dist.broadcast(run.param[begin:end], rank)


KINDS = [(F32, F32, False), (BF16, BF16, False), (BF16, BF16, True)]
KINDS += [(F16, F32, False), (F32, BF16, False)]


def check_bits(rank: int, name: str, algorithm: str) -> None:
    world_size = dist.get_world_size()
    for dtype, grad_dtype, master in KINDS:
        if master and name.startswith("lomo"):
            continue
        for num_elems in [*sizes(world_size), TWO_SLICES * world_size]:
            kwargs = {"grad_dtype": grad_dtype, "master": master}
            fused = Run(OPTIMIZERS[name], num_elems, dtype, **kwargs)
            parts = Run(OPTIMIZERS[name], num_elems, dtype, **kwargs)
            for step in (1, 2):
                fused.step(step)
                if algorithm == "auto":
                    unfused_step(parts, step)
                    oracle.assert_equal(fused.param, parts.param)
                    for key, value in fused.state.items():
                        oracle.assert_equal(value, parts.state[key])
            oracle.assert_equal(ops.broadcast(fused.param, 0), fused.param)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(1 + i % 4, name) for i, name in enumerate(sorted(OPTIMIZERS))] + [(4, "adamw")],
)
def test_same_bits_as_the_parts_and_on_all_ranks(world_size: int, name: str) -> None:
    run_ranks(world_size, check_bits, name, "auto")


def test_same_bits_on_all_ranks_of_a_ring() -> None:
    run_ranks(3, check_bits, "adamw", "ring", pg_options=Options(algorithm="ring"))


# ---- torch.optim


def torch_step(optimizer: Any, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
    """One step of torch's own in fp32; `state` has its number, and is updated too."""
    step = int(state.pop("step"))
    numbers = dataclasses.asdict(optimizer)
    if isinstance(optimizer, LomoStep):
        limit = numbers["clip_value"] or torch.inf
        weight.mul_(1 - optimizer.lr * optimizer.weight_decay)
        weight.sub_(grad.clamp(-limit, limit), alpha=optimizer.lr)
        return
    param = nn.Parameter(weight)
    param.grad = grad
    if isinstance(optimizer, SGDStep):
        reference: torch.optim.Optimizer = torch.optim.SGD([param], **numbers)
        if step > 1:
            reference.state[param].update(state)
    else:  # the default takes MKL's square root, which is an ulp off itself
        reference = torch.optim.AdamW([param], **numbers, fused=True)
        reference.state[param].update(state, step=torch.tensor(float(step - 1)))
    reference.step()
    state.update({key: reference.state[param][key] for key in optimizer.state_names})


def ulps(actual: Tensor, expected: Tensor, before: Tensor) -> float:
    """The largest difference, in units in the last place of what was there before or is after."""
    if actual.numel() == 0:
        return 0.0
    size = torch.maximum(expected.abs(), before.abs()).clamp(min=1e-30)
    ulp = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
    return float(((actual.double() - expected.double()).abs() / ulp.double()).max())


def shards_of_steps(
    rank: int, name: str, dtype: torch.dtype, master: bool
) -> list[list[dict[str, Tensor]]]:
    """For each size: this rank's shard of everything before the first step and after each."""
    found = []
    for num_elems in sizes(dist.get_world_size()):
        run = Run(OPTIMIZERS[name], num_elems, dtype, master=master)
        steps = []
        for step in range(NUM_STEPS + 1):
            if step > 0:
                run.step(step)
            shards = {"param": run.param[run.shard], **run.state}
            steps.append({key: value.clone() for key, value in shards.items()})
        found.append(steps)
    return found


def check_torch(world_size: int, name: str, dtype: torch.dtype, master: bool) -> None:
    """Every step by torch.optim from where we were before it; 2 ulp apart at most."""
    optimizer = OPTIMIZERS[name]
    by_rank = run_ranks(world_size, shards_of_steps, name, dtype, master)
    for num_elems, *ranks in zip(sizes(world_size), *by_rank, strict=True):
        steps = [
            {key: torch.cat([shards[key] for shards in parts]) for key in parts[0]}
            for parts in zip(*ranks, strict=True)
        ]
        oracle.assert_equal(steps[0]["param"], start(num_elems, dtype))
        weight_key = "master" if master else "param"
        for step in range(1, NUM_STEPS + 1):
            before, after = steps[step - 1], steps[step]
            state = {key: before[key].clone() for key in optimizer.state_names}
            state["step"] = torch.tensor(step)
            weight = before[weight_key].float().clone()
            torch_step(
                optimizer, weight, average(world_size, num_elems, dtype, step).float(), state
            )
            for key in optimizer.state_names:
                assert ulps(after[key], state[key], before[key]) <= 2
            if dtype == F32 or master:
                assert ulps(after[weight_key], weight, before[weight_key]) <= 2
                oracle.assert_equal(after["param"], after[weight_key].to(dtype))
            else:  # near the middle of two 16-bit numbers, either
                rtol = 2**-7 if dtype == BF16 else 2**-10
                torch.testing.assert_close(after["param"], weight.to(dtype), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [*((3, name) for name in sorted(OPTIMIZERS)), (1, "adamw"), (4, "momentum")],
)
def test_steps_of_torch_optim(world_size: int, name: str) -> None:
    check_torch(world_size, name, F32, False)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("name", "master"),
    [("momentum", False), ("momentum", True), ("adamw", False), ("adamw", True), ("lomo", False)],
)
def test_steps_in_16_bits(name: str, master: bool, dtype: torch.dtype) -> None:
    check_torch(3, name, dtype, master)


def check_scale(rank: int) -> None:
    """Not averaged, and unscaled: exact in powers of two."""
    plain, scaled = (Run(OPTIMIZERS["adamw"], 1001, F32) for _ in range(2))
    plain.step(1)
    scaled.step(1, average=False, grad_scale=0.5)
    oracle.assert_equal(scaled.param, plain.param)
    assert not torch.equal(scaled.param, Run(OPTIMIZERS["adamw"], 1001, F32).param)


def test_scale() -> None:
    run_ranks(2, check_scale)
