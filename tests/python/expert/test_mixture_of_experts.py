"""Experts shared among ranks: the training of one process that has them all; calls of the layer."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_models import (
    DIM,
    HIDDEN,
    Case,
    DenseMixture,
    batch,
    expert_net,
    make_expert,
    row_of,
)
from oracle import all_equal
from ranks import in_ranks, run_ranks
from rows import Row, Training, cases_of, check, sgd
from steps import apply_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_models import sent_bytes

from ringcomm.nn import MixtureOfExperts
from ringcomm.ops import shard_range
from ringcomm.parallel.expert.layer import TopKRouter


def averages(
    case: Case, sizes: tuple[int, ...], num_replicas: int, *systems: str, **more: Any
) -> Row:
    return row_of(
        case,
        len(sizes) // num_replicas,
        sizes=sizes,
        # By default torch updates all at once on a GPU, where DTensors may not be beside others.
        optimizer=partial(sgd, lr=0.2, foreach=False),
        systems=systems or ("average",),
        **{"atol": 2e-6, **more},
    )


# A layer, the tokens of each rank, replicas of each expert, and what averages the rest.
ROWS = {
    str(given): averages(*given)
    for given in (
        (Case(4, 2), (5, 7), 1),
        (Case(5, 2, normalize_weights=True), (1, 6, 2, 5), 1),
        (Case(2, 1), (4, 0, 3), 1),  # fewer experts than ranks
        (Case(5, 3, capacity_factor=0.7), (4, 0, 3), 1),
        (Case(1, 1), (6,), 1),
        (Case(5, 2), (4, 1, 5, 2), 2, "average", "DDP"),
        (Case(5, 2), (4, 1), 1, "DDP"),
        (Case(5, 2), (4, 1, 5, 2), 1, "fully_shard"),
    )
}
ROWS["16 bits"] = averages(Case(4, 2), (5, 7), 1, prepare=nn.Module.bfloat16, atol=2e-2)


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_the_training_of_one_process(
    rank: int, device: str, name: str, system: str, world_size: int, backend: str
) -> None:
    check(rank, ROWS[name], system, device)


def train_in_order(case: Case, sizes: list[int]) -> dict[str, Tensor]:
    """One process, whose experts take the ranks' rows one behind the other, as on their rank.

    To the bit with top_k=2: a sum of two numbers has no order.
    """
    net = expert_net(case)
    optimizer = sgd(net, lr=0.2)
    for step in range(3):
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
        apply_steps(optimizer)
    return net.state_dict()


def train_in_order_of_one(rank: int, case: Case, sizes: list[int]) -> dict[str, Tensor]:
    return train_in_order(case, sizes)


def train_on_ranks(rank: int, case: Case, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    made = Training(averages(case, sizes, 1), "average", rank).begin()
    made.train(range(3))
    return made.weights()


def test_two_ranks_have_the_bits_of_one() -> None:
    case = Case(5, 2, normalize_weights=True)
    (expected,) = run_ranks(1, train_in_order_of_one, case, [5, 7])
    for whole in run_ranks(2, train_on_ranks, case, (5, 7)):
        assert all(torch.equal(whole[name], value) for name, value in expected.items())


# ---- the layer


def make_layer(case: Case, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    return MixtureOfExperts(
        *(DIM, make_expert, case.num_experts, case.top_k),
        capacity_factor=case.capacity_factor,
        normalize_weights=case.normalize_weights,
        **options,
    )


def dense_like(layer: MixtureOfExperts, case: Case) -> DenseMixture:
    """The oracle with a layer's values. Collective."""
    dense = DenseMixture(case)
    dense.load_state_dict(full_weights(layer))
    return dense.to(next(layer.parameters()).dtype)


def check_any(rank: int, case: Case, sizes: list[int]) -> None:
    """Values, gradients, what is dropped, and bytes, forward and backward."""
    layer = make_layer(case).double()
    dense = dense_like(layer, case)
    torch.manual_seed(rank)
    x = torch.randn(sizes[rank], DIM, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    start = sent_bytes()["all_to_all"]
    out = layer(x)
    middle = sent_bytes()["all_to_all"]
    out.square().sum().backward()
    end = sent_bytes()["all_to_all"]
    dense(again).square().sum().backward()
    torch.testing.assert_close(out, dense(again), rtol=0, atol=1e-12)
    torch.testing.assert_close(x.grad, again.grad, rtol=0, atol=1e-12)
    for param in (*dense.parameters(), layer.router.weight):
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad)
    for name, param in layer.named_parameters():
        torch.testing.assert_close(param.grad, dense.get_parameter(name).grad, rtol=0, atol=1e-12)
    assert layer.routing is not None
    assert int(layer.routing.num_dropped_tokens) == dense.num_dropped
    # Rows of this rank with experts elsewhere, and those of others with experts here.
    table: list[Any] = [None] * len(sizes)
    dist.all_gather_object(table, layer.routing.tokens_per_expert.tolist())
    mine = slice(*layer.experts.range)
    num_rows = sum(table[rank]) + sum(sum(row[mine]) for row in table) - 2 * sum(table[rank][mine])
    rows, num_others = 8 * DIM * num_rows, case.num_experts - len(layer.experts)
    assert middle - start == rows + 8 * num_others + 16 * (len(sizes) - 1)
    assert end - middle == rows


