"""What experts on several ranks need: rows there and back, means, norms, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_models import (
    DIM,
    LR,
    STEPS,
    Case,
    Net,
    batch,
    dense_net,
    descend,
    expert_net,
    loss_of,
    make_expert,
    sent_bytes,
    train_alone,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from ringcomm.nn import MixtureOfExperts
from ringcomm.ops import shard_range
from ringcomm.parallel import WeightShards, expert, zero
from ringcomm.parallel.expert import dispatch

# ---- rows there and back


def check_round_trip(rank: int, table: list[list[int]], dtype: torch.dtype, width: int) -> None:
    """table[i][e]: rows of rank i for expert e. Row values say where they come from."""
    world_size, num_experts = len(table), len(table[0])
    group = dist.group.WORLD
    assert group is not None
    num_rows = sum(table[rank])
    rows = torch.arange(num_rows * width).view(num_rows, width).add(1000 * rank).to(dtype)
    rows.requires_grad_()
    counts = torch.tensor(table[rank], dtype=torch.int64)
    start = sent_bytes()
    plan = dispatch.plan_dispatch(counts, rows, group, is_grad_needed=True)
    begin, end = shard_range(num_experts, world_size, rank)
    num_local = end - begin
    assert sent_bytes() - start == 8 * (num_experts - num_local) + 24 * (world_size - 1)
    assert plan.num_rows == num_rows
    start = sent_bytes()
    parts, link = dispatch.dispatch(rows, plan)
    sent = (num_rows - sum(table[rank][begin:end])) * width * dtype.itemsize
    assert sent_bytes() - start == sent
    of_rank = [
        torch.arange(sum(numbers) * width).view(-1, width).add(1000 * source).to(dtype)
        for source, numbers in enumerate(table)
    ]
    for idx, part in enumerate(parts, begin):
        expected = [x.split(table[i])[idx] for i, x in enumerate(of_rank)]
        assert torch.equal(part, torch.cat(expected))
    start = sent_bytes()
    back = dispatch.combine(parts, link, plan)
    others = [i for i in range(world_size) if i != rank]
    answered = sum(sum(table[i][begin:end]) for i in others) * width * dtype.itemsize
    assert sent_bytes() - start == answered
    assert torch.equal(back, rows)
    start = sent_bytes()
    factors = torch.rand(num_rows, width).to(dtype)
    (back * factors).sum().backward()
    assert sent_bytes() - start == sent + answered
    assert rows.grad is not None
    assert torch.equal(rows.grad, factors)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_round_trip(data: st.DataObject) -> None:
    """Any rows for any experts: the identity, forward and backward, and bytes to the byte."""
    world_size = data.draw(st.sampled_from([2, 4]))
    num_experts = data.draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    table = data.draw(st.lists(row, min_size=world_size, max_size=world_size))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    run_ranks(world_size, check_round_trip, table, dtype, data.draw(st.integers(1, 3)))


def check_large(rank: int) -> None:
    """Rows that take several pieces, on one rank none."""
    check_round_trip(rank, [[700, 0], [3, 900]], torch.float32, 512)


def test_large_round_trip() -> None:
    run_ranks(2, check_large)


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_rows_and_sums(data: st.DataObject) -> None:
    """Taking rows and summing them are each other's adjoint, and have their gradients."""
    num_tokens, num_choices = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    places = data.draw(st.sets(st.integers(0, max(num_tokens * num_choices - 1, 0))))
    slots = torch.tensor(data.draw(st.permutations(sorted(places))), dtype=torch.int64)
    if num_tokens == 0:
        slots = slots[:0]
    tokens = torch.randn(num_tokens, 2, dtype=torch.float64, requires_grad=True)
    rows = dispatch.rows_of_tokens(tokens, slots, num_choices)
    assert torch.equal(rows, tokens[slots // num_choices])
    values = torch.randn(len(slots), 2, dtype=torch.float64, requires_grad=True)
    sums = dispatch.sums_of_rows(values, slots, num_tokens, num_choices)
    expected = torch.zeros_like(tokens).index_add(0, slots // num_choices, values)
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close((rows * values).sum(), (sums * tokens).sum())
    if len(slots):
        torch.autograd.gradcheck(
            lambda t, v: (
                dispatch.rows_of_tokens(t, slots, num_choices),
                dispatch.sums_of_rows(v, slots, num_tokens, num_choices),
            ),
            (tokens, values),
        )


# ---- experts on fewer ranks than there are: replicas, and DDP


def groups_of_mesh(num_replicas: int) -> dict[str, Any]:
    """Collective."""
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))
    return {"group": mesh["expert"].get_group(), "replica_group": mesh["replica"].get_group()}


def train_mesh(rank: int, case: Case, sizes: list[int], num_replicas: int, system: str) -> Any:
    net: Any = expert_net(case, **groups_of_mesh(num_replicas))
    model = net
    if system == "ddp":
        expert.ignore_in_ddp(net)
        model = DistributedDataParallel(net)
    if system == "fully_shard":
        fully_shard(net, ignored_params=set(expert.expert_parameters(net).values()))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch(step, rank, sizes[rank]))
        loss.backward()
        expert.average_gradients(model)
        descend(net)
        losses.append(float(loss.detach()))
    return losses, full_weights(net)


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "system"),
    [
        (2, 2, "none"),
        (4, 2, "none"),
        (2, 1, "ddp"),
        (4, 2, "ddp"),
        (4, 2, "fully_shard"),
        (4, 1, "fully_shard"),
    ],
)
def test_replicas_and_systems(num_ranks: int, num_replicas: int, system: str) -> None:
    case, sizes = Case(5, 2), [4, 1, 5, 2][:num_ranks]
    losses, weights = train_alone(case, sizes)
    results = run_ranks(num_ranks, train_mesh, case, sizes, num_replicas, system)
    for rank, (found, whole) in enumerate(results):
        expected = [of_step[rank] for of_step in losses]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=2e-6)
            assert torch.equal(whole[name], results[0][1][name])


