"""torch's own tensor parallelism over ringcomm, and ringcomm's norm of its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from full_states import full_weights
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from ringcomm.parallel import clip_grad_norm_


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(13, 10), nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)
        self.out = nn.Linear(10, 13, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return self.out(x + self.down(F.gelu(self.up(self.norm(x)))))


def split_by_torch(mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(Net(), mesh, plan)


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_parallel_with_ignored_labels(rank: int, reduction: str) -> None:
    """https://github.com/pytorch/pytorch/issues/190746: losses over split classes, uneven here."""
    model, alone = split_by_torch(init_device_mesh("cpu", (2,))), Net()
    ids = torch.arange(15).view(3, 5) % 13
    labels = ids.flatten().masked_fill(torch.arange(15) < 4, -100)
    with loss_parallel():
        F.cross_entropy(model(ids).flatten(0, 1), labels, reduction=reduction).backward()
    F.cross_entropy(alone(ids).flatten(0, 1), labels, reduction=reduction).backward()
    for made in (model, alone):
        torch.optim.SGD(made.parameters(), 0.1).step()
    torch.testing.assert_close(full_weights(model), dict(alone.state_dict()))


@in_ranks([2, 3])
def test_shards_of_different_sizes(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/103306: a DTensor grows when it is gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for num_rows in (1, 2, 5, 7):
        whole = torch.arange(num_rows * 3.0).view(num_rows, 3)
        for placement in (Shard(0), Shard(1), Replicate()):
            for other in (Shard(0), Shard(1), Replicate()):
                placed = distribute_tensor(whole, mesh, [placement]).redistribute(mesh, [other])
                assert torch.equal(placed.full_tensor(), whole)
            total = DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [placement])
            assert torch.equal(total.full_tensor(), whole * mesh.size())


@in_ranks(4)
@pytest.mark.slow
def test_the_norm_of_torchs_shards_on_two_meshes(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/180346: gradients on different meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, alone = split_by_torch(mesh["tp"]), Net()
    fully_shard(model, mesh=mesh["dp"])
    rows = [torch.arange(12).view(3, 4) % (13 - source) for source in range(2)]
    ids = rows[mesh["dp"].get_local_rank()]
    with loss_parallel():
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    for source in rows:
        (F.cross_entropy(alone(source).flatten(0, 1), source.flatten()) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
    assert float(clip_grad_norm_(model, 0.5)) == pytest.approx(norm, rel=1e-4)
    for made in (model, alone):
        torch.optim.SGD(made.parameters(), 0.1).step()
    torch.testing.assert_close(full_weights(model), dict(alone.state_dict()))
