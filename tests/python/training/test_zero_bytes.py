"""zero.shard(): bytes sent and bytes kept are what was predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocations import peak_bytes, record_allocations
from full_states import full_state
from gradient_watch import gradients_of, states_of
from ranks import in_ranks
from rows import muon
from steps import apply_steps
from torch import Tensor, nn
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    Net,
    check_traffic,
    live_bytes,
    make_optimizer,
)

from ringcomm.parallel import zero
from ringcomm.parallel.zero.owners import owners_of

BF16 = {"param_dtype": torch.bfloat16}
BF16_REDUCED = {**BF16, "reduce_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, BF16_REDUCED), (3, {}), (3, {**BF16, "clip_grad_norm": 1.0})]
)
@pytest.mark.parametrize("stage", STAGES)
@in_ranks()
def test_bytes_are_the_formulas(rank: int, world_size: int, stage: int, options: Any) -> None:
    model = Net(is_frozen=True)
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    check_traffic(model, make_optimizer(model, "adamw"), stage, rank, world_size, **options)


def test_formulas_by_hand() -> None:
    """2, 2 and 3 parts of (N - 1) / N where N divides, over all ranks where it does not."""
    model: Any = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for stage, parts in ((1, 2), (2, 2), (3, 3)):
        # Two weights, a bucket, whether a pass begins, whether gradients were dropped or not, and
        # a digest of options.
        facts = 3 * {1: 14, 2: 2 * 14, 3: 11}[stage]
        found = zero.predict_traffic(model, optimizer, stage, world_size=4)
        assert found == parts * 3 * 4 * 256 // 4 + facts
        if stage > 1:  # reduced in each backward pass
            found = zero.predict_traffic(model, optimizer, stage, world_size=4, num_backwards=3)
            each = {2: 1, 3: 3}[stage]
            facts *= 2 if stage == 2 else 1
            assert found == (parts + 2 * each) * 3 * 4 * 256 // 4 + facts
    odd = Net()
    optimizer = make_optimizer(odd, "adamw")
    num_elems = sum(param.numel() for param in odd.parameters())
    by_rank = [zero.predict_traffic(odd, optimizer, 2, world_size=3, rank=r) for r in range(3)]
    num_facts = len(list(odd.parameters())) + 12  # of a byte
    assert sum(by_rank) == 2 * 2 * 4 * num_elems + 3 * 2 * 2 * num_facts


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (3, BF16), (2, {**BF16_REDUCED, "one group": False})],
    ids=["32", "16", "16r"],
)
@pytest.mark.parametrize("stage", STAGES)
@in_ranks()
def test_memory_is_what_was_predicted(rank: int, world_size: int, stage: int, options: Any) -> None:
    options["bucket_bytes"] = 40_000
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)])
    # A group for each weight, the first layers first: the reverse of the order of gradients.
    groups = [{"params": [param]} for param in model.parameters()]
    is_one = options.pop("one group", True)
    optimizer = torch.optim.AdamW(model.parameters() if is_one else groups, fused=True)
    num_elems = sum(param.numel() for param in model.parameters())
    place: Any = {"world_size": world_size, "rank": rank}
    expected = zero.predict_memory(model, optimizer, stage, **place, **options)
    sharded = zero.shard(model, optimizer, stage, **options)
    x = torch.randn(4, 96)
    dtype = options.get("param_dtype") or torch.float32
    peak = [0]

    def look(_: Tensor) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        kept = [] if stage == 3 else gradients_of(sharded)
        peak[0] = max(peak[0], live_bytes([*grads, *kept]))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        model(x).float().square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        at_end = grads if stage == 3 else gradients_of(sharded)
        gradients = live_bytes(at_end)
        apply_steps(sharded)
    parameters = live_bytes(model.parameters())
    states = live_bytes(states_of(sharded))
    assert parameters == pytest.approx(expected.parameters, rel=0.05)
    assert gradients == pytest.approx(expected.gradients, rel=0.05)
    assert states == pytest.approx(expected.states, rel=0.05)
    assert peak[0] <= (expected.gradients + expected.buffers) * 1.05
    # Twelve bytes of state; the paper's, where gradients have 16 bits.
    if dtype != torch.float32:
        grad = 4 if "reduce_dtype" not in options else 2
        n = world_size
        formula = {1: 2 + grad + 12 / n, 2: 2 + (grad + 12) / n, 3: 16 / n}[stage]
        assert parameters + gradients + states == pytest.approx(formula * num_elems, rel=0.05)


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 2), (3, 3)])
@in_ranks()
def test_bytes_of_whole_weights(rank: int, world_size: int, stage: int, kind: str) -> None:
    model = Net()
    make: Any = muon if kind == "Muon" else lambda m: torch.optim.Adafactor(m.parameters())
    given = make(model)
    memory = zero.predict_memory(model, given, stage, world_size=world_size, rank=rank)
    optimizer = check_traffic(model, given, stage, rank, world_size)
    assert live_bytes(states_of(optimizer)) == pytest.approx(memory.states, rel=0.05)
    assert live_bytes(model.parameters()) == pytest.approx(memory.parameters, rel=0.05)


def test_owners_are_balanced_by_cost_and_bytes() -> None:
    shapes = [(64, 64)] * 24 + [(64, 256), (256, 64)] * 12 + [(1000, 64), (64, 1000)]
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for world_size in (2, 3, 5):
        owners = owners_of(params, world_size)
        loads = [
            [
                sum(cost(p) for p, owner in owners.items() if owner == rank)
                for rank in range(world_size)
            ]
            for cost in (Tensor.numel, lambda p: min(p.shape) * p.numel())
        ]
        for of_kind in loads:
            assert max(of_kind) <= 1.1 * sum(of_kind) / world_size


@pytest.mark.parametrize("kinds", [(1,), (2, 1), (4, 1)])
@in_ranks(2)
def test_states_are_even_for_weights_of_any_dimensions(rank: int, kinds: Any) -> None:
    """As with the usual groups of matrices and of biases: half the elements on each rank."""
    weights = [nn.Parameter(torch.ones([6] * kind)) for kind in kinds]
    model = nn.ParameterList(weights)
    rmsprop = torch.optim.RMSprop([{"params": [weight]} for weight in weights])
    optimizer = zero.shard(model, rmsprop, 1)
    torch.stack([weight.square().sum() for weight in weights]).sum().backward()
    optimizer.step()
    num_elems = sum(weight.numel() for weight in weights)
    assert sum(state.numel() for state in states_of(optimizer)) == num_elems // 2


@in_ranks(2)
def test_other_ranks_hold_one_weight_at_a_time(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    sharded = zero.shard(model, torch.optim.AdamW(model.parameters(), 0.01), 2)
    model(torch.randn(2, 64)).sum().backward()
    sharded.step()
    with record_allocations() as sizes:
        full_state(sharded, rank0_only=True)
    if rank != 0:
        assert peak_bytes(sizes) <= 4 * 3 * 64 * 64  # a weight, its padded rows, this rank's part
    else:
        assert peak_bytes(sizes) >= 4 * 2 * 8 * 64 * 64
