"""Faults of saving and loading that users of other libraries reported, looked for here."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from full_states import full_weights
from ranks import in_ranks
from rows import EACH, STAGES, Row, Training, trained_by
from steps import train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict as get_by_torch
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from whole_optimizers import EachWeight, elementwise, whole
from zero_models import loss_of

from ringcomm.nn import ColumnParallelLinear
from ringcomm.parallel import get_state_dict, pipeline, set_state_dict, zero

safetensors = pytest.importorskip("safetensors.torch")

SYSTEMS = (EACH, *STAGES)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: Any, optimizer: Any, steps: int = 2, x: Tensor | None = None) -> None:
    x = torch.ones(2, 7) if x is None else x
    for step in range(steps):
        train_step(model(x * (step + 1)).square().sum(), optimizer)


def same(one: Any, other: Any) -> None:
    assert_close(one, other, rtol=0, atol=0)


def with_empty_group(lr: float, model: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": lr},
        {"params": []},
        {"params": model[2].parameters(), "lr": 2 * lr},
    ]
    return torch.optim.AdamW(groups, lr=lr)


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_options_of_schedulers_survive_beside_an_empty_group(rank: int, system: str) -> None:
    """https://github.com/pytorch/pytorch/issues/143828 and 140900,
    https://github.com/NVIDIA/apex/issues/766: groups lose lr or initial_lr, or a scheduler keeps
    the groups of before."""
    both = [
        Training(Row(model=net, optimizer=partial(with_empty_group, lr)), system, rank).begin()
        for lr in (0.1, 9.0)
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(each.optimizer, 1, 0.5) for each in both]
    first, again = both
    first.train(range(2))
    schedulers[0].step()
    set_state_dict(again.model, again.optimizer, *first.save())
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    groups = again.optimizer.param_groups
    assert [group["initial_lr"] for group in groups] == [0.1, 0.1, 0.2]
    for each in schedulers:
        each.step()
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.025, 0.025, 0.05]
    for made in both:
        made.train(range(2, 4))
    same(again.weights(), first.weights())


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_a_state_dict_does_not_change_with_training(rank: int, system: str) -> None:
    """https://github.com/pytorch/pytorch/pull/145408: what is saved later has later values. Also
    learning rates in tensors, and the state dict that was loaded."""

    def optimizer(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), torch.tensor(0.1), foreach=False)

    first, again = (
        Training(Row(model=partial(net, seed), optimizer=optimizer), system, rank).begin()
        for seed in range(2)
    )
    first.train(range(2))
    saved = get_state_dict(first.model, first.optimizer, full=True)
    before = copy.deepcopy(saved)
    set_state_dict(again.model, again.optimizer, *saved)
    for made in (first, again):
        made.optimizer.param_groups[0]["lr"].mul_(0.5)
        made.train(range(2, 4))
    same(saved[0], before[0])
    same(saved[1]["state"], before[1]["state"])
    assert saved[1]["param_groups"] == before[1]["param_groups"]
    same(again.weights(), first.weights())


class Odd(nn.Module):
    """Tied, frozen and parametrized weights, without dimensions or not in rows; a submodule
    "module"; buffers of all types, also not saved."""

    def __init__(self, has_scalar: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.tied.weight
        self.module = nn.Linear(6, 6).requires_grad_(False)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 4))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.conv = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.batch = nn.BatchNorm1d(4)
        self.gru = nn.GRU(4, 4)
        self.in_dict = nn.ParameterDict({"k": torch.ones(4)})
        self.scale = nn.Parameter(torch.tensor(2.0)) if has_scalar else 2.0
        buffers = {
            "flag": torch.tensor(True),
            "numbers": torch.arange(5, dtype=torch.int8),
            "turns": torch.tensor([1 + 2j, 3j]),
            "sixteen": torch.full((3,), 0.3, dtype=torch.bfloat16),
            "columns": torch.arange(6.0).view(2, 3).t(),
            "empty": torch.zeros(0, 3),
            "none": None,
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.spectral(self.normed(self.module(self.again(self.tied(x)))))
        x = self.gru(self.batch(x + self.in_dict["k"]))[0] * self.scale
        return self.conv(x[:, :, None, None])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@in_ranks(2)
def test_all_that_a_module_saves_is_saved_and_loaded(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1896, 3090 and 1101,
    https://github.com/huggingface/accelerate/issues/3898: tied or frozen weights or buffers are
    missing; names are those that torch gives to one process."""
    x = torch.arange(12.0).view(2, 6) / 12
    alone = Odd(True)
    adamw = torch.optim.AdamW(trained(alone), 0.01)
    train(alone, adamw, x=x)
    values, state = get_by_torch(alone, adamw)
    states: Any = state["state"]
    for system in SYSTEMS:
        stage = STAGES.index(system) + 1 if system in STAGES else 0
        model = Odd(stage != 3)  # stage 3 refuses weights without dimensions
        optimizer = trained_by(system, model, torch.optim.AdamW(trained(model), 0.01))
        train(model, optimizer, x=x)
        saved = get_state_dict(model, optimizer, full=True)
        missing = {"scale"} if stage == 3 else set()
        assert values.keys() - saved[0].keys() == states.keys() - saved[1]["state"].keys()
        assert values.keys() - saved[0].keys() == missing
        if stage != 3:
            assert_close(saved[0], values, rtol=1e-4, atol=1e-4)
            assert_close(saved[1]["state"], states, rtol=1e-3, atol=1e-4)
            assert list(saved[0]) == list(alone.state_dict())
        for from_rank0 in (False, True):
            other = Odd(stage != 3)
            with torch.no_grad():
                for value in (*other.parameters(), *other.buffers()):
                    value.zero_()
            resumed = trained_by(system, other, torch.optim.AdamW(trained(other), 0.01))
            given = saved if not from_rank0 or rank == 0 else ({}, {})
            set_state_dict(other, resumed, *given, rank0_only=from_rank0)
            again = get_state_dict(other, resumed, full=True)
            same(again[0], saved[0])
            same(again[1]["state"], saved[1]["state"])
        resumed.load_state_dict(optimizer.state_dict())  # torch's format


