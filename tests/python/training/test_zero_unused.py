"""zero.shard() and Lomo: weights that some passes, ranks or all leave out, and passes that fail."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from cases import covering
from full_states import full_state, full_weights
from oracle import all_equal
from ranks import in_ranks
from rows import ZERO, Row, Training, cases_of, check, momentum
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from whole_optimizers import AdaLomoOracle
from zero_models import Towers

import ringcomm
from ringcomm.parallel import get_state_dict, zero
from ringcomm.torch_names import TORCH_VERSION

WIDTH, NUM_TOWERS, STEPS, NUM_PARTS = 6, 4, 4, 3
BUCKET_BYTES = 4 * WIDTH * WIDTH * 2
NEVER = NUM_TOWERS - 1


def used_by(step: int, part: int, rank: int) -> list[int]:
    """Other towers on each rank, in each backward pass; tower 2 on rank 1 alone; sometimes none."""
    found = [i for i in range(2) if (step + 2 * part + 3 * i + rank) % 3]
    if rank == 1 and step % 2 and part == 1:
        found.append(2)
    return found


def is_empty(step: int, part: int, rank: int) -> bool:
    """Passes that reach no weight on a rank: the last one, the first one, all of a step."""
    return (step, part, rank) in {(0, 2, 0), (1, 0, 1)} or (step == 2 and rank == 0)


def rows(step: int, part: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(4, WIDTH, generator=generator)


def make_optimizer(model: Any, kind: str) -> torch.optim.Optimizer:
    """Biases first, without weight decay; they alternate with matrices in the model."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() == 2]},
    ]
    if kind in ("adamw", "amsgrad"):
        return torch.optim.AdamW(groups, 0.01, weight_decay=0.1, amsgrad=kind == "amsgrad")
    return torch.optim.SGD(groups, 0.05, momentum=0.9, dampening=0.5, weight_decay=0.1)


def decayed(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.1)


def adalomo(model: Any) -> torch.optim.Optimizer:
    return AdaLomoOracle(list(model.parameters()))


def backward(model: Any, step: int, part: int, rank: int, reentrant: bool) -> None:
    x = rows(step, part, rank).requires_grad_()
    model(x, used_by(step, part, rank), reentrant).square().sum().backward()


def all_parts(
    made: Training, *, has_empty: bool, reentrant: bool, num_parts: int = NUM_PARTS
) -> dict[str, Any]:
    """The names of the states and their steps, which count where a rank had a gradient."""
    num = len(made.ranks)
    for step in range(STEPS):
        for part in range(num_parts):
            for rank in made.ranks:
                x = rows(step, part, rank).requires_grad_()
                is_left_out = has_empty and is_empty(step, part, rank)
                used = None if is_left_out else used_by(step, part, rank)
                made.backward_of(made.model(x, used, reentrant).square().sum() / num)
        made.step()
    if "Lomo" in made.row.systems[0]:  # which has no states, or those of the library
        return {}
    if made.is_alone:
        states: Any = get_state_dict(made.model, made.optimizer)[1]["state"]
    else:
        states = full_state(made.optimizer)["state"]
    assert f"towers.{NEVER}.weight" in states
    return {name: (sorted(state), float(state.get("step", 0))) for name, state in states.items()}


def failed_half(made: Training) -> None:
    """A backward pass that raises half-way, on all ranks: the half that had come counts."""
    model = made.model
    hook = model.towers[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows(0, 0, 0), [0, 1]).sum().backward()
    hook.remove()
    assert [part.weight.grad is None for part in (model.head, model.stem)] == [False, True]
    for _ in range(2):
        model(rows(0, 1, 0), [0, 1]).sum().backward()
    made.step()


def by_hand(made: Training) -> None:
    """param.grad = None and a gradient by hand count as in torch; model.zero_grad() as well."""
    model = made.model
    model(rows(0, 0, 0), [0]).sum().backward()
    model.zero_grad()
    model(rows(0, 1, 0), [0]).sum().backward()
    model.head.weight.grad = None
    model.stem.weight.grad = None
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    model(rows(0, 2, 0), [1]).sum().backward()
    model.towers[0].bias.grad = None
    made.step()


