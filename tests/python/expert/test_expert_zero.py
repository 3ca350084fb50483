"""zero.shard() of models with sharded experts: bytes, memory, files, the meta device, and errors.

test_expert_training.py has the steps of one process.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import covering
from full_states import full_weights
from gradient_watch import gradients_of, states_of
from moe_models import IN, Case, batch, dense_net, expert_net, groups_of, loss_of
from oracle import all_equal
from ranks import in_ranks
from rows import PLACES, Row, Training, adamw, check, muon, offloaded, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import live_bytes, same, sent_bytes

from ringcomm.nn import ColumnParallelLinear, MixtureOfExperts
from ringcomm.parallel import clip_grad_norm_, expert, zero

KINDS: dict[str, Any] = {"adamw": adamw, "muon": muon}


@pytest.mark.parametrize(
    ("of_kind", "num_shards"),
    covering([*itertools.product(KINDS, (1, 2, 3)), *((kind, 4) for kind in KINDS)], [2, 4]),
)
@in_ranks(4)
def test_bytes_of_a_step(rank: int, of_kind: tuple[str, int], num_shards: int) -> None:
    """Without the tokens; the passes send these and gradients, the step also rows to owners.

    And those of its states in memory. Stage 4 is ZeRO-Infinity.
    """
    kind, stage = of_kind
    is_infinity = stage == 4
    # With rounds of whole weights ranks with fewer experts take part in those of the others.
    net = expert_net(Case(4 if of_kind == ("muon", 4) else 3, 2), **groups_of(num_shards))
    given = KINDS[kind](net)
    arguments: Any = net, offloaded(given) if is_infinity else given, min(stage, 3)
    options: dict[str, Any] = {"clip_grad_norm": 0.1, "offload_weights": is_infinity}
    expected = zero.predict_traffic(*arguments, world_size=4, rank=rank, **options)
    memory = zero.predict_memory(*arguments, world_size=4, rank=rank, **options)
    optimizer = zero.shard(*arguments, **options)
    for _ in range(2):
        before = sent_bytes()
        loss_of(net, *batch(0, rank, 2)).backward()
        passed = sent_bytes()
        tokens = sum(passed[name] - before[name] for name in passed if "all_to_all" in name)
        optimizer.step()
        found = sent_bytes().total() - before.total() - tokens
        optimizer.zero_grad()
    assert found == expected
    assert live_bytes(states_of(optimizer)) == pytest.approx(memory.states, rel=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(4)
def test_memory_is_what_was_predicted(rank: int, stage: int) -> None:
    torch.manual_seed(0)
    make_expert = lambda: nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))  # noqa: E731
    layer = MixtureOfExperts(64, make_expert, 3, **groups_of(2))
    model: Any = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64))
    arguments = model, torch.optim.AdamW(model.parameters()), stage
    expected = zero.predict_memory(*arguments, world_size=4, rank=rank)
    optimizer = zero.shard(*arguments)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        found = live_bytes(grads if stage == 3 else gradients_of(optimizer))
        optimizer.step()
    assert found == pytest.approx(expected.gradients, rel=0.05)
    assert live_bytes(model.parameters()) == pytest.approx(expected.parameters, rel=0.05)
    assert live_bytes(states_of(optimizer)) == pytest.approx(expected.states, rel=0.05)


@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(4)
def test_norm_beside_tensor_parallelism(rank: int, stage: int) -> None:
    """The ranks of the experts are all data ranks, by the same group: one sum of both."""
    alone = dense_net(Case(4, 2))
    for source in range(2):
        (loss_of(alone, *batch(0, source, 5)) / 2).backward()
    expected = nn.utils.get_total_norm([param.grad for param in alone.parameters()])  # type: ignore[misc]
    groups = groups_of(2)
    data, tensors = groups["group"], groups["replica_group"]
    net: Any = expert_net(Case(4, 2), group=data)
    net.first = ColumnParallelLinear.from_linear(net.first, group=tensors, gather_output=True)
    optimizer = zero.shard(net, sgd(net), stage, group=data, loss_scale=2.0)
    optimizer.scale(loss_of(net, *batch(0, data.rank(), 5))).backward()
    torch.testing.assert_close(optimizer.clip_grad_norm_(torch.inf), expected)


@in_ranks(2)
def test_errors_at_stage_3(rank: int) -> None:
    model: Any = expert_net(Case(2, 2))
    half = {"param_dtype": torch.float16, "reduce_dtype": torch.float16}
    with pytest.raises(ValueError, match=r"a reduce_dtype of torch\.float32 or torch\.bfloat16"):
        zero.shard(model, sgd(model), 3, **half)  # type: ignore[arg-type]
    model.tied = model.moe.experts[f"{rank}"][2]
    for stage in (1, 2, 3):
        with pytest.raises(ValueError, match="is in sharded experts and elsewhere in the model"):
            zero.shard(model, sgd(model), stage)
    del model.tied
    optimizer = zero.shard(model, sgd(model), 3)
    loss_of(model, *batch(0, rank, 2)).backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="gradients are in the optimizer"):
        expert.average_gradients(model)
    with pytest.raises(RuntimeError, match=r"use ringcomm\.parallel\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    after = [param.grad.to_local() for param in model.parameters()]
    assert all_equal(before, after)
    norm = float(optimizer.clip_grad_norm_(torch.inf))
    assert clip_grad_norm_(model, torch.inf) == pytest.approx(norm)


@in_ranks(4)
def test_errors(rank: int) -> None:
    groups = groups_of(2)
    model = expert_net(Case(4, 2), group=groups["group"])  # the user forgot the replicas
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"4 data-parallel ranks, but moe\.experts.* in 1 rep"):
        zero.shard(model, sgd(model), 2)
    known = expert_net(Case(4, 2), **groups)
    _kept = zero.shard(known, sgd(known), 2)
    with pytest.raises(ValueError, match="already has an optimizer that takes its gradients"):
        zero.shard(known, sgd(known), 2)
    loss_of(known, *batch(0, rank, 2)).backward()
    with pytest.raises(RuntimeError, match="gradients are in the optimizer"):
        expert.average_gradients(known)
    assert same(dict(model.named_parameters()), before)


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
@in_ranks(4)
def test_from_the_meta_device(rank: int, stage: int) -> None:
    """No two experts are equal, which they would be if ranks drew the same numbers.

    https://github.com/laekov/fastmoe/pull/4
    """
    found = []
    for num_shards in (2, 4):
        with torch.device("meta"):
            model = expert_net(Case(4, 2), **groups_of(num_shards))
        torch.manual_seed(5)
        given = offloaded(sgd(model)) if stage == 4 else sgd(model)
        optimizer = zero.shard(model, given, min(stage, 3), offload_weights=stage == 4)
        found.append(full_weights(model))
        loss_of(model, *batch(0, rank, 2)).backward()
        optimizer.step()
    experts = [found[0][f"moe.experts.{i}.0.weight"] for i in range(4)]
    assert not any(one.equal(other) for one, other in itertools.combinations(experts, 2))
    assert same(*found)


# ---- weights in files


def wide(num_shards: int, *_: Any) -> Any:
    """Weights of experts that are files, and others that stay in memory."""
    torch.manual_seed(0)
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = {"group": own} if num_shards == 1 else groups_of(num_shards)
    make_expert = lambda: nn.Sequential(nn.Linear(40, 500), nn.Linear(500, 40))  # noqa: E731
    layer = MixtureOfExperts(40, make_expert, 3, **groups)
    model: Any = nn.Sequential(nn.Linear(IN, 40), layer, nn.Linear(40, 3))
    model.forward = partial(checkpoint, model.forward, use_reentrant=False)
    return model


@pytest.mark.parametrize("num_shards", [2, 4])
@in_ranks(4)
def test_in_files(rank: int, num_shards: int) -> None:
    def program(made: Training) -> None:
        """Goes on from a checkpoint, on a rank without experts too."""
        made.train(range(2))
        made.reload(in_parts=True)
        made.train(range(2, 4))
        if not made.is_alone:
            model, options = wide(num_shards), dict[str, Any](world_size=4, rank=rank)
            given = offloaded(sgd(model), **PLACES["file"])
            expected = zero.predict_memory(model, given, 3, offload_weights=True, **options)
            units = made.optimizer._weights.units
            assert expected.parameters == sum(unit.packed_row.numel() for unit in units)

    row = Row(
        program,
        partial(wide, 1),
        on_ranks=partial(wide, num_shards),
        loss=lambda model, x, y: (model(x) - y).square().mean(),
        batch=lambda step, rank, _: batch(step, rank, 4),
        num_ranks=4,
        atol=2e-6,
    )
    check(rank, row, "infinity, file")
