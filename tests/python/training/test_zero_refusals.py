"""zero.shard(): what it refuses, and by which words; nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from ranks import in_ranks
from rows import (
    SHARDED,
    STAGES,
    ZERO,
    Blocks,
    Row,
    Training,
    adamw,
    cases_of,
    check,
    momentum,
    squared,
)
from rows import muon as muon_of
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from zero_models import Net, Towers, batch, loss_of, make_optimizer, same, weights

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import offload, zero


@in_ranks(2)
def test_errors(rank: int) -> None:
    model = Net()
    sgd = make_optimizer(model, "sgd")
    lbfgs = torch.optim.LBFGS(model.parameters())
    half, scalar = nn.Linear(3, 3).to(torch.bfloat16), Towers()
    narrow = ColumnParallelLinear(3, 1)  # rank 1 has nothing of it
    empty = nn.ParameterList([torch.ones(3), torch.ones(0, 3)])  # as MobileBERT's
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (model, lbfgs, {"stage": 1}, TypeError, "LBFGS updates several weights together"),
        (model, model, {"stage": 1}, TypeError, "expected an optimizer, or a list"),
        (model, sgd, {"stage": 4}, ValueError, "stage must be 1, 2 or 3, got 4"),
        (sgd, model, {"stage": 1}, TypeError, "expected a model as the first"),
        (DistributedDataParallel(Net()), sgd, {"stage": 1}, ValueError, "pass its `module`"),
        (Net(), sgd, {"stage": 1}, ValueError, "is not in the model"),
        (model, torch.optim.SGD([model.scale]), {"stage": 1}, ValueError, "in no parameter group"),
        (model, sgd, {"stage": 1, "bucket_bytes": 0}, ValueError, "bucket_bytes must be positive"),
        (model, sgd, {"stage": 1, "param_dtype": torch.int8}, ValueError, "param_dtype must be"),
        (model, sgd, {"stage": 1, "reduce_dtype": torch.bfloat16}, ValueError, "reduce_dtype must"),
        (model, sgd, {"stage": 1, "loss_scale": -1.0}, ValueError, "loss_scale must be None"),
        (model, sgd, {"stage": 3, "loss_scale": "auto"}, ValueError, "loss_scale must be None"),
        (model, sgd, {"stage": 1, "clip_grad_norm": 0}, ValueError, "clip_grad_norm must be"),
        (model, sgd, {"stage": 2, "units": []}, ValueError, "for stage 3 only"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 3}, ValueError, "must be float32"),
        (scalar, torch.optim.SGD(scalar.parameters()), {"stage": 3}, ValueError, "is a scalar"),
        (empty, torch.optim.SGD(empty.parameters()), {"stage": 3}, ValueError, "1 is a scalar, or"),
        (narrow, torch.optim.SGD(narrow.parameters()), {"stage": 3}, ValueError, "empty on some"),
        (half, torch.optim.SGD(half.parameters()), {"stage": 1, "param_dtype": torch.bfloat16},
         ValueError, "is torch.bfloat16"),
    ]  # fmt: skip
    for of_model, optimizer, options, kind, text in cases:
        with pytest.raises(kind, match=text):
            zero.shard(of_model, optimizer, **options)
    before = weights(model)
    assert same(weights(Net()), before)
    with pytest.raises(ValueError, match="ranks disagree on the stage: rank 0 has 1, rank 1 has 2"):
        zero.shard(model, sgd, 1 + rank)
    sharded = zero.shard(model, sgd, 1)
    with pytest.raises(ValueError, match="already has an optimizer that takes its"):
        zero.shard(model, sgd, 1)
    with pytest.raises(TypeError, match="neither offloaded nor sharded, got FlatZero"):
        offload.Offloaded(sharded)
    with pytest.raises(ValueError, match="parameter groups of"):
        sharded.load_state_dict(torch.optim.SGD(Net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"before zero.shard\(\)"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state = sharded.state_dict()
    of_others = {"rank 7 of 9": (7, 9), "rank 1 of 2": (1 - rank, 2), "rank 0 of 1": (rank, 1)}
    for text, (number, size) in of_others.items():  # the text is rank 0's
        with pytest.raises(ValueError, match=f"rank 0: the state is from {text}"):
            sharded.load_state_dict({**state, "rank": number, "world_size": size})
    sharded.step()  # without gradients: nothing
    assert same(weights(model), before)
    loss_of(model, *batch(0)).backward()
    model.added = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"added.weight was added or replaced"):
        sharded.step()
    del model.added
    with pytest.raises(RuntimeError, match=r"cast or moved after zero.shard\(\): do it before"):
        model.to(torch.float64)
    sharded.zero_grad()
    model.to(torch.float64)
    with pytest.raises(ValueError, match="was cast or moved after"):
        sharded.step()


@in_ranks(2)
def test_errors_of_several_optimizers(rank: int) -> None:
    model = Net()
    muon, adamw = muon_of(model)
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
        for stage in (1, 2, 3):
            with pytest.raises(kind, match=text):
                zero.shard(of_model, given, stage, **options)
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        torch.optim.Muon(others)
    kinds = [muon, adamw] if rank == 0 else [adamw, muon]
    turn = slice(None, None, 1 if rank == 0 else -1)
    equal = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    a, b, c, d = equal.parameters()
    groups = [{"params": pair} for pair in ([[a, b], [c, d]] if rank else [[a, c], [b, d]])]
    by_rank: list[tuple[Any, Any, str]] = [
        (model, kinds, "ranks disagree on the optimizer"),
        (equal, torch.optim.Muon([a, b, c, d][turn]), r"rank 0 has \('0.weight.* \('3.weight"),
        (equal, torch.optim.SGD(groups, 0.1), "ranks disagree on the parameter groups"),
        (model, [muon, adamw] if rank else model, "rank 0 has TypeError.*, rank 1 has None"),
    ]
    for of_model, given, text in by_rank:
        for stage in (1, 2, 3):
            with pytest.raises(ValueError, match=text):
                zero.shard(of_model, given, stage)
    assert same(full_weights(model), before)
    sharded = zero.shard(model, [muon, adamw], 1)
    with pytest.raises(ValueError, match="frozen by requires_grad_"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    dist.barrier()


# ---- in a program, which then goes on as one process


def by_another_optimizer(made: Training) -> None:
    made.backward(7)
    made.early.step()


def by_options(made: Training) -> None:
    """As of a scheduler that steps on each rank's loss."""
    made.backward(7)
    group = made.optimizer.param_groups[0]
    group["lr"] *= 1 + made.rank
    try:
        made.optimizer.step()
    finally:
        group["lr"] /= 1 + made.rank


