"""Cross-entropy over shards in one kernel, on emulated GPUs, against float64."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster_cases import BF16, FP16, FP32, options_of
from emulated_gpu import run_on_gpus, with_kernels
from test_errors import caught
from torch import Tensor

from ringcomm import _C

pytestmark = emulated_gpu.needs_emulated_gpu

DEVICE = "emugpu"
PATIENCE_S = 20.0
ONE_SHOT = ("all_reduce", "one_shot")


def bounds_of(sizes: tuple[int, ...], rank: int) -> tuple[int, int]:
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


def call(
    logits: Tensor,
    target: Tensor,
    start: int,
    classes: int,
    weight: Tensor | None = None,
    num_items: Tensor | None = None,
    options: tuple[Any, ...] | None = None,
) -> Any:
    """The rank's part of the call, on its GPU."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    there = target.to(DEVICE)
    weight = None if weight is None else weight.to(DEVICE)
    return _C.cross_entropy_over_shards(
        logits, there, weight, num_items, name, start, classes, *(options or options_of())
    )


def all_logits(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width + tokens)
    logits = (torch.randn(tokens, width, generator=generator) * 3).to(dtype)
    target = torch.randint(width, (tokens,), generator=generator)
    if tokens > 1:
        target[tokens // 2] = -100
    return logits, target


def right(
    logits: Tensor, target: Tensor, options: tuple[Any, ...], weight: Tensor | None, divisor: float
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64, by torch."""
    _, scale, _, smoothing, z_loss, reduction, _ = options
    x = logits.double().requires_grad_()
    z = x * scale
    weight = None if weight is None else weight.double()
    loss = F.cross_entropy(z, target, weight, label_smoothing=smoothing, reduction="sum")
    loss = loss + z_loss * (z.logsumexp(1).square() * (target >= 0)).sum()
    if reduction == "mean":
        counts = torch.ones(len(logits)) if weight is None else weight[target.clamp(min=0)]
        loss = loss / (divisor or (counts * (target >= 0)).sum())
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


# Shards' sizes, and what a call has. Rows of 20 KB have clusters of one block, 60 KB of two.
CASES: dict[str, dict[str, Any]] = {
    "even": {"sizes": (5000, 5000)},
    "three": {"sizes": (5000, 5000, 5000)},
    "uneven": {"sizes": (5001, 5003, 4500), "tokens": 17},
    "a short one": {"sizes": (7000, 100, 7000)},
    "an empty one": {"sizes": (7400, 0, 7400)},
    "one row": {"sizes": (5000, 5000), "tokens": 1},
    "bfloat16": {"sizes": (9001, 9002), "dtype": BF16},
    "smooth": {"sizes": (5000, 4999), "options": options_of(label_smoothing=0.1)},
    "smooth bfloat16": {
        "sizes": (9001, 9002),
        "dtype": BF16,
        "options": options_of(label_smoothing=0.1, z_loss=0.01),
    },
    "two blocks": {"sizes": (15001, 14000), "options": options_of(z_loss=0.01, logit_scale=0.7)},
    "four blocks": {"sizes": (30001, 30000), "options": options_of(label_smoothing=0.1)},
    "sum": {"sizes": (5000, 5000), "options": options_of(reduction="sum")},
    "weights": {"sizes": (5000, 5000), "has_weight": True},
    "items": {"sizes": (5000, 5000), "items": 3.0},
    "padding": {"sizes": (5000, 5000), "padding": 7},
}


def check_case(
    rank: int,
    name: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype = FP32,
    tokens: int = 40,
    options: tuple[Any, ...] | None = None,
    has_weight: bool = False,
    items: float = 0.0,
    padding: int = 0,
) -> bytes:
    options = options or options_of()
    classes = sum(sizes)
    logits, target = all_logits(tokens, classes, dtype)
    weight = torch.linspace(0.5, 2, classes) if has_weight else None
    start, end = bounds_of(sizes, rank)
    # Columns behind the last classes are padding, and rows begin anywhere.
    pad = padding if rank == len(sizes) - 1 else 0
    there = torch.full((tokens, end - start + pad + 3), 77.0, dtype=dtype, device=DEVICE)
    rows = there[:, : end - start + pad]
    rows[:, : end - start] = logits[:, start:end].to(DEVICE)
    num_items = torch.tensor(items) if items else None
    before = _C.group_stats(backend_of()).get(ONE_SHOT, {"num_calls": 0, "sent_bytes": 0})
    results = call(rows, target, start, classes, weight, num_items, options)
    assert results is not None, name
    after = _C.group_stats(backend_of())[ONE_SHOT]
    assert after["num_calls"] == before["num_calls"] + 1
    sent = (len(sizes) - 1) * (tokens + 1) * 16
    assert after["sent_bytes"] == before["sent_bytes"] + sent
    emugpu.synchronize()
    loss, grad = right(logits, target, options, weight, items)
    torch.testing.assert_close(results[0].cpu().double(), loss, rtol=2e-6, atol=2e-6)
    rtol = 2e-5 if dtype == FP32 else 2**-7
    found = there.cpu()
    torch.testing.assert_close(
        found[:, : end - start].double(), grad[:, start:end], rtol=rtol, atol=1e-9
    )
    assert not found[:, end - start : end - start + pad].any()
    assert bool((found[:, end - start + pad :] == 77).all())
    # All ranks have the same bits.
    return b"".join(tensor.cpu().numpy().tobytes() for tensor in results)


def backend_of() -> Any:
    return dist.group.WORLD._get_backend(torch.device(DEVICE))  # type: ignore[union-attr]


def check_cases(rank: int, names: tuple[str, ...]) -> list[bytes]:
    found = []
    for name in names:
        case = dict(CASES[name])
        found.append(check_case(rank, name, **case))
        # Collectives before and after use the same packets.
        small = torch.full((50,), float(rank + 1), device=DEVICE)
        dist.all_reduce(small)
        world_size = dist.get_world_size()
        assert small.tolist() == [world_size * (world_size + 1) / 2] * 50
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_and_gradients_are_those_of_float64_and_the_same_bits_on_all_ranks(
    world_size: int,
) -> None:
    names = tuple(name for name, case in CASES.items() if len(case["sizes"]) == world_size)
    results = run_on_gpus(world_size, check_cases, names, env=with_kernels(), timeout_s=240.0)
    for other in results[1:]:
        assert other == results[0]


def test_ranks_on_two_gpus() -> None:
    options: dict[str, Any] = {"env": with_kernels(), "num_devices": 2, "timeout_s": 120.0}
    results = run_on_gpus(3, check_cases, ("uneven", "three"), **options)
    assert results[1:] == results[:1] * 2


def check_threads(rank: int) -> list[bytes]:
    options = options_of(z_loss=0.01)
    every = ((5001, 5002), (15001, 14000))
    return [check_case(rank, str(sizes), sizes, tokens=19, options=options) for sizes in every]


def test_blocks_of_several_threads() -> None:
    env = {**with_kernels(), "RINGCOMM_EMULATOR_THREADS": "3"}
    first, second = run_on_gpus(2, check_threads, env=env, timeout_s=120.0)
    assert first == second


# ---- calls that are not served, or do not fit together


def check_not_served(rank: int) -> None:
    logits, target = all_logits(5, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    rows = logits[:, start:end].contiguous().to(DEVICE)
    before = rows.clone()
    changes: tuple[dict[str, Any], ...] = (
        {"softcap": 30.0},
        {"wants_more": True},
        {"reduction": "none"},
        {"logit_scale": -1.0},
    )
    for changed in changes:
        assert call(rows, target, start, 10000, options=options_of(**changed)) is None
    assert call(rows, target, start, -1) is None
    assert call(rows.to(FP16), target, start, 10000) is None
    weight = torch.ones(10000)
    smooth = options_of(label_smoothing=0.1)
    assert call(rows, target, start, 10000, weight, options=smooth) is None
    assert call(rows[:, :100], target, 100 * rank, 200) is None  # too short
    assert torch.equal(rows.cpu(), before.cpu())
    assert call(rows, target, start, 10000) is not None


def test_calls_that_are_not_served_change_nothing() -> None:
    run_on_gpus(2, check_not_served, env=with_kernels())


def check_no_room(rank: int) -> None:
    logits, target = all_logits(5, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    rows = logits[:, start:end].contiguous().to(DEVICE)
    assert call(rows, target, start, 10000) is None
    assert torch.equal(rows.cpu(), logits[:, start:end])


def test_ranks_that_take_turns_are_not_served() -> None:
    run_on_gpus(2, check_no_room, env={**with_kernels(), "RINGCOMM_EMULATOR_MPS": "0"})


def check_shards_that_do_not_fit(rank: int) -> None:
    logits, target = all_logits(5, 10000, FP32)
    rows = logits[:, :5000].contiguous().to(DEVICE)
    loss, by_token, _ = call(rows, target, 0, 10000)  # the first shard twice
    assert loss.isnan().item()
    is_ignored = target < 0
    assert bool((by_token[0].cpu().isnan() == ~is_ignored).all())
    assert bool((rows.cpu().isnan().all(1) == ~is_ignored).all())


def test_shards_that_do_not_fit_together_make_nan() -> None:
    run_on_gpus(2, check_shards_that_do_not_fit, env=with_kernels())


def outcome(rows: Tensor, target: Tensor, start: int, **changes: Any) -> dict[str, Any]:
    def whole() -> None:
        call(rows, target, start, 10000, options=options_of(**changes))
        for _ in range(50):
            emugpu.synchronize()
            time.sleep(0.1)
            dist.all_reduce(torch.ones(2, device=DEVICE))

    begin = time.monotonic()
    return {**caught(whole), "seconds": time.monotonic() - begin}


def own_rows(rank: int) -> tuple[Tensor, Tensor, int]:
    logits, target = all_logits(30, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    rows = logits[:, start:end].contiguous().to(DEVICE)
    # The group has its memory, and its room for these kernels.
    assert call(rows.clone(), target, start, 10000) is not None
    emugpu.synchronize()
    return rows, target, start


def differ(rank: int, how: str) -> None:
    rows, target, start = own_rows(rank)
    before = rows.cpu()
    if how == "tokens" and rank == 1:
        rows, target, before = rows[:29], target[:29], before[:29]
    smoothing = 0.1 if how == "options" and rank == 1 else 0.0
    said = outcome(rows, target, start, label_smoothing=smoothing)
    assert said["type"] == "MismatchError", said
    assert torch.equal(rows.cpu(), before)  # nothing was written


@pytest.mark.parametrize("how", ["tokens", "options"])
def test_calls_that_differ_raise_before_anything_is_written(how: str) -> None:
    run_on_gpus(2, differ, how, env=with_kernels(), group_timeout_s=10.0, fresh=True)


def have_a_longer_shard(rank: int) -> None:
    logits, target = all_logits(5, 15000, FP32)
    start, end = bounds_of((14500, 500), rank)
    rows = logits[:, start:end].contiguous().to(DEVICE)

    def whole() -> None:
        # A rank whose shard does not fit does something else, which all find out.
        assert (call(rows, target, start, 15000) is None) == (rank == 0)
        for _ in range(50):
            emugpu.synchronize()
            time.sleep(0.1)
            dist.all_reduce(torch.ones(2, device=DEVICE))

    said = caught(whole)
    assert said["type"] == "MismatchError", said
    assert torch.equal(rows.cpu(), logits[:, start:end])


def test_a_shard_that_is_much_longer_than_the_others_is_a_mismatch() -> None:
    options: dict[str, Any] = {"env": with_kernels(), "group_timeout_s": 10.0, "fresh": True}
    run_on_gpus(2, have_a_longer_shard, **options)


def be_killed(rank: int, tokens: int) -> dict[str, Any]:
    """Rank 1 dies before the call, or within one of many tokens."""
    own_rows(rank)
    logits, target = all_logits(tokens, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    rows = logits[:, start:end].contiguous().to(DEVICE)
    dist.barrier()
    if rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if tokens < 100:
            time.sleep(10.0)
    said = outcome(rows, target, start)
    return {**said, "usable": (torch.ones(9, device=DEVICE) + 1).sum().item() == 18.0}


@pytest.mark.parametrize("tokens", [30, 3000])
def test_a_killed_rank_is_named(tokens: int) -> None:
    said = run_on_gpus(2, be_killed, tokens, env=with_kernels(), may_die=[1], fresh=True)[0]
    assert said["type"] == "PeerDiedError", said
    assert said["rank"] == 1
    assert said["seconds"] < PATIENCE_S
    assert said["usable"]


def miss(rank: int) -> dict[str, Any]:
    rows, target, start = own_rows(rank)
    return {} if rank == 1 else outcome(rows, target, start)


def test_a_rank_that_never_comes_is_named() -> None:
    said = run_on_gpus(2, miss, env=with_kernels(), group_timeout_s=1.0, fresh=True)[0]
    assert said["type"] == "CollectiveTimeoutError", said
    assert "rank 1" in said["text"]


def check_graph(rank: int) -> None:
    logits, target = all_logits(12, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    there = target.to(DEVICE)
    source = logits[:, start:end].contiguous().to(DEVICE)
    own_rows(rank)
    rows = torch.empty_like(source)
    emugpu.synchronize()
    graph = emugpu.CUDAGraph()
    with emugpu.graph(graph):
        rows.copy_(source)
        results = call(rows, there, start, 10000)
    for shift in range(3):
        source.copy_(logits.roll(shift, 1)[:, start:end].contiguous().to(DEVICE))
        graph.replay()
        eager = source.clone()
        for found, wanted in zip(results, call(eager, there, start, 10000), strict=True):
            assert torch.equal(found.cpu(), wanted.cpu())
        assert torch.equal(rows.cpu(), eager.cpu())


def test_it_goes_into_graphs() -> None:
    run_on_gpus(2, check_graph, env=with_kernels())