@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_layer(data: st.DataObject) -> None:
    """The dense computation of the same experts, whatever the layer and the tokens."""
    num_experts = data.draw(st.integers(1, 7))
    top_k = data.draw(st.integers(1, num_experts))
    capacity_factor = data.draw(st.none() | st.floats(0.1, 2))
    case = Case(num_experts, top_k, capacity_factor, top_k > 1 and data.draw(st.booleans()))
    world_size = data.draw(st.sampled_from([2, 4]))
    sizes = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size)
    run_ranks(world_size, check_any, case, data.draw(sizes))


@in_ranks(3)
def test_shapes_and_refusals(rank: int) -> None:
    case = Case(5, 2)
    layer = make_layer(case)
    dense = dense_like(layer, case)
    begin, end = shard_range(5, 3, rank)
    assert list(layer.experts) == [str(idx) for idx in range(begin, end)]
    assert f"{begin}:{end} of 5" in repr(layer)
    torch.manual_seed(rank)
    columns = torch.randn(DIM, 6).t()  # not contiguous
    for x in (*(torch.randn(s) for s in ((DIM,), (2, 3, DIM), (4, 0, DIM))), columns):
        out = layer(x)
        torch.testing.assert_close(out, dense(x), rtol=0, atol=1e-6)
        assert torch.equal(out, layer(x))  # the same bits again
    for shape in ((3, 2), ()):
        with pytest.raises(ValueError, match=rf"tokens must have {DIM} features, got tokens \("):
            layer(torch.zeros(shape))
    with pytest.raises(
        TypeError, match=r"tokens must be one of torch\.float64, .*; got torch\.int64"
    ):
        layer(torch.zeros(3, DIM, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(layer)
    with pytest.raises(ValueError, match="each of the 2 experts, got 3 outputs"):
        MixtureOfExperts.from_experts(nn.Linear(DIM, 3), [make_expert(), make_expert()])
    with pytest.raises(ValueError, match="expert 1 shares a parameter"):
        MixtureOfExperts.from_experts(nn.Linear(DIM, 2), [make_expert()] * 2)
    torch.manual_seed(0)
    wide = MixtureOfExperts(DIM, lambda: nn.Linear(DIM, HIDDEN), 3, 1)
    with pytest.raises(ValueError, match=rf"expert {rank} must return .* got \(\d+, {HIDDEN}\)"):
        wide(torch.randn(4, DIM))


@in_ranks(2)
def test_dtypes(rank: int) -> None:
    case = Case(3, 2)
    layer = make_layer(case)
    dense = dense_like(layer, case)
    torch.manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, DIM, dtype=dtype)
        before = sent_bytes()["all_to_all"]
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype == dtype
        assert layer.routing is not None
        sent = sum(layer.routing.tokens_per_expert.tolist()[slice(2, 3) if rank == 0 else slice(2)])
        received = torch.tensor(sent)  # there and back in 16 bits, and counts
        dist.all_reduce(received)
        rows = DIM * 2 * int(received)
        assert sent_bytes()["all_to_all"] - before == rows + 16 + 8 * (3 - len(layer.experts))
        torch.testing.assert_close(out.float(), dense(x.float()), rtol=0, atol=0.004)
        out.float().sum().backward()
    half = layer.bfloat16()
    assert half(torch.randn(5, DIM).bfloat16()).dtype == torch.bfloat16
    layer.float()
    with pytest.raises(ValueError, match=r"tokens of one dtype, got by rank \['torch.fl"):
        layer(torch.randn(5, DIM, dtype=torch.float32 if rank == 0 else torch.float64))
    assert layer(torch.randn(5, DIM)).isfinite().all()  # the group is whole


@in_ranks(4)
def test_who_needs_gradients(rank: int) -> None:
    """A rank without experts answers in the backward pass, whatever requires grad there."""
    layer = make_layer(Case(2, 1))  # none on ranks 2 and 3
    x = torch.randn(4, DIM)
    layer(x).sum().backward()
    layer.zero_grad()
    layer.router.requires_grad_(False)
    out = layer(x)  # experts alone are trained, and rank 3 has none
    assert out.requires_grad
    out.sum().backward()
    for module in layer.experts.values():
        assert all(param.grad is not None for param in module.parameters())
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    mine = x.clone().requires_grad_(rank == 1)  # of one rank alone
    out = layer(mine)
    out.sum().backward()
    assert (mine.grad is not None) == (rank == 1)
    with torch.no_grad():
        assert not layer(x).requires_grad
    layer.requires_grad_(True)
    words = "rank 1 is in no_grad mode, but rank 0 needs it"
    with torch.set_grad_enabled(rank != 1), pytest.raises(ValueError, match=words):
        layer(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@in_ranks(2)
def test_recomputation(rank: int, use_reentrant: bool) -> None:
    """The same bits; experts drop the same features, routers choose the same experts again."""
    grads: list[Any] = []
    bytes_sent = []
    for is_recomputed in (False, True):
        torch.manual_seed(7)
        layer = MixtureOfExperts(
            DIM, lambda: nn.Sequential(make_expert(), nn.Dropout(0.5)), 2, 2, capacity_factor=0.8
        )
        torch.manual_seed(rank)
        x = torch.randn(9, DIM, requires_grad=True)
        before = sent_bytes()["all_to_all"]
        out = checkpoint(layer, x, use_reentrant=use_reentrant) if is_recomputed else layer(x)
        loss = out.square().sum()
        if not use_reentrant:  # where the router's losses have no gradient
            assert layer.routing is not None
            loss = loss + layer.routing.load_balancing_loss
        middle = sent_bytes()["all_to_all"]
        loss.backward()
        bytes_sent.append((middle - before, sent_bytes()["all_to_all"] - middle))
        grads.append([x.grad, *(param.grad for param in layer.parameters())])
    assert all_equal(*grads)
    (forward, backward), recomputed = bytes_sent
    assert recomputed == (forward, backward + forward)


@in_ranks(2)
def test_agreement(rank: int) -> None:
    """Ranks that were seeded differently, or asked for different layers; nobody waits."""
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="disagree on the sum of the router's values, which seeds"):
        MixtureOfExperts(DIM, make_expert, 4)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"number of experts: rank 0 has 4, rank 1 has 5"):
        MixtureOfExperts(DIM, make_expert, 4 + rank)
    with pytest.raises(ValueError, match=r"arguments of the router: rank 0 has .*top_k=1"):
        MixtureOfExperts(DIM, make_expert, 4, 1 + rank)
    groups = [dist.new_group([r]) for r in range(2)]
    torch.manual_seed(0)
    experts = [make_expert() for _ in range(2)]
    experts[rank].get_parameter("0.bias").data.fill_(rank + 1.0)
    with pytest.raises(ValueError, match="disagree on the sum of the experts' values, which seeds"):
        MixtureOfExperts.from_experts(
            *(nn.Linear(DIM, 2), experts), group=groups[rank], replica_group=dist.group.WORLD
        )
    layer = MixtureOfExperts(DIM, make_expert, 4, device="meta")
    assert layer.router.weight.is_meta
    gate = nn.Linear(DIM, 2)
    gate.weight.requires_grad_(False)
    layer = MixtureOfExperts.from_experts(gate, experts := [make_expert(), make_expert()], 1)
    assert [*layer.experts.values()] == [experts[rank]]  # as they are
    x = torch.randn(5, DIM)
    torch.testing.assert_close(layer.router(x).logits, gate(x))
    assert [param.requires_grad for param in layer.router.parameters()] == [False, True]


