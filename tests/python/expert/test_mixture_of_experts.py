"""Experts shared among ranks: the training of one process that has them all, and exact bytes."""

from __future__ import annotations

import pytest
import torch
from full_states import full_weights
from moe_models import (
    DIM,
    STEPS,
    Case,
    batch,
    descend,
    expert_net,
    loss_of,
    sent_bytes,
    train,
    train_alone,
)
from ranks import run_ranks
from torch import Tensor

from ringcomm.parallel import expert

CASES = [
    Case(4, 2),
    Case(5, 2, normalize_weights=True),
    Case(2, 1),  # fewer experts than ranks
    Case(5, 3, capacity_factor=0.7),
    Case(4, 1, capacity_factor=1.0),
    Case(3, 3),  # dense
    Case(1, 1),
]


def train_ranks(
    rank: int, case: Case, sizes: list[int]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    net = expert_net(case)
    losses = train(net, rank, sizes)
    return losses, net.state_dict(), full_weights(net)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sizes", [[6], [5, 7], [4, 0, 3], [1, 6, 2, 5]], ids=str)
def test_the_training_of_one_process(case: Case, sizes: list[int]) -> None:
    losses, weights = train_alone(case, sizes)
    results = run_ranks(len(sizes), train_ranks, case, sizes)
    for rank, (found, mine, whole) in enumerate(results):
        expected = [of_step[rank] for of_step in losses]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        assert sorted(whole) == sorted(weights)
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=2e-6)
        assert all(torch.equal(whole[name], value) for name, value in mine.items())


# ---- bits


def train_in_order(case: Case, sizes: list[int]) -> dict[str, Tensor]:
    """One process, whose experts take the ranks' rows one behind the other, as on their rank.

    To the bit with top_k=2: a sum of two numbers has no order.
    """
    net = expert_net(case)
    for step in range(STEPS):
        batches = [batch(step, rank, size) for rank, size in enumerate(sizes)]
        inputs = [net.first(x).tanh() for x, _ in batches]
        tokens = [x.flatten(0, -2) for x in inputs]
        routings = [net.moe.router(x) for x in tokens]
        results = [torch.zeros(x.shape[0], case.top_k, DIM) for x in tokens]
        for idx in range(case.num_experts):
            places = [torch.nonzero(r.experts == idx) for r in routings]
            rows = [x[place[:, 0]] for x, place in zip(tokens, places, strict=True)]
            made = net.moe.experts[str(idx)](torch.cat(rows)).split([len(x) for x in rows])
            results = [
                result.index_put(tuple(place.t()), of_rank)
                for result, place, of_rank in zip(results, places, made, strict=True)
            ]
        losses = []
        for (_, y), x, routing, result in zip(batches, inputs, routings, results, strict=True):
            out = (result * routing.weights[..., None]).sum(1).view(x.shape)
            loss = (net.last(x + out) - y).square().sum() / 16
            loss = loss + 0.05 * routing.load_balancing_loss + 0.01 * routing.router_z_loss
            losses.append(loss)
        torch.stack(losses).sum().backward()
        for param in net.parameters():
            assert param.grad is not None
            param.grad /= len(sizes)
        descend(net)
    return net.state_dict()


def train_in_order_of_one(rank: int, case: Case, sizes: list[int]) -> dict[str, Tensor]:
    return train_in_order(case, sizes)


@pytest.mark.parametrize("case", [Case(5, 2), Case(3, 2, normalize_weights=True)], ids=str)
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_two_ranks_have_the_bits_of_one(case: Case, backend: str) -> None:
    (expected,) = run_ranks(1, train_in_order_of_one, case, [5, 7])
    for _, _, whole in run_ranks(2, train_ranks, case, [5, 7], backend=backend):
        assert all(torch.equal(whole[name], value) for name, value in expected.items())


def train_without_mean(rank: int, case: Case, sizes: list[int]) -> dict[str, Tensor]:
    """As if experts' gradients were like all others: a mean over ranks that have the same."""
    net = expert_net(case)
    for step in range(STEPS):
        loss_of(net, *batch(step, rank, sizes[rank])).backward()
        local = expert.expert_parameters(net)
        for name, param in net.named_parameters():
            assert param.grad is not None
            if name not in local:
                torch.distributed.all_reduce(param.grad)
                param.grad /= len(sizes)
        descend(net)
    return full_weights(net)


def test_a_missing_mean_would_be_seen() -> None:
    """The control: experts that learn from the sum train something else."""
    case, sizes = Case(4, 2), [5, 7]
    _, weights = train_alone(case, sizes)
    for whole in run_ranks(2, train_without_mean, case, sizes):
        name = "moe.experts.0.2.weight"
        assert not torch.allclose(whole[name], weights[name], atol=1e-4)


# ---- bytes on the wire


def counted(rank: int, case: Case, sizes: list[int], dtype: torch.dtype) -> list[int]:
    """Sent forward and backward, and by the formula; with the dtype by autocast, or the net's."""
    is_cast = dtype == torch.bfloat16
    net = expert_net(case).to(torch.float32 if is_cast else dtype)
    x, y = batch(0, rank, sizes[rank])
    if not is_cast:
        x, y = x.to(dtype), y.to(dtype)
    before = sent_bytes()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        loss = loss_of(net, x, y)
    middle = sent_bytes()
    loss.backward()
    after = sent_bytes()
    begin, end = net.moe.experts.range
    per_expert = net.moe.routing.tokens_per_expert.tolist()
    mine = sum(per_expert[begin:end])
    of_ranks = [torch.zeros(case.num_experts, dtype=torch.int64) for _ in sizes]
    torch.distributed.all_gather(of_ranks, net.moe.routing.tokens_per_expert)
    received = sum(int(of_rank[begin:end].sum()) for of_rank in of_ranks) - mine
    rows_bytes = (sum(per_expert) - mine + received) * DIM * dtype.itemsize
    num_elsewhere = case.num_experts - (end - begin)
    counts = 8 * num_elsewhere + 24 * (len(sizes) - 1)
    return [middle - before, after - middle, rows_bytes + counts, rows_bytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [Case(5, 2), Case(2, 1), Case(5, 3, capacity_factor=0.7)], ids=str)
@pytest.mark.parametrize("sizes", [[6], [5, 7], [1, 6, 0, 5]], ids=str)
def test_bytes_of_a_step(case: Case, sizes: list[int], dtype: torch.dtype) -> None:
    """Choices whose experts are elsewhere, there and back; as much backward; counts once."""
    for forward, backward, expected_forward, rows in run_ranks(
        len(sizes), counted, case, sizes, dtype
    ):
        assert forward == expected_forward
        assert backward == rows
