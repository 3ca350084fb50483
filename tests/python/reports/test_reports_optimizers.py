"""What users of other libraries reported of Muon, several optimizers, and schedule-free ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from full_states import full_weights
from one_process import WIDTH, network, same, train
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from whole_optimizers import Averaged, Muon64, by_dimensions, orthogonal

from ringcomm.parallel import get_state_dict as get_whole_state
from ringcomm.parallel import set_state_dict as set_whole_state
from ringcomm.parallel import zero


def pair(model: nn.Module, lr: float = 0.02) -> list[torch.optim.Optimizer]:
    params = [{"params": [*model.parameters()]}]
    return by_dimensions(
        params, lambda own: Muon64(own, lr), lambda own: torch.optim.AdamW(own, lr, eps=1e-3)
    )


class MuonWithAdam(torch.optim.Optimizer):
    """One class for both, by a flag of its groups, as Muon's first implementation has it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.1)
                if group["use_muon"]:
                    assert mean.dim() == 2, "Muon takes matrices"
                    param.sub_(orthogonal(mean), alpha=group["lr"])
                    continue
                square = state.setdefault("square", torch.zeros_like(param))
                square.lerp_(param.grad.square(), 0.05)
                param.sub_(group["lr"] * mean / (square.sqrt() + 1e-3))


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_one_class_with_matrices_and_others(rank: int, stage: int) -> None:
    """https://github.com/KellerJordan/Muon/issues/45, https://github.com/deepspeedai/DeepSpeed/pull/7509:
    parts of a matrix have one dimension."""
    models = network(), network()
    made = [
        MuonWithAdam(
            [
                {
                    "params": [p for p in model.parameters() if (p.dim() == 2) == is_matrix],
                    "use_muon": is_matrix,
                    "lr": 0.02,
                }
                for is_matrix in (True, False)
            ]
        )
        for model in models
    ]
    train(models[0], made[0], range(4))
    train(models[1], zero.shard(models[1], made[1], stage), range(4), rank, 2)
    same(full_weights(models[1]), full_weights(models[0]))


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_a_group_of_frozen_weights_alone(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/7869: one of two optimizers trains nothing."""
    models = network(), network()
    for model in models:
        for param in model.parameters():
            param.requires_grad_(param.dim() == 2)
    made = [pair(model) for model in models]
    train(models[0], made[0], range(3))
    train(models[1], zero.shard(models[1], made[1], stage), range(3), rank, 2)
    same(full_weights(models[1]), full_weights(models[0]))


def directions(rank: int, stage: int, options: dict[str, Any], on_meta: bool) -> list[float]:
    """The singular values of an update of torch's Muon, as shares of the learning rate."""
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 3)
        )
    first = model[0].weight
    muon = torch.optim.Muon([first], 0.5, weight_decay=0.0)
    rest = torch.optim.AdamW([param for param in model.parameters() if param is not first])
    optimizer = zero.shard(model, [muon, rest], stage, **options)
    before = full_weights(model)["0.weight"].float()
    train(model, optimizer, range(1), rank, 2)
    update = (before - full_weights(model)["0.weight"].float()) / 0.5
    return torch.linalg.svdvals(update).tolist()


@pytest.mark.parametrize(
    ("stage", "options", "on_meta"),
    [
        (1, {"param_dtype": torch.bfloat16}, False),
        (2, {}, True),
        (2, {"param_dtype": torch.bfloat16}, True),
        (3, {"param_dtype": torch.bfloat16}, False),
        (3, {}, True),
    ],
)
def test_muon_is_not_skipped_in_silence(stage: int, options: dict[str, Any], on_meta: bool) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8438 (weights made on the meta device),
    https://github.com/deepspeedai/DeepSpeed/pull/8442 (16 bits), which AdamW or SGD then train."""
    found = run_ranks(2, directions, stage, options, on_meta)
    assert found[0] == found[1]
    assert sum(0.4 < value < 1.6 for value in found[0]) >= WIDTH - 2, found[0]


def save(rank: int, stage: int, folder: Path, options: Any) -> dict[str, Tensor]:
    model = network()
    optimizer = zero.shard(model, pair(model), stage)
    train(model, optimizer, range(2), rank, 2)
    values, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    train(model, optimizer, range(2, 5), rank, 2)
    return full_weights(model)


def load(rank: int, stage: int, folder: Path, options: Any) -> dict[str, Tensor]:
    model = network()
    optimizer = zero.shard(model, pair(model), stage)
    values, state = get_state_dict(model, optimizer, options=options)
    given: dict[str, Any] = {"model": values, "optimizer": state}
    dcp.load(given, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=given["model"],
        optim_state_dict=given["optimizer"],
        options=options,
    )
    train(model, optimizer, range(2, 5), rank, 3)
    return full_weights(model)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1)])
