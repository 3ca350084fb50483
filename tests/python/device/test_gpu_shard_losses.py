"""Cross-entropy over shards in one kernel, on GPUs, against float64."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster_cases import BF16, FP16, FP32, options_of
from emulated_gpu import run_on_gpus, with_kernels
from gpu_ranks import Gpus, device, in_gpu_ranks, module, on_gpu, on_gpus, on_one_gpu
from test_errors import caught
from torch import Tensor

from ringcomm import _C

PATIENCE_S = 20.0
# Of a group whose rank 1 never comes, on CUDA's devices and on emulated ones.
TIMEOUT_S = {True: 4.0, False: 1.0}
NO_TURNS = "the kernel waits for the other ranks'"
# Of a row, as a cluster of one block holds it.
ONE_BLOCK_BYTES = 48 << 10
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
    there = on_gpu(target)
    weight = None if weight is None else on_gpu(weight)
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
    there = torch.full((tokens, end - start + pad + 3), 77.0, dtype=dtype, device=device())
    rows = there[:, : end - start + pad]
    rows[:, : end - start] = on_gpu(logits[:, start:end])
    num_items = torch.tensor(items) if items else None
    before = _C.group_stats(backend_of()).get(ONE_SHOT, {"num_calls": 0, "sent_bytes": 0})
    results = call(rows, target, start, classes, weight, num_items, options)
    assert results is not None, name
    after = _C.group_stats(backend_of())[ONE_SHOT]
    assert after["num_calls"] == before["num_calls"] + 1
    sent = (len(sizes) - 1) * (tokens + 1) * 16
    assert after["sent_bytes"] == before["sent_bytes"] + sent
    module().synchronize()
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
    return dist.group.WORLD._get_backend(device())  # type: ignore[union-attr]


def check_with_collectives(rank: int, name: str, case: dict[str, Any]) -> bytes:
    found = check_case(rank, name, **case)
    # Collectives before and after use the same packets.
    small = torch.full((50,), float(rank + 1), device=device())
    dist.all_reduce(small)
    world_size = dist.get_world_size()
    assert small.tolist() == [world_size * (world_size + 1) / 2] * 50
    return found


@on_gpus
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_float64_and_the_same_bits_on_all_ranks(
    gpus: Gpus, name: str
) -> None:
    gpus.skip_if_they_take_turns(NO_TURNS)
    case = dict(CASES[name])
    sizes = case["sizes"]
    if gpus.world_size < len(sizes) or (gpus.world_size > len(sizes) and not gpus.is_cuda):
        pytest.skip("this case has another number of shards")
    row_bytes = max(sizes) * case.get("dtype", FP32).itemsize
    if gpus.world_size > 2 and gpus.share_cuda and row_bytes > ONE_BLOCK_BYTES:
        pytest.skip("clusters of several blocks may find no room beside those of so many ranks")
    case["sizes"] = tuple(sizes[rank % len(sizes)] for rank in range(gpus.world_size))
    results = gpus.run(check_with_collectives, name, case)
    assert results[1:] == results[:1] * (gpus.world_size - 1)


def check_threads(rank: int) -> list[bytes]:
    options = options_of(z_loss=0.01)
    every = ((5001, 5002), (15001, 14000))
    return [check_case(rank, str(sizes), sizes, tokens=19, options=options) for sizes in every]


@emulated_gpu.needs_emulated_gpu
def test_blocks_of_several_threads() -> None:
    env = {**with_kernels(), "RINGCOMM_EMULATOR_THREADS": "3"}
    first, second = run_on_gpus(2, check_threads, env=env, timeout_s=120.0)
    assert first == second


# ---- calls that are not served, or do not fit together


def check_not_served(rank: int) -> None:
    logits, target = all_logits(5, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    rows = on_gpu(logits[:, start:end].contiguous())
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


@emulated_gpu.needs_emulated_gpu
def test_calls_that_are_not_served_change_nothing() -> None:
    run_on_gpus(2, check_not_served, env=with_kernels())


def check_no_room(rank: int) -> None:
    logits, target = all_logits(5, 10000, FP32)
    start, end = bounds_of((5000, 5000), rank)
    rows = on_gpu(logits[:, start:end].contiguous())
    assert call(rows, target, start, 10000) is None
    assert torch.equal(rows.cpu(), logits[:, start:end])


@emulated_gpu.needs_emulated_gpu
def test_ranks_that_take_turns_are_not_served() -> None:
    run_on_gpus(2, check_no_room, env={**with_kernels(), "RINGCOMM_EMULATOR_MPS": "0"})


def check_shards_that_do_not_fit(rank: int) -> None:
    logits, target = all_logits(5, 10000, FP32)
    rows = on_gpu(logits[:, :5000].contiguous())
    loss, by_token, _ = call(rows, target, 0, 10000)  # the first shard twice
    assert loss.isnan().item()
    is_ignored = target < 0
    assert bool((by_token[0].cpu().isnan() == ~is_ignored).all())
    assert bool((rows.cpu().isnan().all(1) == ~is_ignored).all())


@emulated_gpu.needs_emulated_gpu
def test_shards_that_do_not_fit_together_make_nan() -> None:
    run_on_gpus(2, check_shards_that_do_not_fit, env=with_kernels())


def outcome(own: tuple[Tensor, Tensor, int, int], **changes: Any) -> dict[str, Any]:
    def whole() -> None:
        call(*own, options=options_of(**changes))
        for _ in range(50):
            module().synchronize()
            time.sleep(0.1)
            dist.all_reduce(torch.ones(2, device=device()))

    begin = time.monotonic()
    return {**caught(whole), "seconds": time.monotonic() - begin}


def own_rows(rank: int, tokens: int = 30) -> tuple[Tensor, Tensor, int, int]:
    """The rank's logits, the targets, and where its shard begins, of how many classes."""
    classes = 5000 * dist.get_world_size()
    logits, target = all_logits(tokens, classes, FP32)
    start = 5000 * rank
    rows = on_gpu(logits[:, start : start + 5000].contiguous())
    # The group has its memory, and its room for these kernels.
    assert call(rows[:30].clone(), target[:30], start, classes) is not None
    module().synchronize()
    return rows, target, start, classes


