"""Training beside a device's work: pieces of offload.Offloaded are copied, and gradients of ZeRO-2
reduced on a stream of their own; clip_grad_norm_() of models there.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import in_emulated_ranks
from rows import Blocks, sgd
from torch import Tensor, nn

import ringcomm
from ringcomm.nn import ColumnParallelLinear
from ringcomm.optim import Lomo
from ringcomm.parallel import clip_grad_norm_, offload, zero
from ringcomm.parallel.flat_collectives import reduce_scatter_mean, side_stream

pytestmark = emulated_gpu.needs_emulated_gpu

CPU = torch.device("cpu")
LATE = {"RINGCOMM_EMULATOR_DELAY_US": "2000", "RINGCOMM_EMULATOR_QUEUES": "0"}


@pytest.mark.parametrize("is_in_files", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_emulated_ranks(1, backend=None, env=LATE)
def test_steps_have_the_bits_of_the_host(rank: int, dtype: torch.dtype, is_in_files: bool) -> None:
    """Each kernel before and after a step, all of them late, sees what the program says."""
    torch.manual_seed(0)
    here = nn.ParameterList(torch.randn(n, dtype=dtype) for n in (1, 70, 1000))
    there = nn.ParameterList(param.detach().to("emugpu") for param in here)
    place: Any = {"to": "nvme", "path": tempfile.gettempdir()} if is_in_files else {"to": "cpu"}
    optimizers = [
        offload.Offloaded(torch.optim.AdamW(params, 0.1), chunk_elems=64, **place)
        for params in (here, there)
    ]
    for step in range(1, 5):
        for params, optimizer in zip((here, there), optimizers, strict=True):
            for param in params:
                param.grad = torch.ones_like(param) if param.grad is None else param.grad
                param.grad.fill_(step).add_(param.detach())  # the device is behind from here on
            optimizer.step()
            with torch.no_grad():
                for param in [*params][::-1]:  # the last one copied first
                    param.mul_(0.5)
                    param.grad.zero_()
        for ours, expected in zip(there, here, strict=True):
            assert torch.equal(ours.cpu(), expected)
    for param, other in zip(here, there, strict=True):
        states = [o.state[p] for o, p in zip(optimizers, (param, other), strict=True)]
        for key, value in states[0].items():
            assert torch.equal(states[1][key].cpu(), value)


@in_emulated_ranks(1, backend=None, num_devices=2)
def test_a_step_on_another_device_leaves_the_current_one(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/91817, https://github.com/huggingface/trl/pull/7195"""
    param = nn.Parameter(torch.ones(70, device="emugpu:1"))
    optimizer = offload.Offloaded(torch.optim.AdamW([param], 0.1), chunk_elems=64)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.accelerator.current_device_index() == 0
    assert param.tolist() == pytest.approx([0.899] * 70)


# ---- ZeRO-2

WAIT_S = 20.0
QUEUES = {"RINGCOMM_EMULATOR_QUEUES": "0"}  # each stream has its own


def trained(device: torch.device, rank: int) -> tuple[Any, Any]:
    model = Blocks().to(device)
    return model, zero.shard(model, sgd(model), 2, bucket_bytes=1 << 11)


def wait_for(event: Any, limit_s: float) -> bool:
    """Whether it comes."""
    end = time.monotonic() + limit_s
    while not event.query() and time.monotonic() < end:
        time.sleep(0.001)
    is_there: bool = event.query()
    return is_there


def batch(rank: int, device: torch.device) -> Tensor:
    return torch.arange(28.0, device=device).view(4, 7).mul_(0.01 * (rank + 1))


@in_emulated_ranks(2, env=QUEUES)
def test_the_backward_pass_goes_on_while_a_bucket_is_reduced(rank: int) -> None:
    """And one at a time: the next is reduced when it is over."""
    device = torch.device("emugpu", emugpu.current_device())
    model, optimizer = trained(device, rank)
    model(batch(rank, device)).square().mean().backward()  # makes the stream
    optimizer.step()
    emugpu.synchronize()
    side = side_stream(device, "reductions")
    passed: list[bool] = []

    def look(_: Tensor) -> None:
        passed.append(wait_for(emugpu.current_stream().record_event(), WAIT_S))

    # The last gradient of the pass, of the second of two buckets.
    handle = model.first.weight.register_hook(look)
    held = emugpu.hold(side)
    model(batch(rank, device)).square().mean().backward()
    assert passed == [True]
    assert not emugpu.current_stream().query()  # which now waits for the reductions
    held.release()
    handle.remove()
    optimizer.step()
    emugpu.synchronize()