@in_ranks(2)
def test_two_parameters_in_one_memory_are_both_saved(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/3033: of shared weights one is kept."""
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    model[1].weight.data = model[0].weight.data
    values = full_weights(model)
    assert sorted(values) == ["0.weight", "1.weight"]
    set_state_dict(model, None, {name: 2 * value for name, value in values.items()})
    same(model[1].weight.detach(), 2 * values["0.weight"])
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


@whole
class Factors(EachWeight):
    """Keeps its states in containers, as Shampoo does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def update(self, group: dict[str, Any], param: Any) -> None:
        start = {0: torch.zeros_like(param), "by": ["a"]}
        param.sub_(self.state[param].setdefault("factors", start)[0].add_(param.grad), alpha=0.1)


@elementwise
class ElementFactors(Factors):
    pass


@in_ranks(2)
def test_states_in_containers_are_kept_or_refused(rank: int) -> None:
    """https://github.com/meta-pytorch/torchrec/pull/1533: nested states are lost. Those of a
    sharded weight are of one rank: they would be taken for all."""
    model, other = net(), net(1)
    optimizer, resumed = Factors(model.parameters()), Factors(other.parameters())
    train(model, optimizer)
    set_state_dict(other, resumed, *get_state_dict(model, optimizer, full=True))
    train(model, optimizer)
    train(other, resumed)
    same(full_weights(other), full_weights(model))
    part = nn.Sequential(ColumnParallelLinear(7, 4, bias=False, gather_output=True))
    of_part: Any = ElementFactors(part.parameters())
    train(part, of_part, 1)
    for is_full in (False, True):
        with pytest.raises(ValueError, match=r"the state factors of 0\.weight, which is sharded"):
            get_state_dict(part, of_part, full=is_full)


@in_ranks(2)
def test_optimizers_of_whole_weights_are_refused_for_parts(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8437: Muon's update depends on the ranks.

    parallelize() refuses them itself. A stage of a pipeline has whole weights.
    """
    model = nn.Sequential(
        ColumnParallelLinear(7, 4, bias=False, gather_output=True), nn.Linear(4, 4, bias=False)
    )
    before = full_weights(model)
    for kind in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS):
        model(torch.ones(2, 7)).sum().backward()
        optimizer: Any = kind(model.parameters())
        with pytest.raises(TypeError, match=f"{kind.__name__} (needs full weights|updates sev)"):
            optimizer.step(lambda: torch.zeros(()))
        same(full_weights(model), before)
    torch.optim.Muon(model[1].parameters()).step()
    blocks: Any = net()[::2]
    pipe = pipeline.Pipeline(blocks, nn.functional.mse_loss, num_microbatches=2)
    matrices = [param for param in pipe.parameters() if param.dim() == 2]
    pipe.step(torch.ones(2, 7), torch.ones(2, 3))
    torch.optim.Muon(matrices).step()
    with pytest.raises(TypeError, match="LBFGS updates several weights"):
        torch.optim.LBFGS(matrices).step(lambda: 0.0)


@in_ranks(2)
def test_masters_are_not_rounded_by_a_resume(rank: int) -> None:
    """https://github.com/TensorAuto/OpenTau/issues/185: float32 values begin from 16 bits again.
    A file of torch.save() is read with weights_only."""
    row = Row(
        model=lambda: net().bfloat16(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
        loss=lambda model, x, y: loss_of(model, x.bfloat16(), y),
    )
    for system in STAGES[:2]:
        first, again = (Training(row, system, rank).begin() for _ in range(2))
        first.train(range(3))
        torch.save(first.save(), file := io.BytesIO())
        file.seek(0)
        set_state_dict(again.model, again.optimizer, *torch.load(file, weights_only=True))
        for each in (first, again):
            each.train(range(3, 6))
        same(again.save()[0], first.save()[0])
        same(again.save()[1]["state"], first.save()[1]["state"])


@in_ranks(2)
def test_an_average_of_weights_is_one_of_its_own(rank: int, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/28630: a copy shares the flat memory, or
    a file of it has one weight. The names of AveragedModel are its own."""
    for stage in (1, 2):
        model = net()
        optimizer = zero.shard(model, torch.optim.AdamW(model.parameters(), 0.1), stage)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(2):
            train(model, optimizer, 1)
            average.update_parameters(model)
        saved, now = full_weights(average), full_weights(model)
        assert set(saved) == {"n_averaged", *(f"module.{name}" for name in now)}
        assert not torch.equal(saved["module.0.weight"], now["0.weight"])
        path = str(tmp_path / f"{stage}, {rank}")
        safetensors.save_model(average, path)
        same(safetensors.load_file(path), saved)


class Thirds(nn.Linear):
    """A module whose saved format is another than its weights'."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = (destination.pop(prefix + "weight").detach(), "int3")


@in_ranks(2)
def test_what_only_its_module_can_load_is_refused(rank: int) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/1860: saved values that are no weights
    do not come back."""
    model: Any = nn.Sequential(Thirds(7, 5))
    values = full_weights(model)
    assert sorted(values) == ["0.bias", "0.packed"]
    with pytest.raises(ValueError, match=r"0\.packed is made by a module's own saving code"):
        set_state_dict(model, None, values)
    set_state_dict(model, None, {"0.bias": torch.ones(5)}, strict=False)
    same(model[0].bias.detach(), torch.ones(5))
