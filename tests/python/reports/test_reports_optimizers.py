"""What users of other libraries reported of Muon, several optimizers, and schedule-free ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from full_states import full_weights
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from whole_optimizers import Averaged, Muon64, by_dimensions, orthogonal

from ringcomm.parallel import get_state_dict as get_whole_state
from ringcomm.parallel import set_state_dict as set_whole_state
from ringcomm.parallel import zero
from ringcomm.parallel.zero.elementwise import optimizers_of

WIDTH = 8


def network() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3, bias=False))


def rows(step: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, WIDTH, generator=generator).chunk(world_size)[rank]


def train(model: Any, optimizer: Any, steps: range, rank: int = 0, world_size: int = 1) -> None:
    for step in steps:
        x = rows(step, rank, world_size)
        (model(x).float() - x[:, :3]).square().mean().backward()
        for each in optimizers_of(optimizer):
            each.step()
            each.zero_grad()


def same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=0, atol=atol)


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


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_is_not_skipped_in_silence(stage: int, options: dict[str, Any], on_meta: bool) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8438 (weights made on the meta device),
    https://github.com/deepspeedai/DeepSpeed/pull/8442 (16 bits), which AdamW or SGD then train."""
    found = run_ranks(2, directions, stage, options, on_meta)
    assert found[0] == found[1]
    assert sum(0.4 < value < 1.6 for value in found[0]) >= WIDTH - 2, found[0]


def save(rank: int, stage: int, folder: Path) -> dict[str, Tensor]:
    model = network()
    optimizer = zero.shard(model, pair(model), stage)
    train(model, optimizer, range(2), rank, 2)
    values, state = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    train(model, optimizer, range(2, 5), rank, 2)
    return full_weights(model)


def load(rank: int, stage: int, folder: Path) -> dict[str, Tensor]:
    model = network()
    optimizer = zero.shard(model, pair(model), stage)
    values, state = get_state_dict(model, optimizer)
    given: dict[str, Any] = {"model": values, "optimizer": state}
    dcp.load(given, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"]
    )
    train(model, optimizer, range(2, 5), rank, 3)
    return full_weights(model)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1)])
def test_a_checkpoint_of_torch_goes_on(saved: int, loaded: int, tmp_path: Path) -> None:
    """https://github.com/databricks/flashoptim/issues/3: the first step after a resume explodes.
    https://github.com/pytorch/pytorch/issues/124546: several optimizers and wrappers."""
    expected = run_ranks(2, save, saved, tmp_path / "checkpoint")[0]
    for found in run_ranks(3, load, loaded, tmp_path / "checkpoint"):
        same(found, expected, 2e-5)


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
    set_whole_state(again, resumed, values, state)
    resumed.train()
    train(again, resumed, range(2, 4), rank, 2)
    same(full_weights(again), full_weights(plain))