def by_ddp(made: Training) -> None:
    """Around a part, whose forward the model's own hook does not see."""
    replica = DistributedDataParallel(made.model.last)
    replica(torch.randn(2, 13)).sum().backward()


def by_its_own_zero_grad(made: Training) -> None:
    made.backward(7)
    made.model.zero_grad(set_to_none=False)


def by_zero_grad_on_one_rank(made: Training) -> None:
    made.backward(7)
    if made.rank == 0:
        made.model.zero_grad()
    made.optimizer.step()


def by_penalty(made: Training) -> None:
    x, y = made.rows(7, made.rank)
    torch.autograd.grad(loss_of(made.model, x.requires_grad_(), y), x, create_graph=True)


def fails_first(call: Callable[[Training], Any], words: str, made: Training) -> None:
    if not made.is_alone:
        with pytest.raises((RuntimeError, ValueError), match=words):
            call(made)
        made.optimizer.zero_grad(set_to_none=False)
        assert made.system in SHARDED or all(p.grad is None for p in made.model.parameters())
    made.train(range(0 if call is by_penalty else 3))


FAILS: dict[str, tuple[Callable[[Training], Any], str, tuple[str, ...]]] = {
    "step of another optimizer": (
        by_another_optimizer,
        r"param\.grad of a weight that zero",
        ("zero 1",),
    ),
    "another lr on each rank": (by_options, r"different options .*\(lr, betas", ZERO),
    "DDP around a part": (by_ddp, r"param\.grad of a weight that zero", ("zero 2",)),
    "zero_grad() of the model": (
        by_its_own_zero_grad,
        r"param\.grad of a weight that zero[^:]*: .*call optimizer\.zero_grad\(\), which drops",
        STAGES[:2],
    ),
    "zero_grad() of the model on one rank": (
        by_zero_grad_on_one_rank,
        "dropped gradients on some ranks",
        ("zero 2",),
    ),
    "gradient penalty": (by_penalty, r"use stage 1 or 2 of zero\.shard", SHARDED),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(10, 3))


