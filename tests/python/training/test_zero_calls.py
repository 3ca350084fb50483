"""zero.shard(): what programs do around it, besides the rows of test_loops.py."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run, make_model, single_process, weights_of
from curves import train as train_shares
from full_states import full_state, full_weights, load_full_state
from ranks import in_ranks, run_ranks
from rows import (
    ALONE,
    SHARDED,
    STAGES,
    Row,
    Training,
    adamw,
    check,
    momentum,
    muon,
    sgd,
    trained_by,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from whole_optimizers import AdaLomoOracle, Averaged
from zero_models import (
    BUCKET_BYTES,
    STEPS,
    Net,
    assert_close,
    batch,
    loss_of,
    make,
    make_optimizer,
    same,
    train,
    train_alone,
    weights,
)

from ringcomm import MismatchError
from ringcomm.parallel import zero


class Odd(nn.Sequential):
    """With a weight without elements."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, 3), nn.Linear(3, 3))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[1](self[0](x))
        return out


def with_empty_group(model: Any) -> Any:
    return torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], 0.1)


def closures_and_a_scheduler(made: Training) -> float:
    schedule = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            made.optimizer.zero_grad()
            return torch.tensor(made.backward(step))

        assert isinstance(made.optimizer.step(closure), Tensor)
        schedule.step()
    rate: float = made.optimizer.param_groups[1]["lr"]
    return rate


@in_ranks(3)
def test_odd_groups(rank: int) -> None:
    """An empty parameter group, weights without elements, schedulers and closures."""
    row = Row(closures_and_a_scheduler, Odd, with_empty_group, num_ranks=3)
    check(rank, row, "zero 2")


@in_ranks(2)
def test_a_model_can_be_sharded_again(rank: int) -> None:
    """What has lost its optimizer can have another; hooks of the first are mute."""
    model, first = make(2)
    train(model, first, rank, 2, range(1))
    state = full_state(first)
    del first
    gc.collect()
    optimizer = make_optimizer(model, "momentum")
    second = zero.shard(model, optimizer, 1, bucket_bytes=BUCKET_BYTES)
    load_full_state(second, state)
    train(model, second, rank, 2, range(1, STEPS))
    assert_close(weights(model), train_alone("momentum"))


@pytest.mark.parametrize("stage", [1, 2])
@in_ranks(2)
def test_weights_that_are_loaded_later_count(rank: int, stage: int) -> None:
    """A state_dict of the model that is loaded after zero.shard() counts, for the masters too."""
    model, optimizer = make(stage, "sgd", param_dtype=torch.bfloat16)
    train(model, optimizer, rank, 2, range(2))
    loaded = {name: torch.full_like(value, 0.5) for name, value in weights(model).items()}
    model.load_state_dict(loaded)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, rank, 2, range(1))
    assert same(weights(model), loaded)
    masters = [state["master"] for state in full_state(optimizer)["state"].values()]
    assert masters
    assert all(bool((master == 0.5).all()) for master in masters)


@in_ranks(2)
def test_states_are_those_of_rank_0(rank: int) -> None:
    """Of a given optimizer that has made a step, as the weights are."""
    model = Net()
    given = make_optimizer(model, "momentum")
    loss_of(model, *batch(rank)).backward()
    given.step()
    wanted: list[Any] = [[state["momentum_buffer"].clone() for state in given.state.values()]]
    dist.broadcast_object_list(wanted, 0)
    found = full_state(zero.shard(model, given, 1))["state"]
    assert len(found) == len(wanted[0])
    for state, value in zip(found.values(), wanted[0], strict=True):
        assert torch.equal(state["momentum_buffer"], value)


def make_redundant() -> tuple[Any, Any]:
    """Several buckets."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    return model, optimizer


def train_redundant(rank: int) -> tuple[Run, int]:
    """Half-way the states are gathered on one rank, and given to a new optimizer on all."""
    model, optimizer = make_redundant()
    losses = train_shares(model, rank, 2, optimizer, steps=range(3))
    optimizer.consolidate_state_dict(to=1)
    states: list[Any] = [optimizer.state_dict() if rank == 1 else None]
    dist.broadcast_object_list(states, 1)
    resumed, other = make_redundant()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(states[0])
    losses += train_shares(resumed, rank, 2, other, steps=range(3, 5))
    num_momenta = sum("momentum_buffer" in state for state in other.optim.state.values())
    return Run(losses, weights_of(resumed)), num_momenta


def test_zero_redundancy_optimizer() -> None:
    """torch's, over ringcomm: the losses of one process, states in shards."""
    results = run_ranks(2, train_redundant)
    assert_same_run([run for run, _ in results], single_process())
    assert sum(count for _, count in results) == len(list(make_model().parameters()))


