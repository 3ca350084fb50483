"""LOMO on ranks that use different weights, that raise, and jobs that would drift apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradient_watch import GradientWatch
from lomo_models import (
    VOCAB,
    Net,
    batches,
    fail_last,
    make,
    train,
    weights,
)
from ranks import in_ranks
from rows import Row, Training, check, sgd
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from zero_models import Towers, assert_alike

from ringcomm import MismatchError
from ringcomm.optim import Lomo
from ringcomm.parallel import offload, zero

LR = 0.1


class _NoGradient(torch.autograd.Function):
    """Takes a weight, and gives it no gradient after all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, has_grad: bool) -> Tensor:
        ctx.shape = weight.shape if has_grad else None
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, None if ctx.shape is None else torch.ones(ctx.shape), None


@in_ranks(2)
def test_a_function_that_keeps_a_gradient_back(rank: int) -> None:
    """The end of the backward pass reduces what was expected and did not come."""
    model = make("plain")
    model.extra = nn.Parameter(torch.zeros(3))
    _kept = Lomo(model, LR, group=dist.group.WORLD)
    ids = batches(1, rows=2)[0][rank : rank + 1]
    _NoGradient.apply(model(ids), model.extra, rank == 0).backward()
    assert [int(flag) for flag in _gathered(rank)] == [0, 1]
    assert torch.equal(model.extra.detach(), torch.full([3], -LR / 2))


def _gathered(value: int) -> list[Tensor]:
    """A collective of the user's between backward() and step()."""
    found = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.full([1], float(value)))
    return found


@in_ranks(2)
def test_one_gradient_at_a_time_is_alive(rank: int) -> None:
    """In the first pass, too; a layer's bias may wait for its weight."""
    model = make("plain")
    peaks = []
    opt = None
    for ids in batches(3, rows=2):
        watch = GradientWatch(model)
        watch.optimizer = opt = opt or Lomo(model, LR, group=dist.group.WORLD)
        model(ids[rank : rank + 1]).backward()
        opt.step()
        peaks.append(watch.stop())
    assert max(peaks) <= max(param.nbytes for param in Net().parameters()) + 256, peaks


# ---- a backward pass that raises: on all ranks, in test_lomo_refusals.py


@in_ranks(2)
def test_a_backward_pass_that_raises_under_fully_shard(rank: int) -> None:
    """fully_shard keeps gradients of that pass, as torch's: nothing continues."""
    cases: tuple[dict[str, Any], ...] = ({}, {"clip_grad_norm": 100.0, "clip_mode": "two_pass"})
    for options in cases:
        model = make("plain")
        fully_shard(model)
        opt: Any = Lomo(model, LR, **options)
        mine = [batches(1, rows=2)[0][rank : rank + 1]]
        train(opt, model, mine)
        fail_last(model, opt, mine)
        for call in (opt.zero_grad, opt.step, opt.zero_grad):
            with pytest.raises(RuntimeError, match=r"raised an error under fully_shard"):
                call()


@in_ranks(2, fresh=True)
def test_a_backward_pass_that_raises_on_one_rank(rank: int) -> None:
    """The next call of that rank is not the one that the others wait in."""
    model = make("plain")
    opt = Lomo(model, LR, group=dist.group.WORLD)
    mine = [batches(1, rows=2)[0][rank : rank + 1]]
    train(opt, model, mine)
    if rank == 1:
        fail_last(model, opt, mine)
        opt.zero_grad()
    with pytest.raises(MismatchError):
        train(opt, model, mine)


@pytest.mark.parametrize("waits_in", ["backward", "closure", "both closures", "step"])
@in_ranks(2, fresh=True)
def test_a_step_that_raises_on_one_rank(rank: int, waits_in: str) -> None:
    """The others wait for that step, in their backward pass or in step(), and raise too."""
    model = make("plain")
    opt: Any = Lomo(model, LR, group=dist.group.WORLD)
    mine = [batches(1, rows=2)[0][rank : rank + 1]]
    train(opt, model, mine)
    if rank == 0:
        if waits_in == "step":
            opt.backward(model(mine[0]))
        waits = opt.step if waits_in == "step" else partial(opt.backward, model(mine[0]))
        if waits_in == "both closures":  # which raises inside of its own step, too
            waits = partial(opt.step, waits)
        with pytest.raises(RuntimeError, match=r"step\(\) has raised on another rank of the group"):
            waits()
    elif "closure" in waits_in:
        with pytest.raises(ZeroDivisionError):
            opt.step(lambda: 1 / 0)
    elif waits_in == "backward":  # for this rank, which makes none
        opt.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match="the lr of"):
            opt.step()
    else:
        opt.backward(model(mine[0]))
        model.head.weight.grad = None
        with pytest.raises(RuntimeError, match=r"head\.weight\.grad was replaced"):
            opt.step()
    opt.zero_grad()
    opt.param_groups[0]["lr"] = LR
    train(opt, model, mine)  # nothing of it is left
    assert_alike(weights(model))