# ---- the router


def test_equal_probabilities_take_the_smaller_numbers() -> None:
    router = TopKRouter(DIM, 6, 2, capacity_factor=1.0)
    nn.init.zeros_(router.weight)
    routing = router(torch.randn(9, DIM))
    assert routing.experts.tolist() == [[0, 1]] * 9
    assert routing.is_kept.tolist() == [[True, True]] * 3 + [[False, False]] * 6  # by position
    assert "top_k=2, capacity_factor=1.0" in repr(router)
    assert routing.tokens_per_expert.tolist() == [3, 3, 0, 0, 0, 0]
    assert float(routing.load_balancing_loss.detach()) == pytest.approx(1)
    assert float(routing.router_z_loss.detach()) == pytest.approx(torch.tensor(6.0).log() ** 2)


def test_arguments_of_the_router() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 5}, "top_k must be at least 1 and at most num_experts=4, got 5"),
        ({"num_experts": 0}, "num_experts must be 1 or more, got 0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive and finite.*got 0.0"),
        ({"capacity_factor": float("nan")}, "capacity_factor .*got nan"),
        ({"top_k": 1, "normalize_weights": True}, "the router would learn nothing"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ValueError, match=words):
            TopKRouter(**{"in_features": DIM, "num_experts": 4, **arguments})


def test_the_router_is_in_float32() -> None:
    torch.manual_seed(0)
    router = TopKRouter(DIM, 4).bfloat16()
    x = torch.randn(7, DIM).bfloat16()
    logits = x.float() @ router.weight.float().t()
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert torch.equal(routing.logits, logits)
    assert router.double()(x.double()).weights.dtype == torch.float64