class Branches(nn.Module):
    """Two layers of one shape, of which a pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, used: int = 2) -> Tensor:
        for layer in list(self.layers)[:used]:
            x = layer(x)
        return x.square().mean()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


X = torch.ones(2, 4)


def unit_in_no_sync(made: Training) -> None:
    """That has never run; the inner no_sync() ends first."""
    with ExitStack() as stack:
        for _ in range(0 if made.is_alone else 2):
            stack.enter_context(made.optimizer.no_sync())
        made.model(X, 1).backward()
    made.model(X, 1).backward()
    made.step()


def set_before_the_pass(made: Training) -> None:
    made.model(X).backward()  # units have run
    made.optimizer.zero_grad()
    last = made.model.layers[1].weight
    last.grad = torch.ones_like(last)
    made.model(X, 1).backward()
    made.step()


def set_to_none(made: Training) -> None:
    made.model(X).backward()
    for param in made.model.parameters():
        param.grad = None
    made.model(X, 1).backward()
    made.step()


def dropped_by_the_model(made: Training) -> None:
    if not made.is_alone:
        with made.optimizer.no_sync():
            made.model(2 * X).backward()
        made.model.zero_grad()
    made.model(X).backward()
    made.step()


# At stages 1 and 2 a rank may leave out all weights in a pass; fully_shard refuses that, and has
# weights that some ranks use in units that all of them run.
AT_STAGE_3: dict[str, Any] = {"units": [], "clip_grad_norm": 0.5}
of_branches = partial(Row, model=Branches, optimizer=decaying, systems=("zero 3",), atol=1e-6)
BY_HAND = {
    "a backward pass that failed": Row(
        failed_half, Towers, partial(make_optimizer, kind="sgd"), systems=("zero 2",)
    ),
    "gradients by hand": Row(
        by_hand, Towers, partial(make_optimizer, kind="momentum"), systems=("zero 1", "zero 2")
    ),
    "a unit that has never run in no_sync()": of_branches(unit_in_no_sync),
    "a gradient that was set before the pass": of_branches(set_before_the_pass),
    "gradients that are set to None": of_branches(set_to_none),
    "gradients of no_sync() that the model drops": of_branches(dropped_by_the_model),
}
ROWS = BY_HAND | {
    f"{kind} on {num_ranks} over {backend}, {system}": Row(
        partial(all_parts, has_empty="units" not in options, reentrant=backend == "gloo"),
        partial(Towers, *((1,) if "units" in options else ())),
        partial(make_optimizer, kind=kind),
        systems=(system,),
        options={"bucket_bytes": BUCKET_BYTES, **options},
        num_ranks=num_ranks,
        backend=backend,
        atol=2e-5,
    )
    for num_ranks, backend, system, kind, options in (
        (3, "ringcomm", "zero 2", "adamw", {"clip_grad_norm": 0.5}),
        (2, "gloo", "zero 1", "momentum", {"clip_grad_norm": 0.5}),
        (2, "ringcomm", "zero 2", "amsgrad", {}),
        (2, "ringcomm", "zero 1, host", "adamw", {}),
        (2, "ringcomm", "zero 3", "momentum", AT_STAGE_3),
    )
}
TWO_PASSES: dict[str, Any] = {"clip_grad_norm": 0.5, "clip_mode": "two_pass"}
OF_LOMO: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("Lomo", False, {}),
    ("Lomo", True, {}),
    ("Lomo", False, {"overlap": True, "accumulation_steps": 3}),
    ("Lomo", False, {"clip_grad_norm": 0.5, "accumulation_steps": 2}),
    ("Lomo", False, TWO_PASSES),
    ("Lomo", False, {"loss_scale": "dynamic"}),
    ("AdaLomo", False, {}),
)
ROWS |= {
    f"{system} {'reentrant ' if reentrant else ''}{options}": Row(
        partial(
            all_parts,
            has_empty=True,
            reentrant=reentrant,
            num_parts=options.get("accumulation_steps", 1),
        ),
        Towers,
        decayed if system == "Lomo" else adalomo,
        systems=(system,),
        options=options,
        num_ranks=3,
        atol=2e-5,
    )
    for system, reentrant, options in OF_LOMO
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    """Accumulated, with momentum and weight decay, whatever each rank leaves out."""
    check(rank, ROWS[name], system)


@in_ranks(2)
def test_a_backward_pass_reduces_each_bucket_once(rank: int) -> None:
    """Every backward pass makes as many reductions as there are buckets."""
    model = Towers()
    sharded: Any = zero.shard(model, make_optimizer(model, "sgd"), 2, bucket_bytes=BUCKET_BYTES)

    def num_reductions() -> int:
        stats = ringcomm.stats().items()
        return sum(entry["num_calls"] for key, entry in stats if key[0] == "reduce_scatter")

    for part in range(4):
        before = num_reductions()
        backward(model, 1, part, rank, part > 1)
        assert num_reductions() - before == len(sharded._buckets)
    # The same graph twice, and a part of the weights.
    loss = model(rows(0, 0, rank), [0, 1]).sum()
    for inputs in (None, [model.stem.weight]):
        before = num_reductions()
        loss.backward(retain_graph=True, inputs=inputs)
        assert num_reductions() - before == len(sharded._buckets)
    before = num_reductions()
    torch.autograd.grad(loss, [model.stem.weight])
    assert num_reductions() == before


class Failing(torch.autograd.Function):
    """Raises in the forward or the backward pass of a step."""

    fails_in = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if Failing.fails_in == "forward":
            raise ArithmeticError
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Failing.fails_in == "backward":
            raise ArithmeticError
        return grad


def drop_a_batch(where: str, made: Training) -> None:
    made.model.get_submodule(where).register_forward_hook(lambda _, __, out: Failing.apply(out))
    before = full_weights(made.model)
    Failing.fails_in = "backward"
    with pytest.raises(ArithmeticError):
        made.backward(7)
    Failing.fails_in = ""
    if made.system == "zero 3":
        with pytest.raises(RuntimeError, match="a backward pass raised an error at stage 3"):
            made.step()
    made.optimizer.zero_grad()
    torch.testing.assert_close(full_weights(made.model), before, rtol=0, atol=0)
    made.train(range(5))
    made.backward(5)
    Failing.fails_in = "forward"  # of a micro-batch, which is left out
    with pytest.raises(ArithmeticError):
        made.model(made.rows(7, made.ranks[0])[0])
    Failing.fails_in = ""
    made.step()


# fully_shard continues after an error from torch 2.13 on.
CONTINUE = [system for system in ZERO if system != "zero 3" or TORCH_VERSION >= (2, 13)]


@pytest.mark.parametrize(("system", "where"), covering(CONTINUE, ["first", "last", "blocks.1"]))
@in_ranks(2)
def test_an_exception_in_a_pass(rank: int, system: str, where: str) -> None:
    """All ranks drop the batch and continue.

    https://github.com/pytorch/torchtitan/issues/1329: batches that do not fit are skipped.
    https://github.com/pytorch/torchtitan/pull/3724: units stay as they were in the error.
    """
    check(rank, Row(partial(drop_a_batch, where), optimizer=momentum), system)


# ---- stage 3: what fully_shard would do otherwise


@in_ranks(2)
def test_units_in_another_order_on_each_rank(rank: int) -> None:
    """A set of modules has the order of their addresses."""
    model: Any = Branches()
    before = [layer.weight.detach().clone() for layer in model.layers]
    given = [*model.layers] if rank == 0 else [*model.layers][::-1]
    zero.shard(model, torch.optim.SGD(model.parameters()), 3, units=given)
    for number, value in enumerate(before):
        assert torch.equal(full_weights(model)[f"layers.{number}.weight"], value)


@pytest.mark.parametrize("is_outer_first", [False, True])
@in_ranks(2)
def test_units_inside_of_units(rank: int, is_outer_first: bool) -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    given = [model[0][0], model[0]]
    zero.shard(
        model, torch.optim.SGD(model.parameters()), 3, units=given[:: -1 if is_outer_first else 1]
    )
    units = {name for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    assert units == {"", "0", "0.0"}


@in_ranks(2)
def test_layers_of_a_part_of_a_model_that_is_not_called(rank: int) -> None:
    model: Any = nn.ModuleDict({"body": Branches()})
    zero.shard(model, torch.optim.SGD(model.parameters()), 3)
    units = {name for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    assert units == {f"body.layers.{number}" for number in range(len(model["body"].layers))}


@in_ranks(2)
def test_no_pass_reaches_the_outputs_after_zero_grad(rank: int) -> None:
    model = Branches()
    optimizer = zero.shard(model, decaying(model), 3)
    loss = model(X).sum()
    optimizer.zero_grad()
    loss.backward(inputs=[*model.parameters()])
    with pytest.raises(RuntimeError, match="inputs=weights"):
        optimizer.step()


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="from torch 2.13 on")
@in_ranks(2)
def test_a_pass_fails_before_another_root_has_run(rank: int) -> None:
    model: Any = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3)

    def fail(_: Tensor) -> None:
        raise ValueError("in the pass")

    for is_failing in (True, False):
        loss = model["first"](torch.ones(2, 4)).square()
        if is_failing:
            loss.register_hook(fail)
            with pytest.raises(ValueError, match="in the pass"):
                loss.mean().backward()
            optimizer.zero_grad()
    loss.mean().backward()
    before = full_weights(model)["first.weight"].clone()
    optimizer.step()
    assert not torch.equal(full_weights(model)["first.weight"], before)


class Raises(nn.Linear):
    """Its backward pass raises while `is_on`."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if x.requires_grad else x.clone().requires_grad_()
        x.register_hook(self.look)
        return super().forward(x)

    def look(self, _: Tensor) -> None:
        if self.is_on:
            raise MemoryError