def check_means(rank: int) -> None:
    """What is averaged, and its bytes; gradients that some rank has not."""
    net = expert_net(Case(4, 2), **groups_of_mesh(2))
    net.last.bias.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(3))
    net.register_parameter("unused", unused)
    loss_of(net, *batch(0, rank, 4)).backward()
    if rank > 0:
        net.first.bias.grad = None
        grad = None
    else:
        assert net.first.bias.grad is not None
        grad = net.first.bias.grad.clone()
    before = sent_bytes("all_reduce")
    expert.average_gradients(net)
    sent = sent_bytes("all_reduce") - before
    assert unused.grad is None
    assert net.last.bias.grad is None
    assert net.first.bias.grad is not None
    of_first = torch.zeros(DIM) if grad is None else grad / 4
    dist.broadcast(of_first, 0)
    torch.testing.assert_close(net.first.bias.grad, of_first)
    local = expert.expert_parameters(net)
    others = [p for n, p in net.named_parameters() if n not in local and p.requires_grad]
    num_elems = sum(param.numel() for param in others if param is not unused)
    of_experts = sum(param.numel() for param in local.values())
    # One shot: 3 peers get a small buffer whole; in a pair one does.
    assert sent == 3 * (4 * num_elems + len(others)) + 4 * of_experts + len(local)
    with pytest.raises(ValueError, match=r"2 ranks average, and moe.experts has experts over 2"):
        expert.average_gradients(net, net.moe.experts.group)


def check_accumulation(rank: int) -> list[Tensor]:
    """Two micro-batches, averaged once; what would divide experts twice is refused."""
    net = expert_net(Case(3, 2), **groups_of_mesh(2))
    for micro_batch in range(2):
        loss_of(net, *batch(micro_batch, rank, 4)).backward()
    expert.average_gradients(net)
    grads = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    for _ in range(2):  # again at once, and with a micro-batch on top
        with pytest.raises(RuntimeError, match="averaged these gradients before: call it once"):
            expert.average_gradients(net)
        loss_of(net, *batch(2, rank, 4)).backward()
    for set_to_none in (False, True):
        net.zero_grad(set_to_none=set_to_none)
        for micro_batch in range(2):
            loss_of(net, *batch(micro_batch, rank, 4)).backward()
        expert.average_gradients(net)
        again = [param.grad for param in net.parameters() if param.grad is not None]
        torch.testing.assert_close(again, grads)
    return grads[:1]


def test_accumulation() -> None:
    net: Net = dense_net(Case(3, 2))
    for micro_batch in range(2):
        for rank in range(4):
            (loss_of(net, *batch(micro_batch, rank, 4)) / 4).backward()
    for (found,) in run_ranks(4, check_accumulation):
        torch.testing.assert_close(found, net.first.weight.grad, rtol=1e-4, atol=1e-6)


def test_means() -> None:
    run_ranks(4, check_means)


def check_ddp(rank: int) -> None:
    net = expert_net(Case(4, 2))
    ddp = DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match=r"call ringcomm\.parallel\.expert\.ignore_in_ddp"):
        ddp(batch(0, rank, 3)[0])


def test_ddp_without_the_list_is_refused() -> None:
    run_ranks(2, check_ddp)


def check_overflow(rank: int) -> None:
    """An infinite gradient of one rank's expert: no rank takes the step."""
    net = expert_net(Case(2, 1))
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), LR)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for is_finite in (False, True):
        scaler.scale(loss_of(net, *batch(0, rank, 4))).backward()
        expert.average_gradients(net)
        if not is_finite and rank == 1:
            net.moe.experts["1"][0].bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        for name, value in net.state_dict().items():
            if "experts" not in name:
                assert torch.equal(value, before[name]) != is_finite


def test_an_overflow_at_one_expert() -> None:
    run_ranks(2, check_overflow)


def check_refused(rank: int) -> None:
    words = "each rank has experts of its own in moe.experts, and WeightShards would take"
    with pytest.raises(ValueError, match=words):
        WeightShards(expert_net(Case(4, 2)))
    alone = [dist.new_group([r]) for r in range(2)][rank]
    net = expert_net(Case(4, 2), group=alone)  # all experts on every rank
    assert not expert.expert_parameters(net)
    zero.shard(net, torch.optim.SGD(net.parameters(), LR), 1)


def test_systems_of_replicas_are_refused() -> None:
    """zero.shard and Lomo as well: see the tables of pairs."""
    run_ranks(2, check_refused)


def check_buffers(rank: int) -> None:
    """Experts with buffers, of other dtypes, and a model that is itself the layer."""

    def make() -> nn.Module:
        module = make_expert()
        module.register_buffer("steps", torch.tensor(rank))
        return module

    layer = MixtureOfExperts(DIM, make, 3, 1)
    whole = full_weights(layer)
    assert [int(whole[f"experts.{idx}.steps"]) for idx in range(3)] == [0, 0, 1]
    assert set(expert.expert_parameters(layer)) == {
        f"experts.{name}" for name, _ in layer.experts.named_parameters()
    }


def test_buffers() -> None:
    run_ranks(2, check_buffers)


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        MixtureOfExperts(DIM, make_expert, 2)
    assert ringcomm.stats() == {}