MOVES: tuple[Callable[[Any], Any], ...] = (
    lambda m: m.to("cpu"),
    lambda m: m.to(torch.float32),
    lambda m: m.to(torch.ones(1)),
    lambda m: m.to(memory_format=torch.contiguous_format),
    lambda m: m.cpu(),
    lambda m: m.float(),
    lambda m: m[0].type(torch.float32) and m,
    lambda m: m.requires_grad_(),
    lambda m: m[0].float() and m,
)
CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.double(),
    lambda m: m.type(torch.float64),
    lambda m: m.to("meta"),
    lambda m: m[3].to(torch.float16),
    lambda m: m.to_empty(device="cpu"),
    lambda m: m.share_memory(),
    lambda m: m[0].half(),
)


def moved(made: Training) -> None:
    """What changes nothing does nothing."""
    for move in MOVES:
        assert move(made.model) is made.model
    for change in () if made.is_alone else CHANGES:
        with pytest.raises(RuntimeError, match=r"cannot move or cast.*before zero\.shard"):
            change(made.model)
        assert not any(x.is_shared() for x in made.model.buffers())
    made.train(range(3))


class Encodes(Net):
    """With a method beside forward, which uses weights of the model itself."""

    def encode(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).square()


def encode(made: Training) -> Tensor:
    made.train([0])
    x = batch(5)[0]
    if not made.is_alone:
        with pytest.raises(RuntimeError, match=r"are sharded .*register_fsdp_forward_meth"):
            made.model.encode(x)
        register_fsdp_forward_method(made.model, "encode")
    return torch.cat([made.model.encode(x), made.model(x)]).detach()


# ---- and goes no further