def of_layers(kind: Any = momentum) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Raises(6, 6) for _ in range(4)))
    return model, kind(model)


def loss_of_layers(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def fail(model: Any, place: int, step: int, rank: int) -> None:
    """A backward pass that raises where the layer `place` has its gradient."""
    model[place].is_on = True
    with pytest.raises(MemoryError):
        loss_of_layers(model, step, rank).backward()
    model[place].is_on = False


@pytest.mark.parametrize("places", [(1, 3), (3, 0), (2, 2)])
@in_ranks(2)
def test_ranks_that_fail_at_other_places_and_drop(rank: int, places: tuple[int, int]) -> None:
    """https://github.com/pytorch/pytorch/issues/44353, where a batch is too large and left out."""
    (model, own), (alone, plain) = of_layers(), of_layers()
    optimizer = zero.shard(model, own, 2, bucket_bytes=200)
    for step in range(3):
        if step:
            fail(model, places[rank], 7 + step, rank)
            optimizer.zero_grad()
        loss_of_layers(model, step, rank).backward()
        optimizer.step()
        for part in range(2):
            (loss_of_layers(alone, step, part) / 2).backward()
        plain.step()
        plain.zero_grad()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_last", [False, True])
@in_ranks(2)
def test_a_rank_that_drops_what_others_count_is_refused(rank: int, is_last: bool) -> None:
    """On all ranks, and nothing is written; when all have dropped, training goes on."""
    model, own = of_layers()
    optimizer = zero.shard(model, own, 2, bucket_bytes=200)
    before = [param.detach().clone() for param in model.parameters()]
    if rank == 0:
        fail(model, 2, 0, rank)
        optimizer.zero_grad()
    else:
        loss_of_layers(model, 0, rank).backward()
    go_on = optimizer.step if is_last else lambda: loss_of_layers(model, 1, rank).backward()
    with pytest.raises(RuntimeError, match="dropped gradients on some ranks"):
        go_on()
    assert all_equal([*model.parameters()], before)
    optimizer.zero_grad()
    loss_of_layers(model, 2, rank).backward()
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param, old)