@pytest.mark.parametrize(
    ("kind", "cycled"), [("adamw", {"betas"}), ("momentum", {"momentum"}), ("muon", set())]
)
@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(1)
def test_momentum_is_cycled_where_all_groups_have_it(
    rank: int, stage: int, kind: str, cycled: set[str]
) -> None:
    """OneCycleLR asks the defaults, and then sets the option in every group."""
    _, optimizer = make(stage, kind)
    assert optimizer.defaults.keys() & {"betas", "momentum"} == cycled
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, optimizer, 0.1, total_steps=4)
    if cycled:
        cycle(max_momentum=0.75)
        for group in optimizer.param_groups:
            assert 0.75 in (group.get("momentum"), group.get("betas", (0,))[0])
    else:
        with pytest.raises(ValueError, match="must support momentum"):
            cycle()
        cycle(cycle_momentum=False)


@pytest.mark.parametrize("system", STAGES)
@in_ranks(2)
def test_copies(rank: int, system: str) -> None:
    """Offloaded states cannot be assigned, and no sharded optimizer copied; models can be."""
    made = Training(Row(optimizer=adamw), system, rank).begin()
    model: Any = made.model
    made.train(range(2))
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled: save ringcomm"):
            call(made.optimizer)
    if system != "zero 3":
        values, file = weights(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = copy.deepcopy(model), torch.load(file, weights_only=False)
        average = AveragedModel(model)
        made.train([2])
        for found in (*copies, average.module):
            assert same(weights(found), values)
            x, y = batch(0)
            loss_of(found.to(torch.float64), x.double(), y).backward()
        average.update_parameters(model)
        assert not same(weights(average.module), values)
    model, optimizer = make(int(system[-1]), "adamw", place={"to": "cpu"})
    train(model, optimizer, rank, 2, range(1))
    with pytest.raises(AttributeError, match=r"use load_state_dict\(\) to replace them"):
        optimizer.state = {}
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("system", "options", "made_on"),
    [
        ("zero 1", {"param_dtype": torch.bfloat16}, "cpu"),
        ("zero 2", {}, "meta"),
        ("zero 2", {"param_dtype": torch.bfloat16}, "meta"),
        ("zero 3", {"param_dtype": torch.bfloat16}, "cpu"),
        ("zero 3", {}, "meta"),
    ],
)
@in_ranks(2)
def test_muon_is_not_skipped_in_silence(
    rank: int, system: str, options: dict[str, Any], made_on: str
) -> None:
    """The singular values of an update are shares of the learning rate.

    https://github.com/deepspeedai/DeepSpeed/pull/8438 (weights made on the meta device),
    https://github.com/deepspeedai/DeepSpeed/pull/8442 (16 bits), which AdamW or SGD then train.
    """

    def model() -> nn.Module:
        with torch.device(made_on):
            return nn.Sequential(nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 3))

    kind = partial(torch.optim.Muon, lr=0.5, weight_decay=0.0)
    row = Row(model=model, optimizer=partial(muon, kind=kind), options=options)
    made = Training(row, system, rank).begin()
    before = made.weights()["0.weight"]
    made.train([0])
    values = torch.linalg.svdvals((before - made.weights()["0.weight"]) / 0.5).tolist()
    assert sum(0.4 < value < 1.6 for value in values) >= 5, values


@pytest.fixture
def needs_accelerate() -> None:
    pytest.importorskip("accelerate")


@pytest.mark.usefixtures("needs_accelerate")
@pytest.mark.parametrize("system", STAGES)
@in_ranks(2)
def test_modes_reach_through_accelerate(rank: int, system: str) -> None:
    """https://github.com/huggingface/accelerate/issues/4159: eval() of a wrapper does nothing."""
    import accelerate
    import accelerate.optimizer as optimizer_module

    accelerate.Accelerator(cpu=True)
    row = Row(optimizer=lambda model: Averaged(model.parameters()))
    made = Training(row, system, rank).begin()
    wrapped = optimizer_module.AcceleratedOptimizer(made.optimizer)
    wrapped.train()
    made.train(range(2))
    trained = made.weights()
    wrapped.eval()
    assert not same(made.weights(), trained)
    wrapped.train()
    assert_close(made.weights(), trained)


@pytest.mark.parametrize("system", STAGES)
@in_ranks(2)
def test_hooks_of_saving_and_loading(rank: int, system: str) -> None:
    """https://github.com/pytorch/pytorch/pull/105953: those of the given optimizer move."""
    seen: list[str] = []

    def replace(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("replace")
        return {**state, "by": "a hook"}

    def hook(given: Any) -> None:
        given.register_state_dict_post_hook(replace)
        given.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["by"]))

    made = Training(Row(optimizer=adamw, early=hook), system, rank).begin()
    made.optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    made.optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    made.train([0])
    seen.clear()
    made.load_own_state()
    assert seen == ["before", "replace", "a hook", "after"]


