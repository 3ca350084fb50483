"""LOMO and AdaLomo of models with sharded experts: the steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from moe_models import STEPS, Case, Net, batch, dense_net, expert_net, loss_of
from moe_models import groups_with_replicas as groups_of
from ranks import in_ranks
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from whole_optimizers import AdaLomoOracle
from zero_models import assert_alike, assert_close, weights

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import expert, get_state_dict, set_state_dict

LR, DECAY, MAX_NORM = 0.2, 0.01, 0.05
DECAYS = {"weight_decay": DECAY}
KINDS: dict[str, Any] = {"lomo": (Lomo, LR), "adalomo": (AdaLomo, 0.05)}
CLIP: dict[str, Any] = {"clip_grad_norm": MAX_NORM}
TWO = {"clip_mode": "two_pass", **CLIP}
TWICE: dict[str, Any] = {"accumulation_steps": 2}
FIXED, DYNAMIC = {"loss_scale": 64.0, **CLIP}, {"loss_scale": "dynamic", **CLIP}
# Ranks, replicas, layer, tokens of each rank, optimizer, options.
Row = tuple[int, int, Case, list[int], str, dict[str, Any]]
ROWS: dict[str, Row] = {
    "plain": (2, 1, Case(4, 2), [4, 3], "lomo", {}),
    "clipped": (2, 1, Case(3, 2, normalize_weights=True), [4, 3], "lomo", FIXED),
    "replicas": (4, 2, Case(4, 2), [2, 3, 1, 2], "lomo", {}),
    "replicas, clipped": (4, 2, Case(3, 1), [2, 3, 1, 2], "lomo", DYNAMIC),
    "two passes": (4, 2, Case(3, 2), [2, 3, 1, 2], "adalomo", TWO),
    "a rank without experts": (4, 1, Case(3, 2), [2, 3, 1, 2], "lomo", TWICE),
    "experts without tokens": (2, 1, Case(4, 1), [0, 1], "lomo", CLIP),
    "AdaLomo": (2, 1, Case(5, 1), [1, 0], "adalomo", {}),
    "AdaLomo, replicas": (4, 2, Case(4, 2), [2, 3, 1, 2], "adalomo", TWICE | CLIP),
    "values": (2, 1, Case(3, 2), [4, 3], "lomo", {"clip_grad_value": 0.003, "overlap": True}),
}  # fmt: skip


def train(model: Net, opt: Any, steps: range, rank: int, sizes: list[int]) -> float | None:
    num_parts = opt.options.accumulation_steps
    for step in steps:
        for part in range(num_parts):
            opt.backward(loss_of(model, *batch(num_parts * step + part, rank, sizes[rank])))
        apply_steps(opt)
    norm: float | None = opt.grad_norm
    return norm


def train_in_float64(row: Row) -> tuple[dict[str, Tensor], float]:
    """One process that computes every expert for every token, with an optimizer of its own."""
    world_size, _, case, sizes, kind, options = row
    model: Any = dense_net(case).double()
    params = [*model.parameters()]
    opt: Any = AdaLomoOracle(params) if kind == "adalomo" else torch.optim.SGD(params, LR)
    num_parts, norm = options.get("accumulation_steps", 1), 0.0
    for step in range(STEPS):
        for part in range(num_parts):
            for rank in range(world_size):
                x, y = batch(num_parts * step + part, rank, sizes[rank])
                (loss_of(model, x.double(), y.double()) / world_size).backward()
        if "clip_grad_norm" in options:
            norm = float(nn.utils.clip_grad_norm_(params, MAX_NORM))
        if "clip_grad_value" in options:
            nn.utils.clip_grad_value_(params, options["clip_grad_value"])
        if kind == "lomo":
            for param in params:
                param.data.mul_(1 - LR * DECAY)
        apply_steps(opt)
    return {name: value.detach() for name, value in model.state_dict().items()}, norm


@pytest.mark.parametrize(("world_size", "name"), [(row[0], name) for name, row in ROWS.items()])
@in_ranks()
def test_steps_are_those_of_one_process(rank: int, name: str) -> None:
    """Each expert counts once in the norm, also one without tokens.

    The second half goes on from the full state, in a new model and optimizer.
    https://github.com/deepspeedai/DeepSpeed/issues/8475 and issues/5066.
    """
    _, num_replicas, case, sizes, kind, options = ROWS[name]
    groups = groups_of(num_replicas) if num_replicas > 1 else {}
    (make, lr), norm, kept = KINDS[kind], None, None
    for steps in (range(2), range(2, STEPS)):
        model = expert_net(case, **groups)
        opt = make(model, lr, **DECAYS, **options, group=dist.group.WORLD)
        if kept is not None:
            set_state_dict(model, opt, *kept)
        norm = train(model, opt, steps, rank, sizes)
        kept = get_state_dict(model, opt, full=True)
        opt.close()
    assert kept is not None
    expected, wanted = train_in_float64(ROWS[name])
    assert_close({key: value.double() for key, value in kept[0].items()}, expected, 2e-6)
    assert kept[0].keys() == expected.keys()
    assert norm is None or norm == pytest.approx(wanted, rel=1e-5)


@in_ranks(2)
def test_experts_are_updated_in_the_backward_pass(rank: int) -> None:
    """Without replicas; other gradients are kept until step(). Rounding is alike on all ranks."""
    model = expert_net(Case(3, 2)).bfloat16()
    mine = expert.expert_parameters(model)
    others = {name: param for name, param in model.named_parameters() if name not in mine}
    opt = Lomo(model, LR, group=dist.group.WORLD, stochastic_rounding=True)
    for step in range(2):
        before = {name: param.clone() for name, param in model.named_parameters()}
        loss_of(model, *(value.bfloat16() for value in batch(step, rank, 8))).backward()
        assert all(param.equal(before[name]) for name, param in others.items())
        assert not all(param.equal(before[name]) for name, param in mine.items())
        assert opt.held_bytes == sum(param.nbytes for param in others.values())
        opt.step()
        assert not any(param.equal(before[name]) for name, param in others.items())
    assert_alike({name: param.detach() for name, param in others.items()})


@in_ranks(2)
def test_a_loss_that_is_not_finite_raises_on_all_ranks(rank: int) -> None:
    """And writes no weight that is not finite."""
    model = expert_net(Case(4, 2))
    opt = Lomo(model, LR, group=dist.group.WORLD)
    loss = loss_of(model, *batch(0, rank, 4)) * (torch.nan if rank else 1.0)
    loss.backward()
    with pytest.raises(RuntimeError, match="is not finite"):
        opt.step()
    assert all(param.isfinite().all() for param in model.parameters())
    train(model, opt, range(1), rank, [4, 4])
    assert all(param.isfinite().all() for param in model.parameters())


@in_ranks(2)
def test_an_overflow_at_one_expert_skips_the_step(rank: int) -> None:
    model = expert_net(Case(4, 2))
    before = {name: param.clone() for name, param in model.named_parameters()}
    opt = Lomo(model, LR, group=dist.group.WORLD, loss_scale="dynamic")
    for step in range(2):
        if step == 0 and rank == 1:
            model.moe.experts["3"][2].bias.register_hook(lambda grad: grad + torch.inf)
        opt.scale(loss_of(model, *batch(step, rank, 4))).backward()
        opt.step()
        assert all(param.equal(before[name]) for name, param in model.named_parameters())
        if step == 0:
            assert opt.loss_scale == 2**15


@pytest.mark.parametrize("options", [{}, CLIP], ids=["immediate", "deferred"])
@in_ranks(4)
def test_ranks_use_different_layers(rank: int, options: dict[str, Any]) -> None:
    """Rank 1 does not use the last layer: in no pass may a rank wait for it before the tokens."""

    def loss_on(model: Any, step: int, rank: int) -> Tensor:
        x, y = batch(step, rank, 3)
        hidden = model.moe(model.first(x))
        return (hidden if rank == 1 else model.last(hidden) - y).square().mean()

    model, alone = expert_net(Case(4, 2), **groups_of(2)), dense_net(Case(4, 2))
    opt = Lomo(model, LR, group=dist.group.WORLD, **options)
    sgd = torch.optim.SGD(alone.parameters(), LR)
    for step in range(3):
        opt.backward(loss_on(model, step, rank))
        for other in range(4):
            (loss_on(alone, step, other) / 4).backward()
        if options:
            nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        apply_steps(opt, sgd)
    assert_close(full_weights(model), weights(alone), 2e-6)


@in_ranks(4)
def test_what_is_refused(rank: int) -> None:
    words = "models with sharded experts over data-parallel ranks only: pass their group="
    none: tuple[Any, ...] = ({}, {"group": "none"})
    for options in none:
        with pytest.raises(ValueError, match=words):
            Lomo(expert_net(Case(3, 2)), LR, **options)
    model = expert_net(Case(3, 2))  # a rank has no experts, and raises too
    fully_shard(model, ignored_params={*expert.expert_parameters(model).values()})
    with pytest.raises(ValueError, match=words):
        AdaLomo(model, LR)
    groups = groups_of(2)
    forgotten = expert_net(Case(3, 2), group=groups["group"])
    with pytest.raises(ValueError, match=r"Lomo is given 4 data-parallel ranks, but moe\.experts"):
        Lomo(forgotten, LR, group=dist.group.WORLD)