# ---- replicas that would drift


@in_ranks(2)
def test_without_group_in_a_job_of_several_ranks(rank: int) -> None:
    model = make("plain")
    before = weights(model)
    with pytest.raises(ValueError, match=r"would diverge: pass group=dist\.group\.WORLD"):
        Lomo(model, LR)
    with pytest.raises(ValueError, match="give the model, or model= beside"):
        Lomo(model.parameters(), LR, group=dist.group.WORLD)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    opt = Lomo(model, LR, group="none")
    model(batches(1)[0]).backward()
    opt.step()
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())
    opt.close()


@in_ranks(2, backend=None, fresh=True)
def test_a_group_made_after_the_optimizer(rank: int, tmp_path: Path) -> None:
    model = make("plain")
    before = weights(model)
    opt = Lomo(model, LR)  # there is no job yet
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
    with pytest.raises(ValueError, match=r"pass group=dist\.group\.WORLD"):
        model(batches(1)[0]).backward()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    opt.close()


@in_ranks(2)
def test_ddp_made_after_the_optimizer(rank: int) -> None:
    """A part of the model; test_pairs.py wraps the whole."""
    model: Any = make("plain")
    before = weights(model)
    opt = Lomo(model, LR, group=dist.group.WORLD)
    model.up = DistributedDataParallel(model.up)
    with pytest.raises(ValueError, match=r"would reduce the gradient of|was re"):
        model(batches(1)[0]).backward()
    params = [p.detach() for p in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(params, before.values(), strict=True))
    opt.close()


@in_ranks(2)
def test_ddp_over_other_weights(rank: int) -> None:
    """A model that DDP trains in part, and Lomo the rest of."""
    model: Any = Towers()
    own = {n: p for n, p in model.named_parameters() if n.startswith("towers")}
    opt = Lomo(own.values(), LR, model=model, group=dist.group.WORLD)
    set_ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_ignored(model, list(own))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp(torch.full((2, 6), float(rank)), [0, 1]).sum().backward()
    opt.step()
    flat = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "head" in n])
    both = [torch.zeros_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.equal(*both)


@in_ranks(2)
def test_a_sharded_weight_is_not_averaged(rank: int) -> None:
    model = make("plain")
    fully_shard(model)
    with pytest.raises(ValueError, match=r"is sharded, .*: leave group= out"):
        Lomo(model, LR, group=dist.group.WORLD)


def _new_weight(model: Any) -> None:
    model.up.weight = nn.Parameter(torch.zeros_like(model.up.weight))


def _new_layer(model: Any) -> None:
    model.head = nn.Linear(16, VOCAB, bias=False)


def _tied(model: Any) -> None:
    model.head.weight = model.embed.weight


@pytest.mark.parametrize(
    ("change", "is_late"), [(_new_weight, False), (_new_layer, True), (_tied, True)]
)
def test_a_weight_that_was_replaced(change: Any, is_late: bool) -> None:
    """Trained by nobody: said at the next gradient, or by step() without one."""
    model = make("plain")
    opt = Lomo(model, LR)
    ids = batches(1)[0]
    if is_late:
        model(ids).backward()
        opt.step()
    before = weights(model)
    change(model)
    with pytest.raises(ValueError, match=r"(up|head)\.weight was replaced or removed after Lomo"):
        model(ids).backward()
    with pytest.raises(ValueError, match=r"was replaced or removed after Lomo"):
        opt.step()
    assert torch.equal(model.embed.weight, before["embed.weight"])
    opt.close()
    change(model)
    Lomo(model, LR).close()


@in_ranks(2)
def test_a_model_sharded_after_the_optimizer(rank: int) -> None:
    model = Towers()
    opt = Lomo(model, LR, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="already has an optimizer that takes its gradients, Lomo"):
        zero.shard(
            model, offload.Offloaded(torch.optim.SGD(model.parameters())), 3, offload_weights=True
        )
    opt.close()


def different_passes(made: Training) -> None:
    """Over disjoint weights: a rank takes part in the passes that only others make."""
    for step in range(3):
        for number in range(3):
            for rank in made.ranks:
                if number <= (rank + step) % 3:  # one, two or three passes
                    x = torch.eye(3) * (rank + 1)
                    loss = made.model[number](x).square().sum()
                    made.backward_of(loss / len(made.ranks))
        made.step()


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(3))


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1e6}], ids=["immediate", "deferred"])
@in_ranks(3)
def test_different_numbers_of_backward_passes(rank: int, options: dict[str, Any]) -> None:
    row = Row(different_passes, three_layers, sgd, options=options, num_ranks=3)
    check(rank, row, "Lomo")