class Twice(Net):
    """Whose first block runs in two segments."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.clone().requires_grad_()))
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        out: Tensor = self.last(x) * self.scale
        return out


def set_vector(made: Training) -> None:
    """Weights are written as one vector."""
    made.backward(0)
    params = [*made.model.parameters()]
    vector_to_parameters(parameters_to_vector(params), params)
    made.step()


def set_data(made: Training) -> None:
    made.backward(0)
    made.model.first.weight.data = made.model.first.weight.data * 0.5
    made.step()


def own_weights() -> nn.Module:
    own = nn.ParameterList([nn.Parameter(torch.ones(1))])
    return nn.ModuleDict({"a": nn.Linear(7, 3), "own": own})


def tied_parts() -> nn.Module:
    tied = nn.Linear(7, 7)
    return nn.ModuleList([nn.Sequential(tied), nn.Sequential(tied), nn.Linear(7, 3)])


refused_at = partial(Row, systems=SHARDED)
NOT_CALLED = dict.fromkeys(SHARDED, r"can be called, got Module.*: pass the parts")
ROWS = {
    **{
        name: Row(
            partial(fails_first, call, words),
            optimizer=momentum,
            systems=systems,
            early=lambda given: torch.optim.SGD(given.param_groups[0]["params"], 0.1),
        )
        for name, (call, words, systems) in FAILS.items()
    },
    # https://github.com/Lightning-AI/pytorch-lightning/issues/15822,
    # https://github.com/Lightning-AI/pytorch-lightning/issues/19152,
    # https://github.com/modelscope/ms-swift/issues/7871: a framework moves a sharded model.
    "moves": Row(moved, small, loss=lambda m, x, y: loss_of(m, x[:, None], y), systems=SHARDED),
    # https://github.com/haotian-liu/LLaVA/issues/799
    "methods beside forward": Row(encode, Encodes, systems=("zero 3",)),
    # https://github.com/deepspeedai/DeepSpeed/issues/2103
    "a layer in two reentrant segments": Row(
        model=Twice,
        systems=("zero 3",),
        refused={"zero 3": r"blocks\.0\.\w+ .*reentrant.*use_reentrant=Fal"},
    ),
    # https://github.com/facebookresearch/fairscale/issues/430 and
    # https://github.com/facebookresearch/fairscale/issues/492
    "weights that are set as one vector": Row(
        set_vector, systems=STAGES[:2], refused=dict.fromkeys(STAGES, "`.data` of .* was set after")
    ),
    "weights that are set": Row(
        set_data, systems=STAGES, refused=dict.fromkeys(STAGES, r"`.data` of first\.weight was set")
    ),
    "container with weights of its own": refused_at(model=own_weights, refused=NOT_CALLED),
    "container whose parts are tied": refused_at(model=tied_parts, refused=NOT_CALLED),
    "container as a unit": refused_at(
        model=lambda: nn.Sequential(nn.ModuleList([nn.Linear(7, 3)]), nn.Linear(3, 3)),
        refused=NOT_CALLED,
        options=lambda made: {"units": [made.model[0]]},
    ),
    "list as a unit": refused_at(
        refused=dict.fromkeys(SHARDED, "units must be modules, got list"), options={"units": [[]]}
    ),
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    check(rank, ROWS[name], system)


@pytest.mark.parametrize("system", ZERO)
@in_ranks(2)
def test_the_given_optimizer_raises(rank: int, system: str) -> None:
    """Before it writes; weight decay needs no gradient's values."""
    called: list[Any] = []

    def given_to(model: Any) -> Any:
        plain = adamw(model)
        sum(param.sum() for param in model.parameters()).backward()
        apply_steps(plain)
        given = offload.Offloaded(plain) if system == "infinity" else plain
        given.register_step_post_hook(lambda each, *_: called.append(each))
        return given

    made = Training(Row(optimizer=given_to), system, rank).begin()
    given, before = made.given, made.weights()
    made.backward(0)
    calls: list[Callable[[], Any]] = [
        *(given.step, given.zero_grad, given.state_dict),
        lambda: given.load_state_dict({"state": {}, "param_groups": []}),
        lambda: given.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"use the optimizer that zero\.shard\(\) returned"):
            call()
    assert same(made.weights(), before)
    assert system == "infinity" or not given.state  # a scheduler may keep the object
    made.optimizer.step()
    assert called == [made.optimizer]
    assert not torch.equal(made.weights()["first.weight"], before["first.weight"])


@in_ranks(2)
def test_what_would_have_no_effect(rank: int) -> None:
    """Weights that are set by `.data`, and weights that are passed to backward()."""

    def begun() -> tuple[Training, Any]:
        made = Training(Row(model=Blocks, loss=squared), "zero 3", rank).begin()
        made.train([0])
        return made, made.model

    def by_data(model: Any) -> None:
        model.last.weight.data = torch.ones(4, 8)

    def by_sharded_data(model: Any) -> None:
        model.last.bias.data = 2 * model.last.bias.data

    def by_vector(model: Any) -> None:
        vector_to_parameters(0 * parameters_to_vector(model.parameters()), model.parameters())

    for write in (by_data, by_sharded_data, by_vector):
        made, model = begun()
        wanted = made.weights()
        write(model)
        for call in (lambda made=made: made.backward(1), made.optimizer.step):
            with pytest.raises(RuntimeError, match=r"`\.data` of .* was set.*set_state_dict"):
                call()
        assert same(made.weights(), wanted)
    made, model = begun()
    squared(model, *made.rows(1, rank)).backward(inputs=list(model.parameters()))
    assert made.clip(1.0) == 0  # which has nothing to clip
    with pytest.raises(RuntimeError, match=r"backward\(inputs=weights\) does nothing at stage 3"):
        made.optimizer.step()
    made.train([2])  # goes on
    assert model(batch(3)[0]).requires_grad  # not followed by a backward pass
    made.train([4])
    made.optimizer.step()  # without gradients: nothing, as in torch