@pytest.mark.parametrize("system", [*STAGES, "Lomo", "AdaLomo"])
@in_ranks(2)
def test_two_models_through_each_other(rank: int, system: str) -> None:
    """A generator's gradients pass a discriminator that has its own optimizer.

    https://github.com/deepspeedai/DeepSpeed/issues/4923,
    https://github.com/Lightning-AI/pytorch-lightning/issues/19773

    LOMO writes weights in the pass, so that the discriminator is frozen in the generator's.
    """
    is_lomo = "Lomo" in system
    of_lomo = sgd if system == "Lomo" else lambda model: AdaLomoOracle([*model.parameters()])
    optimizer = of_lomo if is_lomo else adamw

    def trained(system: str) -> dict[str, Tensor]:
        maker, judge = (
            Training(
                Row(model=partial(perceptron, size), optimizer=optimizer), system, rank
            ).begin()
            for size in (7, 1)
        )
        for step in range(3):
            fakes = [maker.model(maker.rows(step, of)[0]) for of in maker.ranks]
            judge.optimizer.zero_grad()
            for of, fake in zip(maker.ranks, fakes, strict=True):
                real, own = judge.model(maker.rows(step, of)[0]), judge.model(fake.detach())
                ((real.mean() - own.mean()) / len(fakes)).backward()
            judge.optimizer.step()
            maker.optimizer.zero_grad()
            judge.model.requires_grad_(not is_lomo)
            for fake in fakes:
                (judge.model(fake).mean() / len(fakes)).backward()
            judge.model.requires_grad_(True)
            maker.optimizer.step()
        found = judge.weights()
        return maker.weights() | {f"judge.{name}": value for name, value in found.items()}

    assert_close(trained(system), trained(ALONE))


def perceptron(size: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, size))


@pytest.mark.parametrize("system", STAGES)
@in_ranks(2)
def test_evaluated_in_16_bits_and_saved(rank: int, system: str) -> None:
    """https://github.com/pytorch/pytorch/issues/104770: a forward pass without a backward
    pass, then a checkpoint, which must have the float32 values."""
    row = Row(optimizer=adamw, options={"param_dtype": torch.bfloat16})
    first, again = (Training(row, system, rank).begin() for _ in range(2))
    first.train(range(2))
    first.model.eval()
    with torch.inference_mode():
        expected = first.model(batch(5)[0])
    values, state = get_state_dict(first.model, first.optimizer)
    set_state_dict(
        *(again.model, again.optimizer),
        model_state_dict=values,
        optim_state_dict=copy.deepcopy(state),
    )
    with torch.inference_mode():
        assert torch.equal(again.model(batch(5)[0]), expected)
    for each in (first, again):
        each.model.train()
        each.train(range(2, 4))
    assert same(again.weights(), first.weights())


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("system", SHARDED)
@in_ranks(1)
def test_making_shards_is_linear_in_the_units(rank: int, system: str, where: str) -> None:
    """https://github.com/pytorch/pytorch/issues/95728: a slow start of models of many modules."""
    counts = []
    for num_layers in (8, 32, 128):  # the first warms up
        with torch.device(where):
            model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(num_layers)])
        num_calls = 0

        def count(_: Any, event: str, __: Any) -> None:
            nonlocal num_calls
            num_calls += event == "call"

        sys.setprofile(count)
        try:
            trained_by(system, model, momentum(model))
        finally:
            sys.setprofile(None)
        counts.append(num_calls)
    assert counts[2] < 5 * counts[1], counts  # 16 times as many if each unit walked the model


def one_rank_alone(rank: int, method: str) -> str:
    made = Training(Row(optimizer=momentum), "zero 1", rank).begin()
    model, optimizer = made.model, made.optimizer
    made.train([0])
    made.backward(1)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": optimizer.state_dict,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(math.inf),
        "get_state_dict": lambda: full_weights(model),
    }
    if rank == 1:
        calls[method] = optimizer.step
    with pytest.raises(MismatchError) as found:
        calls[method]()
    return str(found.value)


@pytest.mark.parametrize("method", ["state_dict", "clip_grad_norm_", "get_state_dict"])
def test_a_method_that_one_rank_calls_is_named(method: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/797: rank 0 alone saves, and hangs."""
    first, second = run_ranks(2, one_rank_alone, method, fresh=True)
    assert first.endswith(f"this rank is in {method}()"), first
    assert second.endswith("this rank is in step()"), second
