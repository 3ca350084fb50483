"""zero.shard() of models with sharded experts: start values, files, checkpoints between meshes."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_zero_models import STEPS, Net, alone, make_optimizer, mesh, train
from full_states import full_weights
from ranks import in_ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint
from zero_models import assert_close, same

from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import offload, zero


@pytest.mark.parametrize(("stage", "kind"), [(1, "sgd"), (2, "sgd"), (3, "sgd"), (3, "offloaded")])
@in_ranks(4)
def test_from_the_meta_device(rank: int, stage: int, kind: str) -> None:
    """No two experts are equal, which they would be if ranks drew the same numbers.

    https://github.com/laekov/fastmoe/pull/4
    """
    found = []
    for num_shards in (2, 4):
        with torch.device("meta"):
            model = Net(4, *mesh(rank, 4, num_shards))
        torch.manual_seed(5)
        options: dict[str, Any] = {"offload_weights": kind == "offloaded"}
        optimizer = zero.shard(model, make_optimizer(kind, model), stage, **options)
        found.append(full_weights(model))
        loss = nn.functional.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3))
        loss.backward()
        optimizer.step()
    experts = [found[0][f"moe.experts.{i}.0.weight"] for i in range(4)]
    assert not any(one.equal(other) for one, other in itertools.combinations(experts, 2))
    assert same(*found)


def wide(*groups: dist.ProcessGroup | None) -> Any:
    """Weights of experts that are files, and others that stay in memory."""
    torch.manual_seed(0)
    make_expert = lambda: nn.Sequential(nn.Linear(40, 500), nn.Linear(500, 40))  # noqa: E731
    layer = MixtureOfExperts(40, make_expert, 3, group=groups[0], replica_group=groups[1])
    model: Any = nn.Sequential(nn.Linear(6, 40), layer, nn.Linear(40, 3))
    model.forward = partial(checkpoint, model.forward, use_reentrant=False)
    return model


@pytest.mark.parametrize("num_shards", [2, 4])
@in_ranks(4)
def test_from_files(rank: int, num_shards: int, tmp_path: Path) -> None:
    """A run of ZeRO-Infinity goes on from its files, on a rank without experts too."""
    plain = wide(alone(rank), None)
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), range(STEPS), (0, 1))
    groups = mesh(rank, 4, num_shards)
    options: dict[str, Any] = {"offload_weights": True}
    for steps, is_resumed in ((range(2), False), (range(2, STEPS), True)):
        model = wide(*groups)
        made = offload.SGD(model.parameters(), 0.1, to="nvme", path=tmp_path)
        expected = zero.predict_memory(model, made, 3, world_size=4, rank=rank, **options)
        optimizer: Any = zero.shard(model, made, 3, resume=is_resumed, **options)
        assert optimizer.num_steps == steps.start
        train(model, optimizer, steps, (rank, 4))
        packed = sum(unit.packed_row.numel() for unit in optimizer._weights.units)
        assert expected.parameters == packed
        if is_resumed:
            assert_close(full_weights(model), full_weights(plain), 2e-6)
        optimizer.close()


def save(rank: int, num_shards: int, stage: int, folder: Path) -> None:
    model = Net(3, *mesh(rank, 4, num_shards))
    optimizer = zero.shard(model, make_optimizer("adamw", model), stage)
    train(model, optimizer, range(2), (rank, 4))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def go_on(rank: int, num_shards: int, stage: int, folder: Path) -> None:
    plain = Net(3, alone(rank), None)
    train(plain, make_optimizer("adamw", plain), range(STEPS), (0, 1))
    model = Net(3, *mesh(rank, 4, num_shards))
    optimizer = zero.shard(model, make_optimizer("adamw", model), stage)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    train(model, optimizer, range(2, STEPS), (rank, 4))
    assert_close(full_weights(model), full_weights(plain), 2e-6)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 3), (4, 3)), ((4, 3), (2, 2)), ((2, 1), (2, 3))], ids=str
)
def test_checkpoints_go_between_meshes_and_stages(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    """By torch's functions, between numbers of ranks that share the experts.

    https://github.com/pytorch/torchtitan/pull/732
    """
    run_ranks(4, save, *saved, tmp_path)
    run_ranks(4, go_on, *loaded, tmp_path)