def differ(rank: int, how: str) -> None:
    rows, target, start, classes = own_rows(rank)
    before = rows.cpu()
    if how == "tokens" and rank == 1:
        rows, target, before = rows[:29], target[:29], before[:29]
    smoothing = 0.1 if how == "options" and rank == 1 else 0.0
    said = outcome((rows, target, start, classes), label_smoothing=smoothing)
    assert said["type"] == "MismatchError", said
    assert torch.equal(rows.cpu(), before)  # nothing was written


@on_one_gpu
@pytest.mark.parametrize("how", ["tokens", "options"])
def test_calls_that_differ_raise_before_anything_is_written(gpus: Gpus, how: str) -> None:
    gpus.skip_if_they_take_turns(NO_TURNS)
    gpus.run(differ, how, group_timeout_s=10.0, fresh=True)


def have_a_longer_shard(rank: int) -> None:
    logits, target = all_logits(5, 15000, FP32)
    start, end = bounds_of((14500, 500), rank)
    rows = on_gpu(logits[:, start:end].contiguous())

    def whole() -> None:
        # A rank whose shard does not fit does something else, which all find out.
        assert (call(rows, target, start, 15000) is None) == (rank == 0)
        for _ in range(50):
            module().synchronize()
            time.sleep(0.1)
            dist.all_reduce(torch.ones(2, device=device()))

    said = caught(whole)
    assert said["type"] == "MismatchError", said
    assert torch.equal(rows.cpu(), logits[:, start:end])


@emulated_gpu.needs_emulated_gpu
def test_a_shard_that_is_much_longer_than_the_others_is_a_mismatch() -> None:
    options: dict[str, Any] = {"env": with_kernels(), "group_timeout_s": 10.0, "fresh": True}
    run_on_gpus(2, have_a_longer_shard, **options)


def be_killed(rank: int, tokens: int) -> dict[str, Any]:
    """Rank 1 dies before the call, or within one of many tokens."""
    own = own_rows(rank, tokens)
    dist.barrier()
    if rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if tokens < 100:
            time.sleep(10.0)
    said = outcome(own)
    return {**said, "usable": (torch.ones(9, device=device()) + 1).sum().item() == 18.0}


@emulated_gpu.needs_emulated_gpu
@pytest.mark.parametrize("tokens", [30, 3000])
def test_a_killed_rank_is_named(tokens: int) -> None:
    """On emulated GPUs: a client that is killed in a kernel ends MPS, and the other ranks."""
    said = run_on_gpus(2, be_killed, tokens, env=with_kernels(), may_die=[1], fresh=True)[0]
    assert said["type"] == "PeerDiedError", said
    assert said["rank"] == 1
    assert said["seconds"] < PATIENCE_S
    assert said["usable"]


def miss(rank: int) -> dict[str, Any]:
    own = own_rows(rank)
    return {} if rank == 1 else outcome(own)


@on_one_gpu
def test_a_rank_that_never_comes_is_named(gpus: Gpus) -> None:
    gpus.skip_if_they_take_turns(NO_TURNS)
    said = gpus.run(miss, group_timeout_s=TIMEOUT_S[gpus.is_cuda], fresh=True)[0]
    assert said["type"] == "CollectiveTimeoutError", said
    assert "rank 1" in said["text"]


@in_gpu_ranks(on_one_gpu, NO_TURNS)
def test_it_goes_into_graphs(rank: int) -> None:
    source, target, start, classes = own_rows(rank, 12)
    there = on_gpu(target)
    rows = torch.empty_like(source)
    module().synchronize()
    graph = module().CUDAGraph()
    with module().graph(graph):
        rows.copy_(source)
        results = call(rows, there, start, classes)
    for shift in range(3):
        source.copy_(source.roll(shift, 1))
        graph.replay()
        eager = source.clone()
        for found, wanted in zip(results, call(eager, there, start, classes), strict=True):
            assert torch.equal(found.cpu(), wanted.cpu())
        assert torch.equal(rows.cpu(), eager.cpu())
