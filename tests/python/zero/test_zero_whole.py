"""zero.shard() with optimizers of whole weights, several of them, schedule-free ones, and frozen
weights in their groups. Classes and states: test_zero_classes.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_state, full_weights, load_full_state
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler
from whole_optimizers import Averaged, Muon64, by_dimensions, whole
from zero_models import (
    STAGES,
    STEPS,
    Net,
    assert_close,
    check_traffic,
    live_bytes,
    same,
    train,
    train_on_halves,
)

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import offload, zero
from ringcomm.parallel.zero.owners import owners_of


def muon_and_adamw(model: nn.Module, kind: Any = Muon64, lr: float = 0.02) -> Any:
    others = functools.partial(torch.optim.AdamW, lr=lr / 2, eps=1e-3)
    return by_dimensions(
        [{"params": [*model.parameters()]}], functools.partial(kind, lr=lr), others
    )


@functools.cache
def alone(num_steps: int = STEPS) -> dict[str, Tensor]:
    model = Net()
    train(model, muon_and_adamw(model), steps=range(num_steps))
    return full_weights(model)


# ---- ranks, meshes, and what a user switches on


@pytest.mark.parametrize(
    ("world_size", "stage", "options"),
    [
        (1, 1, {}),
        (1, 3, {}),
        (2, 1, {"bucket_bytes": 300}),
        (3, 2, {"bucket_bytes": 300, "loss_scale": 1.0}),
        (3, 3, {}),
        (4, 3, {"replicas": True}),
        (6, 2, {}),  # more ranks than matrices
        (6, 3, {"replicas": True}),
    ],
)
@in_ranks()
def test_steps_are_those_of_one_process(
    rank: int, world_size: int, stage: int, options: Any
) -> None:
    model = Net()
    if options.pop("replicas", False):
        names = ("replicas", "shards")
        options["mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    optimizer = zero.shard(model, muon_and_adamw(model), stage, **options)
    train(model, optimizer, rank, world_size, range(2))
    state = full_state(optimizer)
    train(model, optimizer, rank, world_size, range(2, STEPS))
    assert_close(full_weights(model), alone())
    # And from the saved state, which every weight has.
    assert {*state["state"]} == {name for name, _ in model.named_parameters()}
    again = Net()
    again.load_state_dict(alone(2))
    resumed = zero.shard(again, muon_and_adamw(again), stage % 3 + 1)
    load_full_state(resumed, state)
    train(again, resumed, rank, world_size, range(2, STEPS))
    assert_close(full_weights(again), alone())


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_matrices_have_the_bits_of_one_process(rank: int, stage: int) -> None:
    """Iterations in bfloat16, too, because a matrix is on one rank."""
    alone, model = Net(), Net()
    train_on_halves(alone, muon_and_adamw(alone, torch.optim.Muon), STEPS)
    optimizer = zero.shard(model, muon_and_adamw(model, torch.optim.Muon), stage)
    train(model, optimizer, rank, 2)
    expected = {name: x for name, x in full_weights(alone).items() if x.dim() == 2}
    assert same(full_weights(model), expected)


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 2), (3, 3)])
@in_ranks()
def test_bytes_are_the_formulas(rank: int, world_size: int, stage: int, kind: str) -> None:
    model = Net()
    make: Any = (
        muon_and_adamw if kind == "Muon" else lambda m: torch.optim.Adafactor(m.parameters())
    )
    given = make(model)
    memory = zero.predict_memory(model, given, stage, world_size=world_size, rank=rank)
    optimizer = check_traffic(model, given, stage, rank, world_size)
    assert live_bytes(optimizer.state_tensors()) == pytest.approx(memory.states, rel=0.05)
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


@pytest.mark.parametrize(
    ("system", "optimizer_of"),
    [*((str(stage), of) for stage in STAGES for of in ("AdamW", "Muon")), ("infinity", "AdamW")],
)
@in_ranks(2)
def test_weights_are_frozen_and_thawed(rank: int, system: str, optimizer_of: str) -> None:
    """Frozen before zero.shard(), thawed after two steps; another layer frozen after four."""
    models = Net(), Net()
    is_infinity = system == "infinity"
    given = []
    for model in models:
        model.blocks[0].requires_grad_(False)
        if optimizer_of == "Muon":
            given.append(muon_and_adamw(model))
        else:
            adamw: Any = torch.optim.AdamW(model.parameters(), 0.01)
            is_offloaded = is_infinity and model is models[1]
            given.append(offload.Offloaded(adamw) if is_offloaded else adamw)
    plain, mine = models
    options: Any = {"offload_weights": True} if is_infinity else {}
    optimizer = zero.shard(mine, given[1], 3 if is_infinity else int(system), **options)
    for step in range(6):
        for model in models:
            model.blocks[0].requires_grad_(step >= 2)
            model.blocks[1].requires_grad_(step < 4)
        train(plain, given[0], steps=range(step, step + 1))
        train(mine, optimizer, rank, 2, range(step, step + 1))
    # AdamW amplifies what sums of ranks differ by.
    assert_close(full_weights(mine), full_weights(plain), 2e-5)


@whole
class AveragedRows(Averaged):
    """Of whole weights."""

    def _direction(self, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-9)


@pytest.mark.parametrize("kind", [Averaged, AveragedRows])
@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_schedule_free(rank: int, stage: int, kind: Any) -> None:
    plain, mine = Net(), Net()
    given, own = kind(plain.parameters()), kind(mine.parameters())
    own.train()
    optimizer = zero.shard(mine, own, stage, param_dtype=None)
    for step in range(4):
        for each in (given, optimizer):
            each.train()
        train(plain, given, steps=range(step, step + 1))
        train(mine, optimizer, rank, 2, range(step, step + 1))
        trained = full_weights(mine)
        for each in (given, optimizer):
            each.eval()
            each.eval()  # has no effect
        assert_close(full_weights(mine), full_weights(plain))
        assert step == 0 or not same(full_weights(mine), trained)
    with pytest.raises(RuntimeError, match="call train"):
        train(mine, optimizer, rank, 2, range(1))
    with pytest.raises(RuntimeError, match="was given to zero"):
        own.eval()


@in_ranks(2)
def test_masters_stay_in_the_state_of_each_mode(rank: int) -> None:
    model = Net()
    optimizer = zero.shard(model, Averaged(model.parameters()), 1, param_dtype=torch.bfloat16)
    optimizer.train()
    train(model, optimizer, rank, 2, range(1))
    for change in (optimizer.eval, optimizer.train):
        change()
        assert all("master" in state for state in optimizer.state.values() if state)


@in_ranks(2)
def test_schedulers_of_each_and_of_all(rank: int) -> None:
    """Made for the given optimizers, and for the one that zero.shard() returns."""
    models = Net(), Net()
    given = [muon_and_adamw(model) for model in models]
    before: list[Any] = [
        [lr_scheduler.OneCycleLR(muon, 0.05, total_steps=9), lr_scheduler.StepLR(adamw, 2)]
        for muon, adamw in given
    ]
    optimizer = zero.shard(models[1], given[1], 2)
    after: list[Any] = [
        [lr_scheduler.ExponentialLR(each, 0.9) for each in given[0]],
        [lr_scheduler.ExponentialLR(optimizer, 0.9)],
    ]
    for step in range(4):
        train(models[0], given[0], steps=range(step, step + 1))
        train(models[1], optimizer, rank, 2, range(step, step + 1))
        for each in (*before[0], *before[1], *after[0], *after[1]):
            each.step()
    assert_close(full_weights(models[1]), full_weights(models[0]))
    with pytest.raises(ValueError, match="momentum"):  # Muon has no betas, AdamW no momentum
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


@in_ranks(2)
def test_errors(rank: int) -> None:
    model = Net()
    muon, adamw = muon_and_adamw(model)
    others = [p for p in model.parameters() if p.dim() != 2]
    split = nn.Sequential(ColumnParallelLinear(6, 4, bias=False, gather_output=True))
    again = torch.optim.SGD([model.scale])
    cases: list[tuple[nn.Module, Any, dict[str, Any], type[Exception], str]] = [
        (model, [], {}, ValueError, "the optimizer has no parameters"),
        (model, [muon], {}, ValueError, "scale requires grad and is in no param"),
        (model, [muon, adamw, again], {}, ValueError, "two optimizers have scale: leave"),
        (model, [muon, model], {}, TypeError, "expected an optimizer, or a list of them"),
        (model, [muon, adamw], {"elementwise": {torch.optim.Muon}}, ValueError, "names Muon"),
        (split, torch.optim.Muon(split.parameters()), {}, TypeError, "Muon .* 0.weight is split"),
        (split, torch.optim.Adafactor(split.parameters()), {}, TypeError, "Adafactor .* is split"),
    ]  # fmt: skip
    before = full_weights(model)
    for of_model, given, options, kind, text in cases:
        for stage in STAGES:
            with pytest.raises(kind, match=text):
                zero.shard(of_model, given, stage, **options)
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        torch.optim.Muon(others)
    kinds = [muon, adamw] if rank == 0 else [adamw, muon]
    with pytest.raises(ValueError, match="ranks disagree on the optimizer"):
        zero.shard(model, kinds, 2)
    assert same(full_weights(model), before)
    sharded = zero.shard(model, [muon, adamw], 1)
    with pytest.raises(ValueError, match="frozen by requires_grad_"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    dist.barrier()