def test_a_checkpoint_of_torch_goes_on(
    saved: int, loaded: int, is_flat: bool, tmp_path: Path
) -> None:
    """https://github.com/databricks/flashoptim/issues/3: the first step after a resume explodes.
    https://github.com/pytorch/pytorch/issues/124546: several optimizers and wrappers."""
    arguments = tmp_path / "checkpoint", StateDictOptions(flatten_optimizer_state_dict=is_flat)
    expected = run_ranks(2, save, saved, *arguments)[0]
    for found in run_ranks(3, load, loaded, *arguments):
        same(found, expected, 2e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(3)
def test_ranks_without_a_weight_save_and_load(rank: int, stage: int) -> None:
    """torch steps an optimizer that has no state: on all ranks, or on none."""
    models = network(), network()
    made = []
    for model in models:
        for param in model.parameters():
            param.requires_grad_(param is model[0].weight)
        made.append(zero.shard(model, Muon64([model[0].weight]), stage))
    train(models[0], made[0], range(2), rank, 3)
    options = StateDictOptions(full_state_dict=True, strict=False)
    values, state = get_state_dict(models[0], made[0], options=options)
    set_state_dict(
        models[1], made[1], model_state_dict=values, optim_state_dict=state, options=options
    )
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer, range(2, 4), rank, 3)
    same(full_weights(models[1]), full_weights(models[0]), 0)


class Preconditioned(torch.optim.Optimizer):
    """With a list of matrices as state, no learning rate, and no step of an empty group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            sizes = [param.numel() for param in group["params"]]
            assert max(sizes) > 0
            group["num_steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad.view(len(param), -1)
                state = self.state[param]
                if not state:
                    state["sums"] = [0.1 * torch.eye(n) for n in grad.shape]
                for number, part in enumerate((grad @ grad.T, grad.T @ grad)):
                    state["sums"][number] += part
                left, right = (torch.linalg.inv(torch.linalg.cholesky(x)) for x in state["sums"])
                param.sub_(0.02 * (left @ grad @ right.T).view_as(param))


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_states_of_several_matrices(rank: int, stage: int) -> None:
    """As SOAP's and Shampoo's; its state before zero.shard() moves, and it is saved and loaded."""
    models = network(), network(), network()
    given = [Preconditioned(model.parameters()) for model in models]
    for model, each in zip(models[:2], given, strict=False):
        train(model, each, range(1))
    optimizer = zero.shard(models[1], given[1], stage)
    train(models[0], given[0], range(1, 3))
    train(models[1], optimizer, range(1, 3), rank, 2)
    same(full_weights(models[1]), full_weights(models[0]))
    values, state = get_whole_state(models[1], optimizer, full=True)
    again = zero.shard(models[2], given[2], stage % 3 + 1)
    set_whole_state(models[2], again, values, state)
    train(models[0], given[0], range(3, 5))
    train(models[2], again, range(3, 5), rank, 2)
    same(full_weights(models[2]), full_weights(models[0]))


class Fragile(Muon64):
    """That raises for one weight."""

    def direction(self, mean: Tensor) -> Tensor:
        if mean.shape == (12, WIDTH) and mean.abs().sum() < 1e9:
            raise ArithmeticError("no root of this matrix")
        return super().direction(mean)


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_an_error_of_one_owner_is_one_of_all(rank: int, stage: int) -> None:
    """The other ranks would wait for the weight."""
    model = network()
    matrices = [param for param in model.parameters() if param.dim() == 2]
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    optimizer = zero.shard(model, Fragile(matrices), stage, whole={Fragile})
    with pytest.raises((ArithmeticError, RuntimeError), match=r"no root|on another rank"):
        train(model, optimizer, range(1), rank, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_modes_reach_through_accelerate(rank: int, stage: int) -> None:
    """https://github.com/huggingface/accelerate/issues/4159: eval() of a wrapper does nothing."""
    optimizer_module = pytest.importorskip("accelerate.optimizer")
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    model = network()
    made = optimizer_module.AcceleratedOptimizer(
        zero.shard(model, Averaged(model.parameters()), stage)
    )
    made.train()
    train(model, made.optimizer, range(2), rank, 2)
    trained = full_weights(model)
    made.eval()
    assert any(not torch.equal(value, trained[name]) for name, value in full_weights(model).items())
    made.train()
    same(full_weights(model), trained)


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_saved_in_evaluation_mode(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/schedule_free/issues/22: what was saved is what is
    evaluated, and training goes on from it."""
    plain, model, again = network(), network(), network()
    given = Averaged(plain.parameters())
    optimizer = zero.shard(model, Averaged(model.parameters()), stage)
    get_whole_state(model, optimizer)  # of states that are not there yet
    for mode in ("eval", "train"):
        getattr(optimizer, mode)()
        getattr(given, mode)()
    same(full_weights(model), full_weights(plain), 0)
    train(plain, given, range(4))
    train(model, optimizer, range(2), rank, 2)
    optimizer.eval()
    evaluated = full_weights(model)
    values, state = get_whole_state(model, optimizer, full=True)
    same(values, evaluated, 0)
    resumed = zero.shard(again, Averaged(again.parameters()), stage % 3 + 1)
    resumed.train()
    set_whole_state(again, resumed, values, state)
    resumed.train()
    train(again, resumed, range(2, 4), rank, 2)
    same(full_weights(again), full_weights(plain))