@in_emulated_ranks(2, env={**QUEUES, "RINGCOMM_EMULATOR_DELAY_US": "1000"})
def test_late_reductions_give_the_steps_of_the_host(rank: int) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    found = []
    for place in (device, torch.device("cpu")):
        model, optimizer = trained(place, rank)
        for _ in range(3):
            for _ in range(2):  # micro-batches
                model(batch(rank, place)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().cpu() for param in model.parameters()])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@in_emulated_ranks(2, env=QUEUES)
def test_a_step_after_a_pass_that_failed_waits_for_its_reductions(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/7965"""
    found = []
    for device in (torch.device("emugpu", emugpu.current_device()), torch.device("cpu")):
        model, optimizer = trained(device, rank)
        model(batch(rank, device)).square().mean().backward()
        held: list[Any] = []

        def reduce(*args: Any, held: list[Any] = held) -> Tensor:
            mean = reduce_scatter_mean(*args)
            if mean.device.type != "cpu" and not held:  # what adds it up comes late
                held.append(emugpu.hold(torch.accelerator.current_stream()))
            return mean

        handle = model.first.weight.register_hook(lambda _: 1 / 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ringcomm.parallel.zero.bucket.reduce_scatter_mean", reduce)
            with pytest.raises(ZeroDivisionError):
                model(batch(rank, device)).square().mean().backward()
        optimizer.step()
        if held:
            # For a step that waits too little.
            wait_for(emugpu.current_stream().record_event(), 0.5)
            held.pop().release()
        handle.remove()
        found.append([param.detach().cpu() for param in model.parameters()])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


# ---- one operator for reduction, update and gathering

FUSED = "reduce_scatter_update_all_gather"
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def num_fused() -> int:
    return sum(entry["num_calls"] for (op, _), entry in ringcomm.stats().items() if op == FUSED)


def optimizer_of(kind: str, model: nn.Module) -> Any:
    if kind == "Lomo":
        return Lomo(model, lr=0.01, group=dist.group.WORLD)
    made: Any = {
        "AdamW": ADAMW,
        "AdamW, capturable": partial(ADAMW, capturable=True),
        "SGD": partial(torch.optim.SGD, lr=0.1),
    }[kind]
    return zero.shard(model, made(model.parameters()), 1, bucket_bytes=1 << 11)


def steps(kind: str, device: torch.device, rank: int, dtype: torch.dtype) -> tuple[Any, int]:
    """The weights after four steps, and how many calls were fused ones."""
    torch.manual_seed(0)
    model = Blocks().to(device, dtype)
    optimizer, before = optimizer_of(kind, model), num_fused()
    for _ in range(4):
        model(batch(rank, device).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().cpu() for param in model.parameters()], num_fused() - before


def check_fused(rank: int, kind: str, dtype: torch.dtype, is_fused: bool) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    (ours, num), (expected, _) = (steps(kind, at, rank, dtype) for at in (device, CPU))
    assert (num > 0) == is_fused
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lomo"])
@in_emulated_ranks(2)
def test_ranks_that_share_a_gpu_fuse_the_step(rank: int, kind: str, dtype: torch.dtype) -> None:
    check_fused(rank, kind, dtype, is_fused=True)


@pytest.mark.parametrize("kind", ["AdamW, capturable"])
@in_emulated_ranks(2)
def test_a_step_number_on_the_device_is_not_read(rank: int, kind: str) -> None:
    check_fused(rank, kind, torch.float32, is_fused=False)


@pytest.mark.parametrize("kind", ["AdamW", "Lomo"])
@in_emulated_ranks(2, env={"RINGCOMM_TRANSPORT": "messages"})
def test_over_messages_the_step_has_three_parts(rank: int, kind: str) -> None:
    check_fused(rank, kind, torch.float32, is_fused=False)


@in_emulated_ranks(5)
def test_with_five_ranks_the_step_has_three_parts(rank: int) -> None:
    check_fused(rank, "AdamW", torch.float32, is_fused=False)


# ---- ZeRO-2 whose optimizer is on the host: gradients go there in the backward pass


def on_host(device: torch.device, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Blocks().to(device)
    own = offload.Offloaded(kind(model.parameters(), 0.01), chunk_elems=100)
    return model, zero.shard(model, own, 2, bucket_bytes=1 << 11, **options)


@in_emulated_ranks(2, env=QUEUES)
def test_gradients_reach_the_host_in_the_backward_pass(rank: int) -> None:
    """And leave no memory on the device."""
    device = torch.device("emugpu", emugpu.current_device())
    x = batch(rank, device)
    model, optimizer = on_host(device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    emugpu.synchronize()
    before, buckets = emugpu.memory_allocated(), optimizer._buckets
    found: list[bool] = []

    def look(_: Tensor) -> None:
        found.append(wait_for(next(b._sent for b in buckets if b._sent is not None), WAIT_S))

    # The last gradient of the pass, of the last bucket.
    handle = model.first.weight.register_hook(look)
    model(x).square().mean().backward()
    handle.remove()
    assert found == [True]
    emugpu.synchronize()
    assert emugpu.memory_allocated() == before
    for bucket in buckets:
        assert bucket.shard_grad.is_pinned()
    optimizer.step()


CHECKED: list[dict[str, Any]] = [
    {},
    {"clip_grad_norm": 0.01},
    {"loss_scale": 1024.0},
    {"param_dtype": torch.bfloat16},
    {"reduce_dtype": torch.bfloat16, "param_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("options", CHECKED)
@in_emulated_ranks(2, env={**QUEUES, "RINGCOMM_EMULATOR_DELAY_US": "1000"})
def test_late_gradients_on_the_host_give_its_steps(
    rank: int, options: dict[str, Any], kind: Any
) -> None:
    """Of micro-batches, one of them in no_sync(), after a pass that was dropped."""
    device = torch.device("emugpu", emugpu.current_device())
    found = []
    for place in (device, torch.device("cpu")):
        model, optimizer = on_host(place, kind, **options)

        def run(part: int, model: Any = model, own: Any = optimizer, place: Any = place) -> None:
            own.scale(model(batch(rank + part, place)).float().square().mean()).backward()

        for step in range(3):
            run(step)
            if step == 1:
                handle = model.first.weight.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    run(3)
                handle.remove()
                optimizer.zero_grad()
                run(4)
            with optimizer.no_sync():
                run(1)
            run(2)
            optimizer.step()
        found.append([param.detach().cpu() for param in model.parameters()])
        found[-1].append(torch.tensor(optimizer.grad_norm or 0.0))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@in_emulated_ranks(2, env={**QUEUES, "RINGCOMM_EMULATOR_DELAY_US": "1000"})
def test_an_overflow_on_the_host_skips_the_step(rank: int) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    model, optimizer = on_host(device, loss_scale="dynamic")
    scale = optimizer.loss_scale
    weights = [param.detach().clone() for param in model.parameters()]
    loss = model(batch(rank, device)).square().mean()
    optimizer.scale(loss * (torch.inf if rank == 1 else 1.0)).backward()
    optimizer.step()
    assert optimizer.loss_scale == scale / 2
    for ours, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(ours, before)
    optimizer.scale(model(batch(rank, device)).square().mean()).backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, weights[0])


# ---- clip_grad_norm_(), whose norms the ranks gather


@in_emulated_ranks(2)
def test_a_rank_without_gradients(rank: int) -> None:
    device = torch.device("emugpu", emugpu.current_device())
    model = ColumnParallelLinear.from_linear(nn.Linear(4, 6, bias=False), group=dist.group.WORLD)
    model = model.to(device)
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0) if rank == 0 else None
    norm = clip_grad_norm_(model, 1.0)
    assert norm.item() == torch.full((12,), 2.0).norm().item()
