"""torch.distributed.checkpoint over ringcomm: a curve goes on, also on more or fewer ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from curves import Run, assert_same_run, make_model, sgd, single_process, train, weights_of
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FIRST, REST = range(3), range(3, 5)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def shard() -> tuple[Any, torch.optim.Optimizer]:
    """A model cut for all ranks of the group, and its optimizer."""
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, sgd(model.parameters())


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, momenta = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": momenta}


def save(rank: int, folder: str, is_async: bool) -> list[float]:
    """Three steps. An asynchronous save has a group to itself: it communicates from a thread."""
    model, optimizer = shard()
    losses = train(model, rank, dist.get_world_size(), optimizer, steps=FIRST)
    state = state_of(model, optimizer)
    if is_async:
        group = dist.new_group()
        saved: Any = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        # What is changed meanwhile does not go into the checkpoint.
        train(model, rank, dist.get_world_size(), optimizer, steps=REST)
        saved.result(timeout=30)
        dist.destroy_process_group(group)
    else:
        dcp.save(state, checkpoint_id=folder)
    return losses


def load(rank: int, folder: str) -> Run:
    """The other two steps."""
    model, optimizer = shard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    losses = train(model, rank, dist.get_world_size(), optimizer, steps=REST)
    return Run(losses, weights_of(model))


@pytest.mark.parametrize(
    ("save_world", "load_world", "is_async"),
    [(2, 2, False), (2, 1, False), (2, 4, False), (1, 2, False), (2, 2, True)],
)
def test_resumes(tmp_path: Path, save_world: int, load_world: int, is_async: bool) -> None:
    first = run_ranks(save_world, save, str(tmp_path), is_async)
    results = run_ranks(load_world, load, str(tmp_path))
    for rank, result in enumerate(results):
        # Every rank's own share where there are as many as before; the mean of the shares else.
        before = first[rank] if save_world == load_world else mean(first)
        result.losses = before + result.losses
    assert_same_run(results, single_process())


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


def save_plain(rank: int, folder: str) -> None:
    """Tensors that all ranks have, values of one rank, and a missing key that names itself."""
    state: dict[str, Any] = {"everywhere": torch.arange(5.0), f"of rank {rank}": [rank, "text"]}
    dcp.save(state, checkpoint_id=folder)
    loaded: dict[str, Any] = {"everywhere": torch.zeros(5), f"of rank {rank}": None}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["everywhere"], torch.arange(5.0))
    assert loaded[f"of rank {rank}"] == [rank, "text"]
    with pytest.raises(CheckpointException, match="nobody's"):
        dcp.load({"nobody's": torch.zeros(1)}, checkpoint_id=folder)
    dist.barrier()  # all ranks have failed alike, and the group lives


def test_plain_state(tmp_path: Path) -> None:
    run_ranks(2, save_plain, str(tmp_path))
